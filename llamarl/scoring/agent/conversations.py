"""The conversations of an agent's episode in the environment's executor, between the replica that
writes them, which asks what comes next in each, and the process of the program."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from llamarl.core.config import DataConfig, EnvironmentConfig
from llamarl.core.errors import mark_seen
from llamarl.core.records import (
    EPISODE_LIMITS,
    EpisodeState,
    Prompt,
    StageStatus,
    TurnItem,
    TurnOptions,
    TurnResult,
    read_json,
)
from llamarl.model.prompt_rules import make_prompt
from llamarl.model.tokenizer import Tokenizer
from llamarl.scoring.agent.turns import TOO_LONG
from llamarl.scoring.turn_format import TurnFormat, TurnFormats
from llamarl.scoring.user_code.pool import Failure

Ask = Callable[..., Awaitable[dict[str, Any]]]
"""A call of a method of the episode's process, which raises Failure."""
INVALID_REQUEST = "invalid_request"


@dataclass(slots=True, eq=False)
class PlayedConversation:
    """A conversation that a replica writes: its `key` in the program's process, the ids of its
    prompt and of its response so far, with the number of them after each turn. `room` is the most
    that an observation may have; `asked` waits for it. `begun` are the ids of a turn that streams,
    and `told` its text that the program has."""

    key: int
    format: TurnFormat
    prompt_ids: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    room: int = 0
    asked: asyncio.Future[TurnResult] | None = None
    options: TurnOptions = field(default_factory=TurnOptions)
    begun: list[int] = field(default_factory=list)
    told: str = ""


class Conversations:
    """The conversations of one episode. `ask` calls its process, `result` makes the result of a
    turn, with the `numbers` that are counted here."""

    def __init__(
        self,
        prompt: Prompt,
        formats: TurnFormats,
        own_format: TurnFormat,
        tokenizer: Tokenizer,
        data: DataConfig,
        config: EnvironmentConfig,
        ask: Ask,
        result: Callable[..., TurnResult],
        numbers: dict[str, float],
    ) -> None:
        self._prompt, self._formats, self._own_format = prompt, formats, own_format
        self._tokenizer, self._data, self._config = tokenizer, replace(data, system=None), config
        self._ask, self._result, self._numbers = ask, result, numbers
        self.played: list[PlayedConversation] = []
        """Those that the replica knows, in the order of its numbers."""
        self._opened: deque[PlayedConversation] = deque()  # that the replica does not know yet
        self._opening: asyncio.Future[TurnResult] | None = None  # for the next of them
        self._room = 0  # the most that a prompt may have
        self._num_tokens = 0
        self._end: TurnResult | Exception | None = None
        self._hearing: asyncio.Task[None] | None = None
        self._telling: set[asyncio.Future[None]] = set()

    async def begin(self, turn: TurnItem) -> TurnResult:
        """Start the program, and return its first request as the prompt."""
        self._room = turn.room
        await self._ask("begin", [])
        self._hearing = asyncio.create_task(self._hear())
        self._hearing.add_done_callback(mark_seen)
        return await self.answer(turn)

    async def answer(self, turn: TurnItem) -> TurnResult:
        """Return the next conversation, or what follows a turn in one. Raises Failure if the
        episode fails, for the question about the next conversation."""
        asked: asyncio.Future[TurnResult] = asyncio.get_running_loop().create_future()
        if turn.opens:
            self._opening = asked
            self._tell()
            return await asked
        conversation = self.played[turn.conversation]
        if self._end is not None:
            return self._closed()
        conversation.ids += turn.ids
        conversation.ends.append(len(conversation.ids))
        conversation.begun, conversation.told = [], ""
        conversation.room, conversation.asked = turn.room, asked
        self._num_tokens += len(turn.ids)
        self._numbers["turns"] += 1
        written = conversation.format.read(turn.ids)
        for call in written.calls:
            tool = call.name if call.name in conversation.format.names else "unknown"
            self._numbers[f"calls/{tool}"] += 1
            self._numbers[f"errors/{tool}"] += bool(call.error)
            self._numbers["malformed"] += bool(call.error)
        text, stopped_by = written.text, ""
        for stop in conversation.options.stop_strings:
            if not turn.is_cut and stop in text:
                text, stopped_by = text.partition(stop)[0], stop
        shown = [self._tokenizer.decode_raw([i]) for i in turn.ids] if turn.logprobs else []
        reply = {
            "text": text,
            "calls": [[each.name, each.arguments] for each in written.calls if not each.error],
            "is_cut": turn.is_cut,
            "stopped_by": stopped_by,
            "begins_in_thought": conversation.format.is_thinking,
            "num_prompt_tokens": len(conversation.prompt_ids) + turn.start,
            "num_tokens": len(turn.ids),
            "logprobs": [*zip(shown, turn.logprobs, strict=True)] if turn.logprobs else [],
        }
        try:
            await self._ask("reply", conversation.key, reply)
        except Failure as failure:
            self._finish(failure)
        return await asked

    def progress(self, turn: TurnItem) -> None:
        """Tell the program the text of a turn that streams, as far as it is sure by now."""
        if self._end is not None or turn.conversation >= len(self.played):
            return
        conversation = self.played[turn.conversation]
        if turn.start != len(conversation.ids) + len(conversation.begun):
            return  # that turn has ended
        conversation.begun += turn.ids
        text = conversation.format.begun(conversation.begun)
        for stop in conversation.options.stop_strings:
            text = text.partition(stop)[0]
            text = text[: max(0, len(text) - len(stop) + 1)]  # the rest may begin it
        if new := text.removeprefix(conversation.told):
            if not text.startswith(conversation.told):
                return
            conversation.told = text
            is_thinking = conversation.format.is_thinking
            telling = self._ask("stream", conversation.key, new, is_thinking)
            task = asyncio.ensure_future(_unless_failed(telling))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    def close(self) -> None:
        """End all that waits here, because the episode does not go on."""
        if self._hearing is not None:
            self._hearing.cancel()
        if self._end is None:
            error = "the episode was given up"
            self._finish(Failure(StageStatus.RAISED, error, is_lost=True))

    async def _hear(self) -> None:
        """Handle what the program does, until its episode ends."""
        try:
            while self._end is None:
                found = await self._ask("wait", self._config.timeout_s)
                for event in found["events"]:
                    if self._end is None:
                        await self._handle(event)
        except Failure as failure:
            self._finish(failure)
        except Exception as error:  # noqa: BLE001 - raised for the replica, which waits
            self._finish(error)

    async def _handle(self, event: dict[str, Any]) -> None:
        if "end" in event:
            return self._finish(await self._over(EpisodeState.DONE))
        if "count" not in event and (limit := self._reached(event)):
            self._numbers[f"limited/{limit}"] += 1
            return self._finish(await self._over(EpisodeState.LIMIT))
        try:
            if "count" in event:
                num_tokens = len(self._render(event["messages"], event["schemas"])[1])
                await self._ask("counted", event["count"], num_tokens)
            elif "schemas" in event:
                self._open(event)
            else:
                self._go_on(event)
        except ValueError as error:
            if "count" in event:
                await self._ask("counted", event["count"], str(error))
            else:
                await self._ask("refuse", event["conversation"], INVALID_REQUEST, str(error))
        except OverflowError as error:
            self._numbers["overlong"] += 1
            await self._ask("refuse", event["conversation"], TOO_LONG, str(error))

    def _reached(self, event: dict[str, Any]) -> str:
        """Return the limit that a request exceeds, if it does."""
        num_opened = len(self.played) + len(self._opened)
        found = (
            self._numbers["turns"] >= self._config.max_turns,
            "schemas" in event and num_opened >= self._config.max_conversations,
            self._num_tokens >= (self._config.max_episode_tokens or math.inf),
        )
        return next((name for name, holds in zip(EPISODE_LIMITS, found, strict=True) if holds), "")

    def _open(self, event: dict[str, Any]) -> None:
        """Open a conversation. Raises ValueError if the chat template refuses it, OverflowError if
        it is too long."""
        messages = event["messages"]
        if event["after"] is None:
            form, ids = self._render(messages, event["schemas"])
        else:
            key, num_turns = event["after"]
            before = self._find(key)
            said = before.ids[: before.ends[num_turns - 1]]
            observation = before.format.observation(messages, said[-1]).tolist()
            form, ids = before.format, (*before.prompt_ids, *said, *observation)
        if len(ids) > self._room:
            raise OverflowError(f"a prompt may have {self._room} tokens, it has {len(ids)}")
        conversation = PlayedConversation(event["conversation"], form, ids)
        conversation.options = _options(event)
        self._opened.append(conversation)
        self._numbers["conversations"] += 1
        self._tell()

    def _go_on(self, event: dict[str, Any]) -> None:
        """Go on with a conversation, as `_open` opens one."""
        conversation = self._find(event["conversation"])
        observation = conversation.format.observation(event["messages"], conversation.ids[-1])
        if len(observation) > conversation.room:
            must = f"{conversation.room} tokens are left for what is added"
            raise OverflowError(f"{must}, which has {len(observation)}")
        conversation.ids += observation.tolist()
        self._numbers["observed_tokens"] += len(observation)
        asked, conversation.asked = conversation.asked, None
        assert asked is not None, "a conversation goes on after a turn"
        options = conversation.options = _options(event)
        ids = tuple(observation.tolist())
        asked.set_result(self._result(EpisodeState.GOES_ON, observation=ids, options=options))

    def _render(
        self, messages: list[dict[str, Any]], schemas: list[dict[str, Any]]
    ) -> tuple[TurnFormat, tuple[int, ...]]:
        """Return the format of turns with these tools, and the ids of a prompt. Raises ValueError
        if the chat template refuses the messages."""
        form = self._formats.of("", schemas) if schemas else self._own_format
        row = {**self._prompt.fields, self._data.prompt_field: messages}
        number, shown = self._prompt.prompt_id, lambda row: form.kind.schemas
        return form, make_prompt(row, number, self._data, self._tokenizer, shown).token_ids

    def _find(self, key: int) -> PlayedConversation:
        return next(each for each in (*self.played, *self._opened) if each.key == key)

    async def _over(self, state: EpisodeState) -> TurnResult:
        """Return the result of the episode, which ends in this state."""
        found = await self._ask("end", state is EpisodeState.LIMIT)
        own = dict(found["own_rewards"])  # by key
        return self._result(
            state,
            reward=float(found["reward"]),
            rewards=tuple(map(float, found.get("rewards", ()))),
            own_rewards=tuple(own.get(each.key) for each in self.played) if own else (),
        )

    def _finish(self, end: TurnResult | Exception) -> None:
        """End the episode: the question about the next conversation gets the result."""
        if self._end is not None:
            return
        self._end = end
        self._tell()
        for conversation in self.played:
            asked, conversation.asked = conversation.asked, None
            if asked is not None and not asked.done():
                asked.set_result(self._closed())

    def _tell(self) -> None:
        """Answer the question about the next conversation, if that is known."""
        asked = self._opening
        if asked is None or asked.done():
            return
        if isinstance(self._end, TurnResult):
            asked.set_result(self._end)
        elif self._end is not None:
            asked.set_exception(self._end)
            mark_seen(asked)  # it may be that its replica is gone
        elif self._opened:
            conversation = self._opened.popleft()
            self.played.append(conversation)
            found: dict[str, Any] = {"prompt_ids": conversation.prompt_ids, "has_more": True}
            found["options"] = conversation.options
            asked.set_result(self._result(EpisodeState.GOES_ON, **found))

    def _closed(self) -> TurnResult:
        return self._result(EpisodeState.CLOSED)


def _options(event: dict[str, Any]) -> TurnOptions:
    """Return the options of the turn that a request asks for."""
    return read_json(TurnOptions, event["options"])


async def _unless_failed(asked: Awaitable[dict[str, Any]]) -> None:
    with suppress(Failure):  # which ends the episode where something waits for it
        await asked
