"""The executor of a stage: it reads rollouts, has the pool score them, and writes the results."""

from __future__ import annotations

import json
import logging
import re
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import compress
from typing import Any, ClassVar

import numpy as np

from llamarl.core.config import RewardConfig
from llamarl.core.errors import RepeatedWarnings, UserCodeError
from llamarl.core.extensions import TaskSource
from llamarl.core.faces import ColumnStore, Processor, Worker
from llamarl.core.groups import OPENING, last_turn, turns_of
from llamarl.core.records import (
    EPISODE_REWARDS,
    EXTRA,
    PROMPT_ID,
    PROMPT_IDS,
    RESPONSE_IDS,
    REWARD,
    TOKEN_VERSIONS,
    TURNS,
    Columns,
    Prompt,
    StageItem,
    StageResult,
    StageStatus,
    TurnResult,
    WireList,
    episode_of,
)
from llamarl.metrics.span import Spans
from llamarl.model.tokenizer import Tokenizer, load_tokenizer
from llamarl.scoring import judge
from llamarl.scoring.rewards import ANSWER, NO_ANSWER, read_extra
from llamarl.scoring.stages import GROUP, Stage, as_data
from llamarl.scoring.user_code.pool import (
    MAX_COROUTINES,
    Call,
    Failure,
    UserCode,
    WorkerPool,
)
from llamarl.scoring.user_code.worker import MAX_ANSWER_BYTES
from llamarl.storage.archive import as_cell
from llamarl.storage.client import RecordingStore
from llamarl.storage.columns import (
    COMPLETION,
    NUMBER,
    PROMPT_RECORD,
    RECORDED,
    TEXT,
    Column,
    stored_columns,
)

log = logging.getLogger(__name__)

WINDOW = 1000  # results over which the failure rate is taken
MINIMUM = 50  # results before it is judged
VARYING = re.compile(r"""\d+|'[^']*'|"[^"]*\"""")  # what may differ from row to row


class WorkSpans:
    """Records busy spans `name` with the number of rows, and spans of waiting for rollouts between
    them.

    A busy span begins where the span before ended, and ends with a call."""

    def __init__(self, spans: Spans, name: str) -> None:
        self._spans, self._name = spans, name
        self._num_calls = 0  # running now
        self._recorded_ns = time.monotonic_ns()  # until when there are spans

    def start(self) -> None:
        """Begin to record, as the executor can work from now on."""
        self._recorded_ns = time.monotonic_ns()

    @contextmanager
    def working(self, num_rows: int) -> Iterator[None]:
        """Record the block as work on so many rollouts."""
        if self._num_calls == 0:
            self._record("rollouts", "wait")
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            self._record(self._name, "busy", rows=num_rows)

    def _record(self, name: str, cat: str, **args: int) -> None:
        now_ns = time.monotonic_ns()
        self._spans.record(name, self._recorded_ns, now_ns, cat, **args)
        self._recorded_ns = now_ns


class FailureRate:
    """Ends the run when more than the share `limit` of the last results failed. `label` says whose
    calls they are, such as "stage judge"; `keys` precedes the name of a limit in messages, such as
    "reward.".

    Causes that differ only in numbers and quoted words give the same warning."""

    def __init__(self, limit: float, label: str, keys: str) -> None:
        self._limit, self._label, self._keys = limit, label, keys
        self._statuses: deque[StageStatus] = deque(maxlen=WINDOW)
        self._warnings = RepeatedWarnings(log)

    def add(self, results: Sequence[StageResult | TurnResult]) -> None:
        """Count these results. Raises UserCodeError if more than `limit` of the last 1000 failed
        (judged after 50)."""
        self._statuses.extend(result.status for result in results)
        failures = [result for result in results if result.status is not StageStatus.OK]
        for failure in failures:
            where, cause = f"{self._label} of row {failure.row_id}", failure.error.splitlines()[-1]
            about = failure.status, VARYING.sub("", cause)
            self._warnings.warn("%s: %s: %s", where, failure.status, failure.error, about=about)
        if not failures or len(self._statuses) < MINIMUM:
            return
        counts = Counter(self._statuses)
        num_failed = len(self._statuses) - counts[StageStatus.OK]
        if num_failed / len(self._statuses) > self._limit:
            bad = [status for status in StageStatus if status is not StageStatus.OK]
            kinds = ", ".join(f"{counts[status]} {status}" for status in bad)
            raise UserCodeError(
                f"at most {self._limit:.0%} of {self._label} calls may fail "
                f"({self._keys}max_failure_rate), got {num_failed} of the last "
                f"{len(self._statuses)} ({kinds}); the last one:\n{failures[-1].error}"
            )


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """The executor of a stage that runs functions. `stage.run` names one of `task_source`, the
    recipe's task.py if it has one, or `reward` selects those of the stage `score`. `numbers` names
    the columns it reads that are one number per rollout; `tokenizer` is a folder with tokenizer
    files."""

    executor: ClassVar[str] = "llamarl.scoring.stage_worker:StageWorker"

    stage: Stage
    numbers: frozenset[str]
    tokenizer: str
    task_source: TaskSource | None
    storage: ColumnStore
    reward: RewardConfig | None = None
    has_openings: bool = False
    """Whether an environment may show the model another prompt than that of its row."""


ENTRY_BYTES = 32  # of a number in an answer, at most
TEXT_BYTES = 1 << 17  # of the further numbers of a rollout's rewards in an answer, at most
Cells = dict[str, np.ndarray]
Found = list[str | Cells]
"""The results of a call, per rollout: the reason to drop it, or its cells by column."""
SHOWN: Found = [{}]
"""That of a conversation which the function does not get."""


class StageWorker(Worker, Processor):
    """The processor of a stage that runs functions; calls of `process` may overlap."""

    def __init__(self, spec: StageSpec, *, rank: int, num_ranks: int, spans: Spans) -> None:
        self._spec, stage, reward = spec, spec.stage, spec.reward
        computed = [column for column in stage.writes if column.name not in RECORDED]
        functions = reward.functions if reward is not None else ()
        asks_judge = judge.NAME in functions
        self._parts = {name: f"part_{number}" for number, name in enumerate(functions)}
        aside = [*map(Column, self._parts.values())]
        if reward is not None:
            aside += [Column(ANSWER), Column(EXTRA, "uint8", TEXT)]
        self._aside = {column.name for column in aside}  # not stored
        # This is the stage as its function sees it.
        self._stage = replace(stage, writes=(*computed, *aside))
        self._numbers = [column.name for column in computed if column.length == NUMBER]
        self._storage = RecordingStore(spec.storage, spans)
        self._tokenizer: Tokenizer | None = None
        self._work = WorkSpans(spans, stage.name)
        code = UserCode(
            service="llamarl.scoring.stage_function",
            setup={
                "stage": as_data(self._stage, str(stage.run)),
                "task_source": spec.task_source,
                "reward": None if reward is None else asdict(reward),
            },
            timeout_s=stage.timeout_s,
            label=f"stage {stage.name}" if reward is None else "reward",
            keys="its " if reward is None else "reward.",
            # A call that waits for its turn with a judge waits in the pool, as its time runs here.
            max_calls=reward.judge.max_requests if reward and asks_judge else MAX_COROUTINES,
        )
        self._pool = WorkerPool(code, stage.workers, self._read_answer)
        self._failures = FailureRate(stage.max_failure_rate, code.label, code.keys)

    async def start(self) -> None:
        """Start the processes. Raises ValueError if task.py or the tokenizer does not load."""
        if COMPLETION in self._stage.reads:
            self._tokenizer = load_tokenizer(self._spec.tokenizer)
        await self._pool.start()
        self._work.start()

    async def process(self, items: list[StageItem]) -> list[StageResult]:
        """Call the function for each item: a rollout, or a group. Returns one result per row, in
        order. Of a further conversation of an episode that nothing is written for per token, only
        the turns are stored. Raises UserCodeError if too many calls failed, see `FailureRate`."""
        with self._work.working(sum(len(rows) for rows, _ in items)):
            columns = await self._read(items)
            calls = self._make_calls(items, columns)
            is_called = [
                self._stage.is_per_token or not episode_of(rows[0])[1] for rows, _ in items
            ]
            called = iter(await self._pool.run([*compress(calls, is_called)]))
            found: list[Found | Failure] = [next(called) if each else SHOWN for each in is_called]
            results: list[list[StageResult]] = []
            cells: dict[int, Cells] = {}
            for (rows, prompt), of_call in zip(items, found, strict=True):
                each = [of_call] * len(rows) if isinstance(of_call, Failure) else of_call
                is_shown = of_call is SHOWN
                result_of = (
                    (lambda row_id, _: StageResult(row_id=row_id)) if is_shown else self._result
                )
                results.append([*map(result_of, rows, each)])
                for result, of_row in zip(results[-1], each, strict=True):
                    row_id, place = result.row_id, len(cells)
                    cells[row_id] = {name: np.array([n]) for name, n in result.numbers.items()}
                    if isinstance(of_row, dict):
                        stored = [name for name in of_row if name not in self._aside]
                        cells[row_id] |= {name: of_row[name] for name in stored}
                    if self._spec.reward is not None and prompt is not None:
                        cells[row_id] |= self._shown(prompt, columns, place)
            await self._write(cells)
        self._failures.add([of_call[0] for of_call in compress(results, is_called)])
        return WireList(result for of_call in results for result in of_call)

    async def close(self) -> None:
        """End the processes."""
        self._pool.close()

    def _result(self, row_id: int, found: Failure | str | Cells) -> StageResult:
        """Return the result for the controller, which has no arrays."""
        reward = self._spec.reward
        if isinstance(found, str):
            return StageResult(row_id=row_id, reason=found)
        if isinstance(found, Failure):
            is_zero = reward is not None and reward.on_failure == "zero"
            numbers = {REWARD: 0.0} if is_zero else {}
            status, error = found.status, found.error
            return StageResult(row_id=row_id, status=status, error=error, numbers=numbers)
        parts = {name: float(found[column][0]) for name, column in self._parts.items()}
        answer = found[ANSWER][0] if ANSWER in found else NO_ANSWER
        return StageResult(
            row_id=row_id,
            numbers={name: float(found[name][0]) for name in self._numbers},
            parts=parts,
            correct=reward is not None and parts[reward.functions[0]] >= reward.correct_at,
            answer=None if answer == NO_ANSWER else int(answer),
            extra=json.loads(found[EXTRA].tobytes()) if EXTRA in found else {},
        )

    def _shown(self, prompt: Prompt, columns: Columns, place: int) -> Cells:
        """Return the cells that the stage `score` adds for the archive, of the rollout at `place`
        in `columns`: the prompt's number and, if it is recorded, its turns as text, with the
        opening if the model saw another prompt than the row's."""
        cells = {PROMPT_ID: np.array([float(prompt.prompt_id)])}
        if prompt.is_recorded:
            assert self._tokenizer is not None
            ids = columns[RESPONSE_IDS][place]
            versions = columns[TOKEN_VERSIONS][place]
            turns = turns_of(ids, versions, self._tokenizer.decode)
            opening = columns[PROMPT_IDS][place] if PROMPT_IDS in columns else prompt.token_ids
            if tuple(opening) != prompt.token_ids:
                text = self._tokenizer.decode_raw(opening)
                turns.insert(0, {"role": OPENING, "content": text})
            cells[TURNS] = as_cell(turns)
        return cells

    async def _write(self, cells: dict[int, Cells]) -> None:
        """Store the cells, in one message unless rows have different columns."""
        alike: dict[tuple[str, ...], list[int]] = {}
        for row_id, of_row in cells.items():
            alike.setdefault(tuple(of_row), []).append(row_id)
        for names, row_ids in alike.items():
            if names:
                columns = {name: [cells[row_id][name] for row_id in row_ids] for name in names}
                await self._storage.write(row_ids, columns)

    async def _read(self, items: list[StageItem]) -> Columns:
        """Read the columns that the stage needs of these rows: the prompts too, where an
        environment may have changed one that is recorded."""
        stage, row_ids = self._stage, [row_id for rows, _ in items for row_id in rows]
        names = {*stored_columns(stage.reads)}
        has_openings = self._spec.reward is not None and self._spec.has_openings
        if has_openings and any(prompt and prompt.is_recorded for _, prompt in items):
            names.add(PROMPT_IDS)
        if any(column.length not in (NUMBER, TEXT) for column in stage.writes):
            names.add(RESPONSE_IDS)  # how many entries a column has
        of_episode = names & {*self._spec.numbers, EPISODE_REWARDS}  # of its first row alone
        columns: Columns = {}
        if own := names - of_episode:
            columns = await self._storage.read(row_ids, sorted(own))
        if of_episode:
            firsts = [episode_of(row_id)[0] for row_id in row_ids]
            columns |= await self._storage.read(firsts, sorted(of_episode))
        return columns

    def _make_calls(self, items: list[StageItem], columns: Columns) -> list[Call]:
        stage, row_ids = self._stage, [row_id for rows, _ in items for row_id in rows]
        lengths = [len(ids) for ids in columns.get(RESPONSE_IDS, [()] * len(row_ids))]
        given = [self._given(name, columns, len(row_ids)) for name in stage.reads]
        calls, end = [], 0
        for rows, prompt in items:
            start, end = end, end + len(rows)
            of_rows = [values[start:end] for values in given]
            arguments = of_rows if stage.per == GROUP else [value for (value,) in of_rows]
            num_bytes = ENTRY_BYTES * len(stage.writes) * (sum(lengths[start:end]) + len(rows))
            num_bytes += TEXT_BYTES * len(rows) * (self._spec.reward is not None)
            call = (arguments, lengths[start:end])
            calls.append(Call(prompt, call, max_answer_bytes=MAX_ANSWER_BYTES + num_bytes))
        return calls

    def _given(self, name: str, columns: Columns, num_rows: int) -> Sequence[Any]:
        """Return the function's argument `name`, one entry per row."""
        if name == PROMPT_RECORD:  # it travels beside the arguments
            return [None] * num_rows
        if name == COMPLETION:
            if self._tokenizer is None:
                raise RuntimeError("a stage must be started before it processes rollouts")
            written = map(last_turn, columns[RESPONSE_IDS], columns[TOKEN_VERSIONS])
            return [self._tokenizer.decode(ids) for ids in written]
        cells = [cell.tolist() for cell in columns[name]]
        return [cell[0] for cell in cells] if name in self._spec.numbers else cells

    def _read_answer(self, call: Call, answer: dict[str, Any]) -> Found:
        found: Found = []
        for row, length in zip(answer["rows"], call.arguments[1], strict=True):
            if isinstance(row, str):
                found.append(row)
                continue
            cells: Cells = {}
            for column, value in zip(self._stage.writes, row, strict=True):
                if column.length == TEXT:
                    extra = json.dumps(read_extra(value))
                    cells[column.name] = np.frombuffer(extra.encode(), np.uint8)
                    continue
                is_number = column.length == NUMBER
                cell = np.array([value] if is_number else value, column.dtype)
                if cell.shape != (1 if is_number else length,):
                    raise ValueError(f"{cell.shape} for {column.name}")
                cells[column.name] = cell
            found.append(cells)
        return found
