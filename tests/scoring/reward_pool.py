"""The processes of the stage `score`, without the executor around them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

from llamarl.core.config import RewardConfig
from llamarl.core.records import EXTRA, REWARD, Prompt, StageResult
from llamarl.scoring.rewards import ANSWER, read_extra
from llamarl.scoring.stages import SCORE, Stage, as_data
from llamarl.scoring.user_code.pool import Call, Failure, UserCode, WorkerPool
from llamarl.storage.columns import TEXT, Column

STOPPED = [1.0, 0, 1.0, 64, 7, 0]  # a cell of SAMPLING


@dataclass
class Completion:
    """What is scored."""

    row_id: int
    prompt: Prompt
    text: str


def completions(*texts: str, prompt: Prompt) -> list[Completion]:
    """Of one prompt."""
    return [Completion(100 + i, prompt, text) for i, text in enumerate(texts)]


class RewardPool:
    """Scores completions in `config.num_workers` processes."""

    def __init__(self, config: RewardConfig, task_source: str | None = None) -> None:
        self._functions, self._correct_at = config.functions, config.correct_at
        reads = ["prompt", "completion", "sampling"]
        writes = [REWARD, *config.functions, ANSWER, Column(EXTRA, "uint8", TEXT)]
        stage = Stage(SCORE, "scorer", reads, writes, timeout_s=config.timeout_s)
        data = as_data(stage, "scorer")
        code = UserCode(
            service="llamarl.scoring.stage_function",
            setup={
                "stage": data,
                "task_source": None if task_source is None else {"task.py": task_source},
                "reward": asdict(config),
            },
            timeout_s=config.timeout_s,
            label="reward",
            keys="reward.",
        )
        self._pool: WorkerPool[tuple[list[float], dict[str, float]]] = WorkerPool(
            code, config.num_workers, self._read
        )

    async def start(self) -> None:
        """Start the processes."""
        await self._pool.start()

    async def score(self, items: Sequence[Completion]) -> list[StageResult]:
        """One result per completion."""
        calls = [Call(item.prompt, ([None, item.text, STOPPED], [1])) for item in items]
        results = []
        for item, found in zip(items, await self._pool.run(calls), strict=True):
            if isinstance(found, Failure):
                failed = StageResult(row_id=item.row_id, status=found.status, error=found.error)
                results.append(failed)
                continue
            (reward, *parts, _), extra = found
            named = dict(zip(self._functions, parts, strict=True))
            is_correct = parts[0] >= self._correct_at
            results.append(
                StageResult(
                    row_id=item.row_id,
                    numbers={REWARD: reward},
                    parts=named,
                    correct=is_correct,
                    extra=extra,
                )
            )
        return results

    def close(self) -> None:
        """End the processes."""
        self._pool.close()

    @property
    def pids(self) -> list[int]:
        """Of the workers."""
        return self._pool.pids

    def _read(self, call: Call, answer: dict[str, Any]) -> tuple[list[float], dict[str, float]]:
        (row,) = answer["rows"]
        assert len(call.arguments) == 2
        *numbers, extra = row
        return [float(number) for number in numbers], read_extra(extra)


@asynccontextmanager
async def running(config: RewardConfig, source: str | None) -> AsyncIterator[RewardPool]:
    """A pool that is started, and closed afterwards."""
    pool = RewardPool(config, source)
    await pool.start()
    try:
        yield pool
    finally:
        pool.close()
