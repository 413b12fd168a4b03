"""The logger of a run, which turns what happens in the loop into metrics and step marks. It changes
nothing of the run: a batch that is ready as a step ends goes to the trainer before the metrics are
made."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from llamarl.core.faces import RunObserver
from llamarl.core.groups import Dropped, Evaluation, Group, StepStats, Verdict
from llamarl.metrics.console import Progress
from llamarl.metrics.held_out import append_results, evaluation_scalars
from llamarl.metrics.shares import RecentSpans
from llamarl.metrics.span import Spans
from llamarl.metrics.step_metrics import (
    HELD_OUT_LOSS,
    Drops,
    Scalars,
    demonstration_scalars,
    perplexity,
    sample_rows,
    step_scalars,
)
from llamarl.metrics.trackers import MetricsLog

TURNS = 8  # of the event loop, in which it sends the next batch, unless that must wait anyway
ReadCompletions = Callable[[list[int]], Awaitable[dict[int, str]]]


@dataclass(kw_only=True)
class RunLogger(RunObserver):
    """Logs one run.

    `read_completions` decodes rows that are still in storage; `num_samples` of them are shown per
    step, beside the answer in `answer_field` of the prompt's row; one of them is shown on the
    console, after its question from `prompt_field`. `sources` are the names of the prompts'
    sources. `recent_spans` is None where no spans are kept. With `is_sft` groups are
    demonstrations."""

    log: MetricsLog
    progress: Progress
    spans: Spans
    recent_spans: RecentSpans | None = None
    read_completions: ReadCompletions | None = None
    num_samples: int = 0
    answer_field: str | None = None
    prompt_field: str = ""
    is_sft: bool = False
    sources: Sequence[str] = ()
    _step_ended_ns: int = field(default_factory=time.monotonic_ns)
    _seconds: dict[str, float] = field(default_factory=dict)
    _drops: Drops = field(default_factory=Drops)

    def start(self, version: int) -> None:
        """Note that the loop starts at `version`; the first step is timed from here."""
        self._step_ended_ns = time.monotonic_ns()
        self.progress.start_training(version)

    def log_group(self, group: Group, verdict: Verdict) -> None:
        self._drops.add(group, verdict.reason if isinstance(verdict, Dropped) else None)
        self.progress.show_drops(self._drops)

    def log_publish(self, seconds: float) -> None:
        self._seconds["publish"] = seconds

    def log_evaluation(self, evaluated: Evaluation | None) -> None:
        if evaluated is None:
            return
        self.log.log(evaluated.version, evaluation_scalars(evaluated))
        append_results(self.log.run_dir, evaluated)
        self.progress.show_evaluation(evaluated)

    def log_held_out(self, version: int, loss: float, num_tokens: int) -> None:
        scalars = {HELD_OUT_LOSS: loss, "perplexity/held_out": perplexity(loss)}
        self.log.log(version, scalars | {"tokens/held_out": num_tokens})
        self.progress.show_loss(version, loss)

    async def log_step(
        self, stats: StepStats, groups: Sequence[Group], oldest_version: int, found: Scalars
    ) -> None:
        """See `RunObserver`. The step has ended now, whenever its metrics are made."""
        now_ns = time.monotonic_ns()
        self.spans.record("step", self._step_ended_ns, now_ns, "mark", version=stats.version)
        seconds = {"step": (now_ns - self._step_ended_ns) / 1e9, **self._seconds}
        dropped = self._drops.take(groups)
        self._step_ended_ns, self._seconds = now_ns, {}
        for _ in range(TURNS):
            await asyncio.sleep(0)
        if self.recent_spans is not None:  # reads many lines, so not on the loop's thread
            seconds |= await asyncio.to_thread(self.recent_spans.take_seconds)
        completions: dict[int, str] = {}
        if self.read_completions is not None and self.num_samples:
            completions = await self.read_completions(sample_rows(groups, self.num_samples))
            self._show_sample(groups, completions)
        stats = replace(stats, scalars=stats.scalars | found)
        if self.is_sft:
            metrics = demonstration_scalars(groups, stats, seconds)
        else:
            metrics = step_scalars(
                groups,
                stats,
                dropped,
                seconds,
                dropped_rollouts=self._drops.take_rollouts(),
                oldest_version=oldest_version,
                completions=completions,
                answer_field=self.answer_field,
                sources=self.sources,
            )
        self.log.log(stats.version, *metrics)
        self.progress.show_step(stats.version, metrics[0])

    def _show_sample(self, groups: Sequence[Group], completions: dict[int, str]) -> None:
        """Show the first sample, the best of its group."""
        for group in groups:
            for row_id in completions.keys() & group.scores.keys():
                reward = group.scores[row_id].reward
                asked = group.prompt.question(self.prompt_field)
                return self.progress.show_sample(asked, completions[row_id], reward)
