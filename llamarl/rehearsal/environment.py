"""The environments of a rehearsal: the recipe's own, in processes of their own as in a run, with a
record of what was said, and with faults."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from llamarl.cluster.sockets import Channel
from llamarl.core.records import StageStatus, TurnItem, TurnResult
from llamarl.metrics.span import Spans
from llamarl.model.prompt_rules import messages_of
from llamarl.model.tokenizer import ASSISTANT
from llamarl.rehearsal.faults import MADE, SLOW_S, Injector
from llamarl.scoring.definition import Schema
from llamarl.scoring.environment import EnvironmentSpec, EnvironmentWorker, PlayedEpisode
from llamarl.scoring.turn_format import TurnFormat, TurnText
from llamarl.scoring.user_code.pool import Call, Failure
from llamarl.scoring.user_code.watchdog import descendants

Message = dict[str, Any]
TOLD, PROGRAM = "told", "program"
"""In place of a fault's name: a tool failed and the model was told, a program lost its connection.
"""


@dataclass(slots=True)
class PlayedTurn:
    """A turn of a policy and what followed: the `text` and the `calls` that were read, each with
    its name and what is wrong with it; the `whole` text, and with special tokens (`raw`); the
    messages with which the environment answered; the names of its tools that failed, and of those
    among them that had been called rightly (`raised`); and the `seconds` until it had answered, or
    None for an agent, which works as it likes."""

    conversation: int
    raw: str
    whole: str
    num_tokens: int
    text: str
    calls: list[tuple[str, str]]
    said: list[Message] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)
    seconds: float | None = None


@dataclass(slots=True)
class Transcript:
    """A conversation as a client knows it; `ends` has the number of messages after each turn of the
    policy, of which the first `num_before` were written in another one, where it branches off."""

    messages: list[Message]
    schemas: list[Schema]
    ends: list[int] = field(default_factory=list)
    num_before: int = 0

    def add(self, turn: TurnText, *said: Message) -> None:
        """Add a turn of the policy, and what follows it."""
        self.messages.append(_written(turn))
        self.ends.append(len(self.messages))
        self.messages += said

    def before(self, turn: int) -> list[Message]:
        """Return the messages that were there before this turn, from 0, in it."""
        ends = self.ends[self.num_before :]
        return self.messages[: ends[turn] - 1] if turn < len(ends) else [*self.messages]


@dataclass(slots=True)
class EpisodeLog:
    """What was seen of an episode's last attempt, with the transcripts of its conversations by
    number, and the names of the faults that it met in all attempts."""

    attempt: int = 0
    turns: list[PlayedTurn] = field(default_factory=list)
    transcripts: dict[int, Transcript] = field(default_factory=dict)
    faults: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Held:
    """What the processes of an environment hold: threads, open files, and processes below them."""

    threads: int
    files: int
    processes: int


class RehearsedEnvironment(EnvironmentWorker):
    """The executor of environments, whose calls meet the faults of `injector`. `logs` has what was
    seen of each episode, by row."""

    service = "llamarl.rehearsal.service"

    def __init__(self, spec: EnvironmentSpec, injector: Injector, spans: Spans) -> None:
        super().__init__(spec, rank=0, num_ranks=1, spans=spans)
        self._injector = injector
        self.logs: dict[int, EpisodeLog] = defaultdict(EpisodeLog)
        self._by_key: dict[tuple[int, int], Transcript] = {}  # by row, and an agent's key
        self._forms: dict[tuple[int, int], TurnFormat] = {}  # by row and conversation
        self._num_kills: defaultdict[int, int] = defaultdict(int)  # by pool
        self._num_answered: defaultdict[int, int] = defaultdict(int)  # kills before its last answer
        self._num_asked: defaultdict[tuple[int, int], int] = defaultdict(int)

    async def answer(self, turn: TurnItem, channel: Channel | None = None) -> TurnResult:
        """See `EnvironmentWorker`; the turn goes into the log."""
        log = self.logs[turn.row_id]
        if turn.prompt is not None:
            self.logs[turn.row_id] = log = EpisodeLog(turn.attempt, faults=log.faults)
            if not self._agent_plays(turn):
                messages = messages_of(turn.prompt.fields, self._spec.data)
                log.transcripts[0] = Transcript(messages, [])
        played = self._read(turn) if turn.ids and log.attempt == turn.attempt else None
        if played is not None:
            log.turns.append(played)
        start_s = time.monotonic()
        result = await super().answer(turn, channel)
        if played is not None and not self._agent_plays(turn):
            played.seconds = time.monotonic() - start_s
        if turn.opens and result.goes_on:
            key, form = self.conversation_of(turn.row_id, turn.conversation)
            self._forms[turn.row_id, turn.conversation] = form
            if (transcript := self._by_key.get((turn.row_id, key))) is not None:
                log.transcripts[turn.conversation] = transcript
            elif turn.conversation in log.transcripts:
                log.transcripts[turn.conversation].schemas = [*form.kind.schemas]
        return result

    def form_of(self, row_id: int, conversation: int) -> TurnFormat:
        """Return the format of the turns in a conversation that is, or was, played here."""
        return self._forms[row_id, conversation]

    async def held(self) -> Held:
        """Return what all processes hold, once they have dropped what nothing refers to."""
        for pool in self._pools:
            await pool.run([Call(None, ("tidy", []))])
        own = {pid for pool in self._pools for pid in pool.pids}
        counts = [0, 0]
        for pid in own:
            for place, name in enumerate(("task", "fd")):
                with suppress(OSError):  # it has ended
                    counts[place] += len(os.listdir(f"/proc/{pid}/{name}"))
        threads, files = counts
        return Held(threads, files, len({each for pid in own for each in descendants(pid)}))

    def _agent_plays(self, turn: TurnItem) -> bool:
        return any(kind.is_agent for kind in self._spec.kinds.values())

    def _read(self, turn: TurnItem) -> PlayedTurn | None:
        """Return the record of a turn, of an episode that is known."""
        try:
            key, form = self.conversation_of(turn.row_id, turn.conversation)
        except (KeyError, IndexError):
            return None
        found = form.read(turn.ids)
        raw = self._tokenizer.decode_raw(turn.ids)
        if self._agent_plays(turn):
            self._by_key[turn.row_id, key].add(found)
        calls = [(call.name, call.error) for call in found.calls]
        whole = self._tokenizer.decode(turn.ids)
        return PlayedTurn(turn.conversation, raw, whole, len(turn.ids), found.text, calls)

    async def _ask(self, episode: PlayedEpisode, method: str, *arguments: Any) -> dict[str, Any]:
        row_id, log = episode.row_id, self.logs[episode.row_id]
        if method not in ("wait", "stream", "counted", "refuse"):
            arguments = await self._inject(episode, method, arguments)
        if method == "reply" and self._meets("drop", episode):
            method = "reply_and_drop"
            log.faults = log.faults - {"drop"} | {PROGRAM}
        num_kills = self._num_kills[episode.pool]
        found = await super()._ask(episode, method, *arguments)
        self._num_answered[episode.pool] = num_kills
        if method == "begin" and found["messages"] is not None:
            log.transcripts[0] = Transcript([*found["messages"]], [])
        elif method == "take_turn" and log.turns:
            turn = log.turns[-1]
            turn.said = found["messages"]
            turn.failed = [name for name, _, has_failed in found["calls"] if has_failed]
            pairs = zip(found["calls"], arguments[1], strict=True)
            turn.raised = [told[0] for told, (_, _, error) in pairs if told[2] and not error]
            if found["messages"]:
                text, calls = arguments
                if episode.format.family == "tagged":  # the template knows no calls
                    text, calls = turn.whole, []
                log.transcripts[0].add(TurnText(text, calls), *found["messages"])
        elif method == "wait":
            for event in found["events"]:
                self._hear(row_id, event)
        return found

    def _hear(self, row_id: int, event: dict[str, Any]) -> None:
        """Keep the messages of an agent's request."""
        if "messages" not in event or "count" in event:
            return
        key = row_id, event["conversation"]
        if "schemas" not in event:
            self._by_key[key].messages += event["messages"]
            return
        new = Transcript([*event["messages"]], event["schemas"])
        if event["after"] is not None:
            other, num_turns = event["after"]
            before = self._by_key[row_id, other]
            new.ends, new.num_before = before.ends[:num_turns], num_turns
            new.messages = [*before.messages[: new.ends[-1]], *new.messages]
        self._by_key[key] = new

    async def _inject(
        self, episode: PlayedEpisode, method: str, arguments: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Let a call meet its faults; return its arguments. Raises Failure for one that fails."""
        row_id, faults = episode.row_id, self.logs[episode.row_id].faults
        self._num_asked[row_id, episode.attempt] += 1
        if self._meets("slow", episode):
            await asyncio.sleep(SLOW_S)
        is_new = self._num_answered[episode.pool] < self._num_kills[episode.pool]
        if not is_new and self._meets("kill", episode):
            self._num_kills[episode.pool] += 1
            for each in self._episodes.values():  # all in that process begin again
                if each.pool == episode.pool:
                    self.logs[each.row_id].faults.add("kill")
            for pid in self._pools[episode.pool].pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if method != "begin" and self._meets("fail", episode):
            if method == "take_turn" and arguments[1] and not episode.kind.has_step:
                faults.discard("fail")
                faults.add(TOLD)
                text, calls = arguments
                return text, [[name, given, error or MADE] for name, given, error in calls]
            raise Failure(StageStatus.RAISED, f"{method}: {MADE}")
        return arguments

    def _meets(self, name: str, episode: PlayedEpisode) -> bool:
        """Return whether a call meets this fault, and note it."""
        row_id, attempt = episode.row_id, episode.attempt
        place = self._num_asked[row_id, attempt]
        found = self._injector.meets(name, row_id, attempt, place)
        if found:
            self.logs[row_id].faults.add(name)
        return found


def _written(turn: TurnText) -> Message:
    """Return a turn as the message that a client keeps of it."""
    good = [
        {"name": name, "arguments": arguments} for name, arguments, error in turn.calls if not error
    ]
    message: Message = {"role": ASSISTANT, "content": turn.text}
    if good:
        message["tool_calls"] = [{"type": "function", "function": each} for each in good]
    return message
