"""A stage of the recipe's own: a function of task.py computes columns of rollouts, or drops them.

Owns: reading what the function reads, writing what it returns. Does not own: running it (the pool's
processes do) or what a dropped rollout means (the controller). Invariant: a rollout has either all
columns of the stage or none, and those with a result that is OK and no reason have them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from llamarl.data.tokenizer import Tokenizer, load_tokenizer
from llamarl.executors.failure_rate import FailureRate
from llamarl.executors.specs import StageSpec
from llamarl.executors.work_spans import WorkSpans
from llamarl.experience.columns import COMPLETION, DERIVED, NUMBER, PROMPT_RECORD, Column
from llamarl.experience.graph import GROUP
from llamarl.experience.store import RecordingStore
from llamarl.experience.task_stages import as_data
from llamarl.metrics.span import Spans
from llamarl.types import RESPONSE_IDS, Columns, StageItem, StageResult
from llamarl.user_code.pool import Call, Failure, UserCode, WorkerPool
from llamarl.user_code.process import MAX_ANSWER_BYTES

ENTRY_BYTES = 32  # of a number in an answer, at most
Cells = dict[str, np.ndarray]
Found = list[str | Cells]
"""Of one call, per rollout: the reason to drop it, or its columns."""


class StageExecutor:
    """protocols.Processor for one stage; calls of `process` may overlap."""

    def __init__(self, spec: StageSpec, *, rank: int, num_ranks: int, spans: Spans) -> None:
        stage = spec.stage
        self._spec, self._stage = spec, stage
        self._storage = RecordingStore(spec.storage, spans)
        self._tokenizer: Tokenizer | None = None
        self._pool = WorkerPool(_code(spec), stage.workers, self._read_answer)
        self._work = WorkSpans(spans, stage.name, "rows")
        self._failures = FailureRate(
            stage.max_failure_rate,
            one=f"stage {stage.name}",
            all_of_them=f"the calls of stage {stage.name}",
            key="its max_failure_rate",
        )

    async def start(self) -> None:
        """Start the processes; ValueError if task.py or the tokenizer does not load."""
        if COMPLETION in self._stage.reads:
            self._tokenizer = load_tokenizer(self._spec.tokenizer)
        await self._pool.start()
        self._work.start()

    async def process(self, items: list[StageItem]) -> list[StageResult]:
        """Call the function for each item: a rollout, or a group. One result per rollout, in order.

        Raises UserCodeError if more than `max_failure_rate` of the last 1000 calls failed (judged
        after 50).
        """
        row_ids = [row_id for rows, _ in items for row_id in rows]
        with self._work.working(len(row_ids)):
            calls = await self._make_calls(items)
            found = await self._pool.run(calls)
            await self._write(items, found)
        pairs = zip(items, found, strict=True)
        results = [_results(rows, of_call, self._stage.writes) for (rows, _), of_call in pairs]
        self._failures.add([of_call[0] for of_call in results])
        return [result for of_call in results for result in of_call]

    async def close(self) -> None:
        """End the processes."""
        self._pool.close()

    async def _write(self, items: list[StageItem], found: list[Found | Failure]) -> None:
        written = {
            row_id: cells
            for (rows, _), of_call in zip(items, found, strict=True)
            if not isinstance(of_call, Failure)
            for row_id, cells in zip(rows, of_call, strict=True)
            if not isinstance(cells, str)
        }
        names = [column.name for column in self._stage.writes]
        if written and names:
            columns = {name: [cells[name] for cells in written.values()] for name in names}
            await self._storage.write([*written], columns)

    async def _make_calls(self, items: list[StageItem]) -> list[Call]:
        stage, row_ids = self._stage, [row_id for rows, _ in items for row_id in rows]
        names = {DERIVED.get(name, name) for name in stage.reads} - {""}
        if any(column.length != NUMBER for column in stage.writes):
            names.add(RESPONSE_IDS)  # how many entries a column has
        columns = await self._storage.read(row_ids, sorted(names)) if names else {}
        lengths = [len(ids) for ids in columns.get(RESPONSE_IDS, [()] * len(row_ids))]
        given = [self._given(name, columns, len(row_ids)) for name in stage.reads]
        calls, end = [], 0
        for rows, prompt in items:
            start, end = end, end + len(rows)
            of_rows = [values[start:end] for values in given]
            arguments = of_rows if stage.per == GROUP else [value for (value,) in of_rows]
            num_bytes = ENTRY_BYTES * len(stage.writes) * (sum(lengths[start:end]) + len(rows))
            call = (arguments, lengths[start:end])
            calls.append(Call(prompt, call, max_answer_bytes=MAX_ANSWER_BYTES + num_bytes))
        return calls

    def _given(self, name: str, columns: Columns, num_rows: int) -> list[Any]:
        """What the function gets for `name`, one entry per row."""
        if name == PROMPT_RECORD:  # it travels beside the arguments
            return [None] * num_rows
        if name == COMPLETION:
            if self._tokenizer is None:
                raise RuntimeError("a stage must be started before it processes rollouts")
            return [self._tokenizer.decode(ids) for ids in columns[RESPONSE_IDS]]
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
                is_number = column.length == NUMBER
                cell = np.array([value] if is_number else value, column.dtype)
                if cell.shape != (1 if is_number else length,):
                    raise ValueError(f"{cell.shape} for {column.name}")
                cells[column.name] = cell
            found.append(cells)
        return found


def _code(spec: StageSpec) -> UserCode:
    stage, label = spec.stage, f"stage {spec.stage.name}"
    assert isinstance(stage.run, str), "a stage of the recipe's own runs a function of task.py"
    return UserCode(
        service="llamarl.experience.stage_function",
        setup={"stage": as_data(stage, stage.run), "task_source": spec.task_source},
        timeout_s=stage.timeout_s,
        timeout_key="its timeout_s",
        label=label,
        call=label,
        functions=label,
    )


def _results(
    row_ids: Sequence[int], found: Found | Failure, columns: Sequence[Column]
) -> list[StageResult]:
    """What the controller gets of one call: no arrays."""
    if isinstance(found, Failure):
        return [
            StageResult(row_id=row_id, status=found.status, error=found.error) for row_id in row_ids
        ]
    names = [column.name for column in columns if column.length == NUMBER]
    return [
        StageResult(row_id=row_id, reason=row)
        if isinstance(row, str)
        else StageResult(row_id=row_id, numbers={name: float(row[name][0]) for name in names})
        for row_id, row in zip(row_ids, found, strict=True)
    ]
