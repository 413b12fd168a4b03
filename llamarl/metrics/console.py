"""What a person sees: progress while the run goes on, and the table at its end.

Owns: the look. Does not own: the numbers. Invariant: on a terminal one display redraws itself;
anywhere else (a log file, CI) there are whole lines only, one every few seconds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from llamarl.metrics.aggregate import LiveShares, Shares, SpanTails
from llamarl.metrics.record import Scalars

PLAIN_INTERVAL_S = 5.0
SHARES_INTERVAL_S = 1.0
CURVE_STEPS = 24
BAR_WIDTH = 20
LABEL_WIDTH = 17
BAR_LINES = ("\u2501", "\u254c")  # filled, empty
CURVE_BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
SHOWN_EXECUTORS = ("generator", "trainer")


class Progress:
    """Shows how far the run is; use it as a context manager.

    `live` False, or a console that is no terminal, prints lines. `spans_folder` (optional) is read
    for the busy shares of generator and trainer.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        live: bool,
        spans_folder: str | Path | None = None,
        console: Console | None = None,
    ) -> None:
        self.console = console or Console()
        self._num_steps = num_steps
        self._first_step = self._step = 0
        self._phase = "starting"
        self._scalars: Scalars = {}
        self._accuracies: deque[float] = deque(maxlen=CURVE_STEPS)
        self._evaluations: list[tuple[int, float]] = []
        self._started_s = self._trained_since_s = self._printed_s = time.monotonic()
        self._live_shares = LiveShares(SpanTails(spans_folder)) if spans_folder else None
        self._shares: dict[str, Shares] = {}
        self._shares_s = 0.0
        self._live: Live | None = None
        if live and self.console.is_terminal:
            self._live = Live(
                get_renderable=self._render,
                console=self.console,
                refresh_per_second=4,
                transient=True,
                redirect_stdout=False,
            )

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
            if kind is not None and self._step:
                self._print_line(self._step_line())  # the display is gone; say how far it came

    def phase(self, words: str) -> None:
        """Say what happens now, such as `starting 4 processes`."""
        self._phase = words
        if self._live is None:
            self._print_line(words)

    def begin(self, step: int) -> None:
        """Training starts (or resumes) at version `step`; the time left is reckoned from here."""
        self._first_step = self._step = step
        self._trained_since_s = time.monotonic()
        self._phase = "training"

    def step(self, step: int, scalars: Scalars) -> None:
        """Version `step` is trained; `scalars` as `record.step_scalars` tags them."""
        self._step, self._scalars = step, scalars
        if "accuracy/train" in scalars:
            self._accuracies.append(scalars["accuracy/train"])
        due = time.monotonic() - self._printed_s >= PLAIN_INTERVAL_S
        if self._live is None and (due or step in (self._first_step + 1, self._num_steps)):
            self._poll()
            self._print_line(self._step_line())

    def evaluation(self, version: int, accuracy: float) -> None:
        """The held-out accuracy of `version`, within 0 and 1."""
        self._evaluations.append((version, accuracy))
        if self._live is None:
            self._print_line(f"held-out accuracy {accuracy:.1%} at version {version}")

    def _print_line(self, words: str) -> None:
        self._printed_s = time.monotonic()
        elapsed = _clock(self._printed_s - self._started_s)
        self.console.print(f"[{elapsed}] {words}", markup=False, highlight=False, soft_wrap=True)

    def _step_line(self) -> str:
        parts = [f"step {self._step}/{self._num_steps}"]
        for label, tag, form in (
            ("reward", "reward/mean", "{:.3f}"),
            ("accuracy", "accuracy/train", "{:.1%}"),
            ("staleness", "staleness/mean", "{:.2f}"),
            ("tokens/s", "tokens/per_s", "{:,.0f}"),
        ):
            if tag in self._scalars:
                parts.append(f"{label} {form.format(self._scalars[tag])}")
        busy = [
            f"{name} {s.busy:.0%}" for name, s in self._shares.items() if name in SHOWN_EXECUTORS
        ]
        if busy:
            parts.append("busy " + ", ".join(busy))
        parts.append(f"eta {self._left()}")
        return "  ".join(parts)

    def _poll(self) -> None:
        now_s = time.monotonic()
        if self._live_shares is not None and now_s - self._shares_s >= SHARES_INTERVAL_S:
            self._shares_s = now_s
            self._shares = self._live_shares.poll()

    def _left(self) -> str:
        num_done = self._step - self._first_step
        if not num_done:
            return "-"
        per_step_s = (time.monotonic() - self._trained_since_s) / num_done
        return _clock(per_step_s * (self._num_steps - self._step))

    def _render(self) -> RenderableType:
        self._poll()
        elapsed = _clock(time.monotonic() - self._started_s)
        head = Table.grid(expand=True, padding=(0, 1))
        for ratio in (None, 1, None):
            head.add_column(ratio=ratio, no_wrap=True)
        head.add_row(
            Text(f"step {self._step}/{self._num_steps}", style="bold"),
            ProgressBar(total=self._num_steps, completed=self._step),
            Text(f"{elapsed} elapsed, {self._left()} left", style="dim"),
        )
        body = _facts_grid()
        for label, value in self._facts():
            body.add_row(label, value)
        for name in SHOWN_EXECUTORS:
            if name in self._shares:
                body.add_row(name, _bar(self._shares[name], self.console.options.ascii_only))
        return Panel(
            Group(head, body), title=f"llamarl: {self._phase}", title_align="left", box=box.ROUNDED
        )

    def _facts(self) -> list[tuple[str, Text]]:
        facts = []
        if self._accuracies:
            curve = "" if self.console.options.ascii_only else _curve(list(self._accuracies))
            accuracy = Text.assemble(
                (f"{self._accuracies[-1]:6.1%}", "bold"), "  ", (curve, "cyan")
            )
            if "reward/mean" in self._scalars:
                accuracy.append(f"  reward {self._scalars['reward/mean']:.3f}", "dim")
            facts.append(("training accuracy", accuracy))
        if self._evaluations:
            held_out = [f"{accuracy:.1%} (v{v})" for v, accuracy in self._evaluations[-3:]]
            facts.append(("held-out accuracy", Text("  ".join(held_out), style="bold")))
        if "staleness/mean" in self._scalars:
            mean, most = self._scalars["staleness/mean"], self._scalars["staleness/max"]
            facts.append(("token staleness", Text(f"mean {mean:.2f}  max {most:.0f}")))
        if "tokens/per_s" in self._scalars:
            rate = f"{self._scalars['tokens/per_s']:,.0f} tokens/s"
            facts.append(("trained", Text(rate)))
        return facts


def render_summary(
    summary: Mapping[str, Any],
    paths: Mapping[str, str],
    next_command: str,
    console: Console | None = None,
) -> None:
    """Print the short table that ends a run.

    `summary` as `summary.summarize` returns it; `paths`: label -> where it lies, in the order to
    be shown; `next_command`: what the user may try next.
    """
    console = console or Console()
    body = _facts_grid()
    for label, value in _results(summary):
        body.add_row(label, value)
    body.add_row()
    for name, shares in summary["executors"].items():
        if name != "controller":
            bar = _bar(Shares(shares["busy"], shares["wait"]), console.options.ascii_only)
            body.add_row(name, bar)
    console.print()
    console.print(Panel(body, title="llamarl: done", title_align="left", box=box.ROUNDED))
    for label, path in paths.items():
        _print_pair(console, label, Text(shorten(path)))
    _print_pair(console, "try next", Text(next_command, style="bold cyan"))
    console.print()


def _print_pair(console: Console, label: str, value: Text) -> None:
    """Outside the panel and never wrapped, so that a path or command can be copied whole."""
    padded = Text(f"  {label:<{LABEL_WIDTH}}  ", style="dim", end="")
    console.print(padded, value, sep="", soft_wrap=True)


def _facts_grid() -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, min_width=LABEL_WIDTH)
    grid.add_column()
    return grid


def _results(summary: Mapping[str, Any]) -> list[tuple[str, Text]]:
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    accuracy = Text.assemble(
        (_percent(before), "bold"), " before   ", (_percent(after), "bold green"), " after"
    )
    rows = [("held-out accuracy", accuracy)]
    rate = f"  ({summary['tokens_per_s']:,.0f} tokens/s trained)" if summary["tokens_per_s"] else ""
    rows.append(("steps", Text(f"{summary['steps']}  in {_clock(summary['wall_s'])} {rate}")))
    rows.append(("rollouts", Text(f"{summary['rollouts_trained']:,} trained")))
    dropped = summary["groups_dropped"].items()
    if dropped:
        words = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in dropped)
        rows.append(("groups dropped", Text(words)))
    if summary["staleness_mean"] is not None:
        words = f"mean {summary['staleness_mean']:.2f}, max {summary['staleness_max']} versions"
        mixed = f"{summary['mixed_version_share']:.0%} of rollouts mix versions"
        rows.append(("token staleness", Text(f"{words}; {mixed}")))
    if summary["both_busy_share"] is not None:
        both = f"generator and trainer busy at once {summary['both_busy_share']:.0%} of the time"
        rows.append(("overlap", Text(both)))
    return rows


def _bar(shares: Shares, ascii_only: bool) -> Text:
    """Busy share as a bar, then the two longest waits and what was waited for."""
    filled = round(shares.busy * BAR_WIDTH)
    full, empty = ("#", ".") if ascii_only else BAR_LINES
    bar = Text.assemble((full * filled, "green"), (empty * (BAR_WIDTH - filled), "grey30"))
    bar.append(f" {shares.busy:4.0%} busy", "bold")
    waits = sorted(shares.waits.items(), key=lambda item: -item[1])[:2]
    words = ", ".join(f"{share:.0%} {reason}" for reason, share in waits if share >= 0.005)
    if words:
        bar.append(f"   waiting: {words}", "dim")
    return bar


def _curve(values: list[float]) -> str:
    """One block per value, scaled from the least to the greatest."""
    low, high = min(values), max(values)
    scale = (len(CURVE_BLOCKS) - 1) / ((high - low) or 1.0)
    return "".join(CURVE_BLOCKS[round((value - low) * scale)] for value in values)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def shorten(path: str) -> str:
    """`path`, relative to the working folder where it lies inside, as one would type it."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path
