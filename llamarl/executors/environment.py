"""The executor that answers the turns of episodes.

Owns: which process plays which episode, the ids of observations in storage, the limits of an
episode, and what is counted of it. Does not own: running tools and environments (the processes of
`environments/episodes.py`), when a turn is asked for (`loop/turns.py`). Invariant: what a model
wrote stays as it is; an observation is appended with NO_VERSION and without log-probs. An episode
that this executor does not know, as after its loss, is answered LOST.

    TURN (of the generator) -> SEGMENT with an observation, for the next turn; or STOP, LENGTH
"""

import asyncio
import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from llamarl.batcher import Batcher
from llamarl.data.tokenizer import Tokenizer, load_tokenizer
from llamarl.environments.definition import kind_of
from llamarl.environments.prompts import make_prompt, messages_of
from llamarl.environments.turn_format import TurnFormat, TurnFormats, TurnText
from llamarl.episode import EpisodeState, TurnItem, TurnResult, last_turn
from llamarl.errors import NotStored, cancel_all, unwrap
from llamarl.executors.engine_output import KeptRows
from llamarl.executors.specs import EnvironmentSpec
from llamarl.executors.stage_calls import FailureRate, WorkSpans
from llamarl.metrics.span import Spans
from llamarl.storage.store import RecordingStore
from llamarl.types import (
    EPISODE_REWARD,
    FINISH_CODES,
    GENERATOR_LOGPROBS,
    NO_VERSION,
    PROMPT_IDS,
    RESPONSE_IDS,
    SAMPLING,
    TOKEN_VERSIONS,
    Columns,
    FinishReason,
    Prompt,
    StageStatus,
    finish_reason,
)
from llamarl.user_code.calls import Call, Failure, UserCode
from llamarl.user_code.pool import WorkerPool
from llamarl.wire_form import WireList

HEARTBEAT_S = 2.0  # a `collect` without results says that the executor is alive
WRITTEN = (RESPONSE_IDS, GENERATOR_LOGPROBS, TOKEN_VERSIONS, SAMPLING)
Cells = Mapping[str, np.ndarray]
Answer = dict[str, Any]


class EpisodeFailed(Exception):  # noqa: N818 - what became of it
    """The environment, or its process, has ended the episode."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.error)
        self.failure = failure


@dataclass(slots=True)
class PlayedEpisode:
    """One that is played, in the pool of this index, begun by the TurnItem of this number;
    `schemas` and `format` are those of its kind, unless its environment has opened it with its own.
    `numbers` are those of its TurnResult."""

    prompt: Prompt
    kind: str
    pool: int
    begun: int
    schemas: Sequence[Mapping[str, Any]]
    format: TurnFormat
    numbers: defaultdict[str, float] = field(default_factory=partial(defaultdict, float))


class EnvironmentExecutor:
    """protocols.Environment, with one pool of one process for each of `config.num_workers`, for an
    episode stays in its process."""

    def __init__(self, spec: EnvironmentSpec, *, rank: int, num_ranks: int, spans: Spans) -> None:
        self._spec, self._config = spec, spec.config
        self._storage = RecordingStore(spec.storage, spans)
        self._work = WorkSpans(spans, "environment")
        code = UserCode(
            service="llamarl.environments.episodes",
            setup={
                "task_source": spec.task_source,
                "tools": spec.config.tools,
                "limits": asdict(spec.limits),
            },
            timeout_s=spec.config.timeout_s,
            label="environment",
            keys="environment.",
        )
        read = lambda call, answer: answer  # noqa: E731
        self._pools = [WorkerPool[Answer](code, 1, read) for _ in range(spec.config.num_workers)]
        self._num_played: Counter[int] = Counter(dict.fromkeys(range(len(self._pools)), 0))
        self._episodes: dict[int, PlayedEpisode] = {}
        self._failures = FailureRate(spec.config.max_failure_rate, code.label, code.keys)
        self._error: BaseException | None = None
        self._kept = KeptRows[TurnResult]()
        self._has_results = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._writing: Batcher[tuple[int, Columns]] = Batcher(self._write, self._fail, in_turn=True)
        self._tokenizer: Tokenizer | None = None
        self._formats: TurnFormats | None = None

    async def start(self) -> None:
        """Start the processes; ValueError if task.py or the tokenizer does not load, or its chat
        template cannot hold observations."""
        self._tokenizer = load_tokenizer(self._spec.tokenizer)
        self._formats = TurnFormats(self._tokenizer, self._spec.kinds, self._config.calls)
        for pool in self._pools:
            await pool.start()
        self._work.start()

    async def submit(self, turns: list[TurnItem]) -> None:
        """See `protocols.Environment`."""
        self._start(self._submit(turns))

    async def collect(self, received: int) -> tuple[int, list[TurnResult]]:
        """See `protocols.Environment`. UserCodeError if too many turns failed, see
        `FailureRate`."""
        self._kept.forget(received)
        if not self._kept and self._error is None:
            self._has_results.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._has_results.wait()
        if self._error is not None:
            raise self._error
        first, results = self._kept.report()
        return first, WireList(results)

    async def forget(self, row_ids: list[int]) -> None:
        """See `protocols.Environment`."""
        by_pool: dict[int, list[int]] = {}
        for row_id in row_ids:
            if (episode := self._end(row_id)) is not None:
                by_pool.setdefault(episode.pool, []).append(row_id)
        for pool, some in by_pool.items():
            self._start(self._pools[pool].run([Call(None, ("forget", [some]))]))

    async def close(self) -> None:
        """End the processes."""
        await cancel_all(self._tasks)
        await self._writing.close()
        for pool in self._pools:
            pool.close()

    def _start(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _submit(self, turns: list[TurnItem]) -> None:
        try:
            cells = await self._read([turn for turn in turns if turn[2] is None])
            with self._work.working(len(turns)):
                async with asyncio.TaskGroup() as tasks:
                    for row_id, number, prompt in turns:
                        if prompt is None:
                            found = self._turn(row_id, cells.get(row_id, {}))
                        else:
                            found = self._begin(row_id, number, prompt)
                        tasks.create_task(self._keep(row_id, number, found))
        except Exception as error:  # noqa: BLE001 - raised in `collect`
            self._fail(error)

    async def _read(self, turns: Sequence[TurnItem]) -> dict[int, Cells]:
        """The columns of those of these rows whose episodes are played. Others may be gone, as may
        those that have begun again since the turn was asked for: it was asked of the process that
        was lost."""
        names = [PROMPT_IDS, *WRITTEN]
        while wanted := [row_id for row_id, number, _ in turns if self._plays(row_id, number)]:
            try:
                columns = await self._storage.read(wanted, names)
            except NotStored:
                if all(self._plays(row_id, number) for row_id, number, _ in turns):
                    raise
                continue
            by_row = zip(*(columns[name] for name in names), strict=True)
            pairs = zip(wanted, by_row, strict=True)
            return {row_id: dict(zip(names, cells, strict=True)) for row_id, cells in pairs}
        return {}

    def _plays(self, row_id: int, number: int) -> bool:
        episode = self._episodes.get(row_id)
        return episode is not None and episode.begun < number

    async def _keep(self, row_id: int, number: int, found: Awaitable[TurnResult]) -> None:
        """Keep the result of one turn, whatever it is."""
        try:
            result = replace(await found, number=number)
        except EpisodeFailed as error:
            failure, episode = error.failure, self._episodes.get(row_id)
            numbers = dict(episode.numbers) if episode is not None else {}
            await self.forget([row_id])
            state = EpisodeState.LOST if failure.is_lost else EpisodeState.DONE
            status = StageStatus.OK if failure.is_lost else failure.status
            result = TurnResult(
                row_id=row_id,
                number=number,
                state=state,
                status=status,
                error=failure.error,
                numbers=numbers,
            )
        try:
            self._failures.add([result])
        except Exception as error:  # noqa: BLE001 - raised in `collect`
            self._fail(error)
        self._kept.add([result])
        self._has_results.set()

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or unwrap(error)
        self._has_results.set()

    def _end(self, row_id: int) -> PlayedEpisode | None:
        episode = self._episodes.pop(row_id, None)
        if episode is not None:
            self._num_played[episode.pool] -= 1
        return episode

    async def _begin(self, row_id: int, number: int, prompt: Prompt) -> TurnResult:
        self._end(row_id)
        assert self._formats is not None
        kind = kind_of(prompt.fields, self._spec.kinds)
        pool = min(self._num_played, key=self._num_played.__getitem__)
        schemas, form = self._spec.kinds[kind].schemas, self._formats.of(kind)
        episode = PlayedEpisode(prompt, kind, pool, number, schemas, form)
        self._episodes[row_id] = episode
        self._num_played[pool] += 1
        prompt_ids = None
        if self._spec.kinds[kind].has_instance:
            messages = messages_of(prompt.fields[self._spec.data.prompt_field], self._spec.data)
            answer = await self._ask(episode, row_id, "begin", messages)
            if answer["messages"] is not None:
                prompt_ids = self._opened(episode, answer["messages"], answer["schemas"])
        return self._result(row_id, episode, EpisodeState.GOES_ON, prompt_ids)

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

    async def _turn(self, row_id: int, cells: Cells) -> TurnResult:
        """Answer a turn, or end the episode."""
        episode = self._episodes.get(row_id)
        if episode is None or not cells:
            return TurnResult(row_id=row_id, number=0, state=EpisodeState.LOST)
        numbers = episode.numbers
        numbers["turns"] += 1
        if finish_reason(cells[SAMPLING]) is not FinishReason.TURN:
            return await self._finish(row_id, episode, cells, EpisodeState.LIMIT)
        kind = self._spec.kinds[episode.kind]
        ids = last_turn(cells[RESPONSE_IDS], cells[TOKEN_VERSIONS])
        written = episode.format.read(ids)
        is_last = numbers["turns"] >= self._config.max_turns
        if not (written.calls or kind.has_step):
            return await self._finish(row_id, episode, cells, EpisodeState.DONE)
        if is_last and not kind.has_step:
            return await self._finish(row_id, episode, cells, EpisodeState.LIMIT)
        messages = await self._say(row_id, episode, written)
        if not messages or is_last:
            state = EpisodeState.LIMIT if messages else EpisodeState.DONE
            return await self._finish(row_id, episode, cells, state)
        try:
            observation = episode.format.observation(messages, int(ids[-1]))
        except ValueError as error:
            raise EpisodeFailed(Failure(StageStatus.INVALID, str(error))) from None
        if not self._fits(cells, len(observation)):
            numbers["overlong"] += 1
            return await self._finish(row_id, episode, cells, EpisodeState.LIMIT)
        numbers["observed_tokens"] += len(observation)
        await self._append(row_id, cells, observation)
        return self._result(row_id, episode, EpisodeState.GOES_ON)

    async def _say(
        self, row_id: int, episode: PlayedEpisode, written: TurnText
    ) -> list[dict[str, Any]]:
        """What the environment answers; its calls are counted by tool."""
        calls = [[call.name, call.arguments, call.error] for call in written.calls]
        answer = await self._ask(episode, row_id, "take_turn", written.text, calls)
        known = {schema["function"]["name"] for schema in episode.schemas}
        for (name, seconds, has_failed), call in zip(answer["calls"], written.calls, strict=True):
            tool = name if name in known else "unknown"
            episode.numbers[f"calls/{tool}"] += 1
            episode.numbers[f"seconds/{tool}"] += seconds
            episode.numbers[f"errors/{tool}"] += has_failed
            episode.numbers["malformed"] += bool(call.error)
        messages: list[dict[str, Any]] = answer["messages"]
        return messages

    def _fits(self, cells: Cells, num_tokens: int) -> bool:
        """Whether so many more tokens, and one of the model's, fit into response and context."""
        num_prompt, num_response = len(cells[PROMPT_IDS]), len(cells[RESPONSE_IDS]) + num_tokens
        max_tokens = int(cells[SAMPLING][3])
        return num_response < max_tokens and num_prompt + num_response < self._spec.context

    async def _append(self, row_id: int, cells: Cells, observation: np.ndarray) -> None:
        added = {
            RESPONSE_IDS: observation,
            GENERATOR_LOGPROBS: np.zeros(len(observation), np.float32),
            TOKEN_VERSIONS: np.full(len(observation), NO_VERSION, np.int32),
        }
        columns: Columns = {n: [np.concatenate([cells[n], more])] for n, more in added.items()}
        columns[SAMPLING] = [_finished(cells, FinishReason.SEGMENT)]
        await self._writing.ask((row_id, columns))

    async def _write(self, rows: list[tuple[int, Columns]]) -> None:
        """In one message for all rows that have the same columns; nothing of an episode that was
        forgotten meanwhile, whose row may be gone."""
        alike: dict[tuple[str, ...], list[tuple[int, Columns]]] = {}
        for row in (each for each in rows if each[0] in self._episodes):
            alike.setdefault(tuple(row[1]), []).append(row)
        for names, some in alike.items():
            columns = {name: [cells[name][0] for _, cells in some] for name in names}
            await self._storage.write([row_id for row_id, _ in some], columns)

    async def _finish(
        self, row_id: int, episode: PlayedEpisode, cells: Cells, state: EpisodeState
    ) -> TurnResult:
        """Give the environment's reward, and mark the row as whole."""
        columns: Columns = {}
        if self._spec.kinds[episode.kind].has_instance:
            answer = await self._ask(episode, row_id, "finish")
            if answer["reward"] is not None:
                columns[EPISODE_REWARD] = [np.array([float(answer["reward"])])]
        if finish_reason(cells[SAMPLING]) is FinishReason.TURN:
            is_done = state is EpisodeState.DONE
            reason = FinishReason.STOP if is_done else FinishReason.LENGTH
            columns[SAMPLING] = [_finished(cells, reason)]
        if columns:
            await self._writing.ask((row_id, columns))
        self._end(row_id)
        return self._result(row_id, episode, state)

    async def _ask(
        self, episode: PlayedEpisode, row_id: int, method: str, *arguments: Any
    ) -> Answer:
        """What this method of the episode's process returns. EpisodeFailed if it does not, or all
        that the episode has asked takes too long."""
        start_s = time.monotonic()
        prompt = episode.prompt if method == "begin" else None
        call = Call(prompt, (method, [row_id, *arguments]))
        (answer,) = await self._pools[episode.pool].run([call])
        episode.numbers["environment_s"] += time.monotonic() - start_s
        if isinstance(answer, Failure):
            raise EpisodeFailed(answer)
        if "unknown" in answer:
            raise EpisodeFailed(Failure(StageStatus.RAISED, "its process was lost", is_lost=True))
        if episode.numbers["environment_s"] > self._config.episode_timeout_s:
            must = f"take at most {self._config.episode_timeout_s:g} s in all"
            why = f"the calls of an episode must {must} (environment.episode_timeout_s)"
            raise EpisodeFailed(Failure(StageStatus.HUNG, why))
        return answer

    def _result(
        self,
        row_id: int,
        episode: PlayedEpisode,
        state: EpisodeState,
        prompt_ids: tuple[int, ...] | None = None,
    ) -> TurnResult:
        numbers = dict(episode.numbers)
        return TurnResult(
            row_id=row_id, number=0, state=state, prompt_ids=prompt_ids, numbers=numbers
        )


def _finished(cells: Cells, reason: FinishReason) -> np.ndarray:
    """The row's SAMPLING cell with this finish code."""
    sampling = cells[SAMPLING].copy()
    sampling[-1] = FINISH_CODES[reason]
    return sampling
