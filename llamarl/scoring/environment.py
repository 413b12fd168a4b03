"""The executor that answers the turns of episodes.

An episode is played once: a turn of an attempt that this executor does not know, as after its
loss, or of an earlier one, is answered LOST."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from llamarl.cluster.sockets import Answer, Channel, LocalServer, Packet
from llamarl.core.errors import UserCodeError, cancel_all
from llamarl.core.records import EpisodeState, Prompt, StageStatus, TurnItem, TurnResult
from llamarl.metrics.span import Spans
from llamarl.model.prompt_rules import make_prompt, messages_of
from llamarl.model.tokenizer import Tokenizer, load_tokenizer
from llamarl.scoring.definition import kind_of
from llamarl.scoring.environment_link import lost, read_turn, result_header
from llamarl.scoring.specs import EnvironmentSpec
from llamarl.scoring.stage_worker import FailureRate, WorkSpans
from llamarl.scoring.turn_format import TurnFormat, TurnFormats, TurnText
from llamarl.scoring.user_code.calls import Call, Failure, UserCode
from llamarl.scoring.user_code.pool import WorkerPool

Found = dict[str, Any]
"""What a process of environments returns."""


class EpisodeFailed(Exception):  # noqa: N818 - what became of it
    """The environment, or its process, has ended the episode."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.error)
        self.failure = failure


@dataclass(slots=True)
class PlayedEpisode:
    """The `attempt` of a rollout that is played, in the pool of this index; the replica that has it
    asked last by `channel`. `schemas` and `format` are those of its kind, unless its environment
    has opened it with its own. `numbers` are those of its TurnResult."""

    row_id: int
    attempt: int
    prompt: Prompt
    kind: str
    pool: int
    schemas: Sequence[Mapping[str, Any]]
    format: TurnFormat
    channel: Channel | None = None
    numbers: defaultdict[str, float] = field(default_factory=partial(defaultdict, float))


class EnvironmentExecutor:
    """protocols.Environment, with one pool of one process for each of `config.num_workers`, for an
    episode stays in its process."""

    def __init__(self, spec: EnvironmentSpec, *, rank: int, num_ranks: int, spans: Spans) -> None:
        self._spec, self._config = spec, spec.config
        self._work = WorkSpans(spans, "environment")
        code = UserCode(
            service="llamarl.scoring.episodes",
            setup={
                "task_source": spec.task_source,
                "tools": spec.config.tools,
                "limits": asdict(spec.limits),
                "rewards": spec.rewards,
            },
            timeout_s=spec.config.timeout_s,
            label="environment",
            keys="environment.",
        )
        read = lambda call, answer: answer  # noqa: E731
        self._pools = [WorkerPool[Found](code, 1, read) for _ in range(spec.config.num_workers)]
        self._num_played: Counter[int] = Counter(dict.fromkeys(range(len(self._pools)), 0))
        self._episodes: dict[int, PlayedEpisode] = {}  # by row
        self._failures = FailureRate(spec.config.max_failure_rate, code.label, code.keys)
        self._server: LocalServer | None = None
        self._forgetting: set[asyncio.Task[Any]] = set()
        self._tokenizer: Tokenizer | None = None
        self._formats: TurnFormats | None = None

    async def start(self) -> None:
        """Start the processes; ValueError if task.py or the tokenizer does not load, or its chat
        template cannot hold observations."""
        data = self._spec.data
        self._tokenizer = load_tokenizer(self._spec.tokenizer, data.chat_template_kwargs, data.date)
        self._formats = TurnFormats(self._tokenizer, self._spec.kinds, self._config)
        for pool in self._pools:
            await pool.start()
        if self._spec.socket is not None:
            self._server = LocalServer(Path(self._spec.socket), self._answer, self._lose)
        self._work.start()

    async def answer(self, turn: TurnItem) -> TurnResult:
        """See `protocols.Environment`."""
        return await self._play(turn, None)

    async def forget(self, row_ids: Sequence[int]) -> None:
        """See `protocols.Environment`."""
        self._forget([each for row_id in row_ids if (each := self._episodes.get(row_id))])

    async def close(self) -> None:
        """End the processes."""
        if self._server is not None:
            self._server.close()
        await cancel_all(self._forgetting)
        for pool in self._pools:
            pool.close()

    async def _answer(self, packet: Packet) -> Answer:
        if packet.header["ask"] == "forget":
            await self.forget(packet.header["rows"])
            return {}, (), ()
        result = await self._play(read_turn(packet.header), packet.channel)
        return result_header(result), (), ()

    def _lose(self, channel: Channel) -> None:
        """A replica is gone: its episodes begin again elsewhere."""
        self._forget([each for each in self._episodes.values() if each.channel is channel])

    def _forget(self, episodes: Sequence[PlayedEpisode]) -> None:
        """These are played no more, and their processes need not keep them."""
        by_pool: dict[int, list[int]] = {}
        for episode in episodes:
            self._end(episode)
            by_pool.setdefault(episode.pool, []).append(episode.row_id)
        for pool, row_ids in by_pool.items():
            forgetting = self._pools[pool].run([Call(None, ("forget", [row_ids]))])
            task = asyncio.create_task(forgetting)
            self._forgetting.add(task)
            task.add_done_callback(self._forgetting.discard)

    def _end(self, episode: PlayedEpisode) -> None:
        if self._episodes.get(episode.row_id) is episode:
            del self._episodes[episode.row_id]
            self._num_played[episode.pool] -= 1

    async def _play(self, turn: TurnItem, channel: Channel | None) -> TurnResult:
        """What becomes of a turn, whatever it is."""
        known, begins = self._episodes.get(turn.row_id), turn.prompt is not None
        is_known = known is not None and known.attempt == turn.attempt
        is_late = known is not None and known.attempt >= turn.attempt
        if is_late if begins else not is_known:
            return lost(turn)
        if begins and known is not None:
            self._end(known)
        episode = known if is_known else self._new(turn)
        assert episode is not None
        episode.channel = channel
        with self._work.working(1):
            try:
                result = await (self._begin(episode) if begins else self._turn(episode, turn))
            except EpisodeFailed as error:
                self._forget([episode])
                result = _failed(episode, error.failure)
        try:
            self._failures.add([result])
        except UserCodeError as error:
            return replace(result, error=str(error), ends_run=True)
        return result

    def _new(self, turn: TurnItem) -> PlayedEpisode:
        prompt = turn.prompt
        assert prompt is not None
        assert self._formats is not None
        kind = kind_of(prompt.fields, self._spec.kinds)
        schemas, form = self._spec.kinds[kind].schemas, self._formats.of(kind)
        pool = min(self._num_played, key=self._num_played.__getitem__)
        episode = PlayedEpisode(turn.row_id, turn.attempt, prompt, kind, pool, schemas, form)
        self._episodes[turn.row_id] = episode
        self._num_played[pool] += 1
        return episode

    async def _begin(self, episode: PlayedEpisode) -> TurnResult:
        prompt_ids = None
        if self._spec.kinds[episode.kind].is_kept:
            fields = episode.prompt.fields
            messages = messages_of(fields, self._spec.data)
            found = await self._ask(episode, "begin", messages)
            if found["messages"] is not None:
                prompt_ids = self._opened(episode, found["messages"], found["schemas"])
        return _result(episode, EpisodeState.GOES_ON, prompt_ids=prompt_ids)

    def _opened(
        self,
        episode: PlayedEpisode,
        messages: list[dict[str, Any]],
        schemas: list[dict[str, Any]] | None,
    ) -> tuple[int, ...]:
        """The ids of the prompt that an environment has made of its row's, and perhaps tools."""
        assert self._tokenizer is not None
        assert self._formats is not None
        data = replace(self._spec.data, system=None)  # it is the first message
        row = {**episode.prompt.fields, data.prompt_field: messages}
        number = episode.prompt.prompt_id
        try:
            if schemas:
                episode.schemas, episode.format = schemas, self._formats.of("", schemas)
            shown = lambda row: episode.schemas  # noqa: E731
            return make_prompt(row, number, data, self._tokenizer, shown).token_ids
        except ValueError as error:
            raise EpisodeFailed(Failure(StageStatus.INVALID, f"reset: {error}")) from None

    async def _turn(self, episode: PlayedEpisode, turn: TurnItem) -> TurnResult:
        """Answer a turn, or end the episode."""
        numbers = episode.numbers
        numbers["turns"] += 1
        kind = self._spec.kinds[episode.kind]
        written = episode.format.read(turn.ids)
        if turn.is_cut:
            return await self._finish(episode, EpisodeState.LIMIT, written)
        is_last = numbers["turns"] >= self._config.max_turns
        if not (written.calls or kind.has_step):
            return await self._finish(episode, EpisodeState.DONE, written)
        if is_last and not kind.has_step:
            return await self._finish(episode, EpisodeState.LIMIT, written)
        messages = await self._say(episode, written)
        if not messages or is_last:
            state = EpisodeState.LIMIT if messages else EpisodeState.DONE
            return await self._finish(episode, state)
        try:
            observation = episode.format.observation(messages, turn.ids[-1])
        except ValueError as error:
            raise EpisodeFailed(Failure(StageStatus.INVALID, str(error))) from None
        if len(observation) > turn.room:  # and one of the model's
            numbers["overlong"] += 1
            return await self._finish(episode, EpisodeState.LIMIT)
        numbers["observed_tokens"] += len(observation)
        ids = tuple(observation.tolist())
        return _result(episode, EpisodeState.GOES_ON, observation=ids)

    async def _say(self, episode: PlayedEpisode, written: TurnText) -> list[dict[str, Any]]:
        """What the environment answers; its calls are counted by tool."""
        found = await self._ask(episode, "take_turn", *_sent(written))
        known = {schema["function"]["name"] for schema in episode.schemas}
        for (name, seconds, has_failed), call in zip(found["calls"], written.calls, strict=True):
            tool = name if name in known else "unknown"
            episode.numbers[f"calls/{tool}"] += 1
            episode.numbers[f"seconds/{tool}"] += seconds
            episode.numbers[f"errors/{tool}"] += has_failed
            episode.numbers["malformed"] += bool(call.error)
        messages: list[dict[str, Any]] = found["messages"]
        return messages

    async def _finish(
        self, episode: PlayedEpisode, state: EpisodeState, last: TurnText | None = None
    ) -> TurnResult:
        """With what rewards it at its end; `last` is a turn that its process has not got."""
        found: Found = {"reward": None}
        kind = self._spec.kinds[episode.kind]
        if kind.is_kept:
            sent = _sent(last) if last is not None and kind.is_read else ()
            found = await self._ask(episode, "finish", *sent)
        self._end(episode)
        reward = None if found["reward"] is None else float(found["reward"])
        rewards = tuple(map(float, found.get("rewards", ())))
        return _result(episode, state, reward=reward, rewards=rewards)

    async def _ask(self, episode: PlayedEpisode, method: str, *arguments: Any) -> Found:
        """What this method of the episode's process returns. EpisodeFailed if it does not, or all
        that the episode has asked takes too long."""
        start_s = time.monotonic()
        prompt = episode.prompt if method == "begin" else None
        call = Call(prompt, (method, [episode.row_id, *arguments]))
        (found,) = await self._pools[episode.pool].run([call])
        episode.numbers["environment_s"] += time.monotonic() - start_s
        if isinstance(found, Failure):
            raise EpisodeFailed(found)
        if "unknown" in found:
            raise EpisodeFailed(Failure(StageStatus.RAISED, "its process was lost", is_lost=True))
        if episode.numbers["environment_s"] > self._config.episode_timeout_s:
            must = f"take at most {self._config.episode_timeout_s:g} s in all"
            why = f"the calls of an episode must {must} (environment.episode_timeout_s)"
            raise EpisodeFailed(Failure(StageStatus.HUNG, why))
        return found


def _sent(written: TurnText) -> tuple[str, list[list[Any]]]:
    """A turn as the process of its episode gets it: its text, and its calls."""
    return written.text, [[call.name, call.arguments, call.error] for call in written.calls]


def _result(episode: PlayedEpisode, state: EpisodeState, **found: Any) -> TurnResult:
    numbers = dict(episode.numbers)
    return TurnResult(
        row_id=episode.row_id, attempt=episode.attempt, state=state, numbers=numbers, **found
    )


def _failed(episode: PlayedEpisode, failure: Failure) -> TurnResult:
    """One that is lost begins again, any other one has ended."""
    if failure.is_lost:
        return _result(episode, EpisodeState.LOST, error=failure.error)
    return _result(episode, EpisodeState.DONE, status=failure.status, error=failure.error)
