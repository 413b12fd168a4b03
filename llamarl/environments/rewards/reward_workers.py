"""The pool of processes that runs reward code.

Owns: what a completion sends to the pool and how an answer becomes a Score. Does not own: the
processes (`user_code/pool.py`), reading completions (`executors/scorer.py`), or what failures mean
for the run. Invariant: every completion gets exactly one Score; a failure carries its cause and no
reward.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any

from llamarl.config import RewardConfig
from llamarl.types import Prompt, Score, ScoreStatus
from llamarl.user_code.pool import Call, Failure, UserCode, WorkerPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What a reward scores: the `text` after `prompt`, and whether it `finished` by itself."""

    row_id: int
    prompt: Prompt
    text: str
    finished: bool


class RewardPool:
    """Scores completions in `config.num_workers` processes.

    `task_source` is the content of the recipe's task.py. A failed completion is RAISED, HUNG (it
    took longer than `config.timeout_s`) or INVALID (the weighted sum is not finite).
    """

    def __init__(self, config: RewardConfig, task_source: str | None = None) -> None:
        self._config = config
        code = UserCode(
            service="llamarl.environments.rewards.functions",
            setup={"config": asdict(config), "task_source": task_source},
            timeout_s=config.timeout_s,
            timeout_key="reward.timeout_s",
            label="reward",
            call="a reward",
            functions="the reward functions",
        )
        self._pool = WorkerPool(code, config.num_workers, self._read)

    async def start(self) -> None:
        """Start the processes and wait until all are ready. ValueError if task.py does not load."""
        await self._pool.start()

    async def score(self, completions: Sequence[Completion]) -> list[Score]:
        """One Score per completion, in order. RuntimeError if the pool is closed."""
        calls = [Call(item.prompt, (item.text, item.finished)) for item in completions]
        results = await self._pool.run(calls)
        return [
            _score(completion.row_id, result, self._config.full_marks)
            for completion, result in zip(completions, results, strict=True)
        ]

    def close(self) -> None:
        """End every process at once; a second call does nothing."""
        self._pool.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers alive now."""
        return self._pool.pids

    def _read(self, _: Call, answer: dict[str, Any]) -> tuple[float, dict[str, float]] | Failure:
        """The reward and its parts."""
        parts = {name: float(answer["parts"][name]) for name in self._config.functions}
        pairs = zip(self._config.functions, self._config.weights, strict=True)
        reward = sum(weight * parts[name] for name, weight in pairs)
        if not isfinite(reward):
            why = f"the weighted sum of rewards must be finite, got {reward} from {parts}"
            return Failure(ScoreStatus.INVALID, why)
        return reward, parts


async def try_loading(config: RewardConfig, task_source: str | None) -> None:
    """Start a reward process and end it. ValueError, in one line, if the functions do not load."""
    pool = RewardPool(replace(config, num_workers=1), task_source)
    await pool.start()
    pool.close()


def _score(
    row_id: int, result: tuple[float, dict[str, float]] | Failure, full_marks: float
) -> Score:
    if isinstance(result, Failure):
        return Score(row_id=row_id, status=result.status, error=result.error)
    reward, parts = result
    return Score(
        row_id=row_id, status=ScoreStatus.OK, reward=reward, parts=parts, full_marks=full_marks
    )
