"""The controller's diary: what it says happened becomes metrics, progress and step marks.

Owns: what is remembered between two steps. Does not own: tags (`record.py`), where numbers go
(`metrics_log.py`) or the display (`console.py`). Invariant: it only listens; the run would go the
same way without it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from llamarl.metrics.console import Progress
from llamarl.metrics.drops import Drops
from llamarl.metrics.live import LiveSpans
from llamarl.metrics.metrics_log import MetricsLog
from llamarl.metrics.record import sample_rows, step_scalars
from llamarl.metrics.span import Spans
from llamarl.types import Dropped, Evaluation, Group, StepStats, Verdict

ReadCompletions = Callable[[list[int]], Awaitable[dict[int, str]]]


@dataclass(kw_only=True)
class RunLogger:
    """Listens to one run.

    `read_completions` decodes rows that are still in storage; it and `num_samples` give the sample
    rollouts of each step, `answer_field` of the prompt's row the answer shown beside them. `times`
    is None where no spans are kept.
    """

    log: MetricsLog
    progress: Progress
    spans: Spans
    max_staleness: int
    times: LiveSpans | None = None
    read_completions: ReadCompletions | None = None
    num_samples: int = 0
    answer_field: str | None = None
    _step_ended_ns: int = field(default_factory=time.monotonic_ns)
    _seconds: dict[str, float] = field(default_factory=dict)
    _drops: Drops = field(default_factory=Drops)

    def begin(self, version: int) -> None:
        """The loop starts at `version`: the first step is reckoned from here."""
        self._step_ended_ns = time.monotonic_ns()
        self.progress.begin(version)

    def log_group(self, group: Group, verdict: Verdict) -> None:
        """`group` is scored, and will be trained or not."""
        self._drops.add(group, verdict.reason if isinstance(verdict, Dropped) else None)
        self.progress.drops(self._drops)

    def publish(self, seconds: float) -> None:
        """A version is live on the generators after `seconds`."""
        self._seconds["publish"] = seconds

    def evaluation(self, evaluated: Evaluation | None) -> None:
        """A held-out evaluation is finished; None: all its generators were lost."""
        if evaluated is None:
            return
        scalars = {
            "evaluation/accuracy": evaluated.accuracy,
            "evaluation/reward": evaluated.reward,
            "evaluation/length": evaluated.mean_tokens,
            "evaluation/truncated_share": evaluated.truncated_share,
            "evaluation/failed": evaluated.num_failed,
        }
        self.log.log(evaluated.version, scalars)
        self.progress.evaluation(evaluated.version, evaluated.accuracy, evaluated.reward)

    async def step(self, stats: StepStats, groups: Sequence[Group]) -> None:
        """The optimizer step that made `stats.version` out of `groups` is done."""
        now_ns = time.monotonic_ns()
        self.spans.record("step", self._step_ended_ns, now_ns, "mark", version=stats.version)
        seconds = {"step": (now_ns - self._step_ended_ns) / 1e9, **self._seconds}
        dropped = self._drops.take(len(groups))
        self._step_ended_ns, self._seconds = now_ns, {}
        if self.times is not None:  # many lines are read: not on the loop's thread
            waits_s = await asyncio.to_thread(self.times.take_waits_s)
            seconds |= {f"wait/{name}": wait_s for name, wait_s in waits_s.items()}
        completions: dict[int, str] = {}
        if self.read_completions is not None and self.num_samples:
            completions = await self.read_completions(sample_rows(groups, self.num_samples))
            self._show_sample(groups, completions)
        scalars, histograms, texts = step_scalars(
            stats.version,
            groups,
            stats,
            dropped,
            seconds,
            oldest_version=stats.version - 1 - self.max_staleness,
            completions=completions,
            answer_field=self.answer_field,
        )
        self.log.log(stats.version, scalars, histograms, texts)
        self.progress.step(stats.version, scalars)

    def _show_sample(self, groups: Sequence[Group], completions: dict[int, str]) -> None:
        """The first of them: the best of its group."""
        for group in groups:
            for row_id in completions.keys() & group.scores.keys():
                reward = group.scores[row_id].reward
                return self.progress.sample(group.prompt.text, completions[row_id], reward)
