"""The console of a run.

A terminal gets one display that redraws itself, and is afterwards as it was found; anything else (a
log file, CI) gets whole lines, after the first few steps at most one every few seconds."""

import logging
import os
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from llamarl.core.groups import Evaluation, Share
from llamarl.metrics import rendering
from llamarl.metrics.estimates import with_margin
from llamarl.metrics.held_out import ACCURACY, in_lines, share_words
from llamarl.metrics.shares import RecentSpans, Shares
from llamarl.metrics.span import executor_of
from llamarl.metrics.step_metrics import Drops, Scalars, in_words, tools_in_words

log = logging.getLogger(__name__)

LINE_INTERVAL_S = 5.0
FIRST_STEPS = 5  # of which each has a line, so that a short run is seen step by step
QUIET_INTERVAL_S = 10.0  # after this long without a line, one says how far a start or a step is
LINE_WIDTH = 140  # of a sample, where there is no terminal
SHARES_INTERVAL_S = 1.0
CURVE_STEPS = 24
RECENT_STEPS = 10  # whose pace the time left follows
SHOWN_EVALUATIONS = 3
SHOWN_EXECUTORS = ("generator", "trainer")
TRAINING, KL = "accuracy/train", "trained/kl_reference"
STEP_FIGURES = (  # of a line: label, tag, format
    ("loss", "loss/train", "{:.4f}"),
    ("reward", "reward/mean", "{:.3f}"),
    ("accuracy", TRAINING, ""),  # with its interval
    ("turns", "episode/turns", "{:.2f}"),
    ("length", "length/mean", "{:.0f}"),
    ("staleness", "staleness/mean", "{:.2f}"),
    ("entropy", "trained/entropy", "{:.3f}"),
    ("kl", KL, "{:.3g}"),
    ("grad norm", "policy/grad_norm", "{:.3g}"),
    ("lr", "trainer/lr", "{:.3g}"),
    ("tokens/s", "tokens/per_s", "{:,.0f}"),
)
ALL_READY = "ready after"  # of a role's executors
MAX_NAMES = 3  # of a role's executors in one state; of more than these only the number is shown

ReportState = Callable[[str, str], None]
"""A function that is called with an executor's name and its new state: starting, loading or
ready."""

SHOW_CURSOR = "\x1b[?25h\n"
_found: list[Any] = []  # the terminal's settings, while keys are hidden


class Progress:
    """Shows how far the run is; use it as a context manager.

    `num_steps` 0: nothing is trained; None: it is not known which step is the last one. `live`
    False, or a console that is no terminal: lines. `recent_spans` (optional) gives the busy shares
    of generator and trainer."""

    def __init__(
        self,
        num_steps: int | None,
        *,
        live: bool,
        recent_spans: RecentSpans | None = None,
        console: Console | None = None,
    ) -> None:
        self.console = console or Console()
        self._num_steps = num_steps
        self._of = "" if num_steps is None else f"/{num_steps}"
        self._first_step = self._step = 0
        self._phase = "starting"
        self._scalars: Scalars = {}
        self._scores: deque[tuple[float, Share]] = deque(maxlen=CURVE_STEPS)  # reward, accuracy
        self._evaluations: deque[Evaluation] = deque(maxlen=SHOWN_EVALUATIONS)
        self._losses: deque[tuple[int, float]] = deque(maxlen=SHOWN_EVALUATIONS)
        self._drops = Drops()
        self._startup: Startup | None = None
        self._sample = ""
        self._started_s = self._printed_s = time.monotonic()
        self._ends_s: deque[float] = deque(maxlen=RECENT_STEPS + 1)  # of steps; first, the start
        self._recent_spans = recent_spans
        self._shares: dict[str, Shares] = {}
        self._shares_s = 0.0
        self._live: Live | None = None
        if live and self.console.is_terminal:
            self._live = Live(
                get_renderable=self._render,
                console=self.console,
                transient=True,
                redirect_stdout=False,
            )

    def __enter__(self) -> Self:
        if self._live is not None:
            hide_typed_keys()
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            restore_terminal()
            if kind is not None and self._step:
                self._print_line(self._step_line())  # the display that showed it is gone

    def show_phase(self, words: str) -> None:
        """Say what the run does now, such as `starting 4 processes`."""
        self._phase = words
        self._print_line(words)

    @contextmanager
    def startup(self) -> Iterator[ReportState]:
        """Show the start of the executors, whose states the block reports."""
        startup = self._startup = Startup()
        is_over = threading.Event()
        self.show_phase("starting the executors")

        def report(name: str, state: str) -> None:
            startup.mark(name, state)
            words = startup.describe(role := executor_of(name))
            if state == "ready" and words.startswith(ALL_READY):
                self._print_line(f"{role} {words}")

        def repeat() -> None:
            while not is_over.wait(QUIET_INTERVAL_S):
                words = ", ".join(f"{role} {state}" for role, state in startup.rows())
                self._print_line(f"still starting: {words}")

        repeating = threading.Thread(target=repeat, daemon=True)
        repeating.start()
        try:
            yield report
        finally:
            is_over.set()
            repeating.join()
            self._startup = None

    def start_training(self, version: int) -> None:
        """Show that training starts (or resumes) at `version`; the time left is estimated from
        here."""
        self._first_step = self._step = version
        self._ends_s.clear()
        self._ends_s.append(time.monotonic())
        self._phase = "training"

    def show_step(self, step: int, scalars: Scalars) -> None:
        """Show that version `step` is trained; `scalars` as `step_metrics.step_scalars` tags
        them."""
        self._step, self._scalars = step, scalars
        self._ends_s.append(time.monotonic())
        if TRAINING in scalars:
            self._scores.append((scalars["reward/mean"], _trained_share(scalars)))
        is_due = time.monotonic() - self._printed_s >= LINE_INTERVAL_S
        is_early = step - self._first_step <= FIRST_STEPS
        if is_due or is_early or step == self._num_steps:
            self._update_shares()
            self._print_line(self._step_line())

    def show_evaluation(self, evaluated: Evaluation) -> None:
        """Show the results of a version on the held-out prompts."""
        self._evaluations.append(evaluated)
        for words in in_lines(evaluated):
            self._print_line(f"held-out {words} at version {evaluated.version}")
        if self._sample:
            self._print_line(f"sample: {self._sample}")

    def show_loss(self, version: int, loss: float) -> None:
        """Show the held-out loss of a version, per token."""
        self._losses.append((version, loss))
        self._print_line(f"held-out loss {loss:.4f} at version {version}")

    def show_sample(self, prompt: str, completion: str, reward: float) -> None:
        """Keep a trained rollout to be shown in one line, with the end of a long prompt."""
        ending = f"  (reward {reward:g})"
        width = self.console.width if self._live else LINE_WIDTH
        room = width - rendering.LABEL_WIDTH - rendering.MARGINS - len(ending)
        asked = rendering.one_line(prompt, room // 3, self.console.encoding, keeps_end=True)
        answered = rendering.one_line(completion, room - cell_len(asked) - 4, self.console.encoding)
        self._sample = f"{asked} -> {answered}{ending}"

    def show_drops(self, drops: Drops) -> None:
        """Show that a group was filtered; `drops` counts them all."""
        self._drops = drops
        is_due = time.monotonic() - self._printed_s >= QUIET_INTERVAL_S
        if is_due and drops.num_current:
            self._print_line(f"step {self._step}{self._of}  {self._dropped()}")

    def _print_line(self, words: str) -> None:
        """Log a line, and print it with the time unless a display shows the same."""
        log.info(words)
        if self._live is not None:
            return
        self._printed_s = time.monotonic()
        self.console.out(f"[{rendering.CLOCK.words()}] {words}", highlight=False)

    def _step_line(self) -> str:
        parts = [f"step {self._step}{self._of}"]
        for label, tag, form in STEP_FIGURES:
            if tag in self._scalars and (tag != KL or self._scalars[KL]):  # 0 without a reference
                shown = form.format(self._scalars[tag])
                shown = shown if form else with_margin(_trained_share(self._scalars))
                parts.append(f"{label} {shown}")
        if self._drops.total:
            parts.append(self._dropped())
        if self._shares:
            busy = [f"{name} {shares.busy:.0%}" for name, shares in self._shares.items()]
            parts.append("busy " + ", ".join(busy))
        parts.append(f"eta {self._left()}")
        return "  ".join(parts)

    def _update_shares(self) -> None:
        now_s = time.monotonic()
        if self._recent_spans is not None and now_s - self._shares_s >= SHARES_INTERVAL_S:
            self._shares_s = now_s
            shares = self._recent_spans.shares()
            self._shares = {name: shares[name] for name in SHOWN_EXECUTORS if name in shares}

    def _left(self) -> str:
        """Return the time left: the remaining steps at the pace of the recent ones; a present step
        that takes longer than these counts as one of them."""
        if len(self._ends_s) < 2 or self._num_steps is None:
            return "-"
        first_s, last_s, now_s = self._ends_s[0], self._ends_s[-1], time.monotonic()
        num_recent = len(self._ends_s) - 1
        per_step_s = max((last_s - first_s) / num_recent, (now_s - first_s) / (num_recent + 1))
        left_s = per_step_s * (self._num_steps - self._step) - min(now_s - last_s, per_step_s)
        return rendering.duration(max(0.0, left_s))

    def _render(self) -> RenderableType:
        self._update_shares()
        elapsed = rendering.duration(time.monotonic() - self._started_s)
        head = Table.grid(expand=True, padding=(0, 1))
        for ratio in (None, 1, None):
            head.add_column(ratio=ratio, no_wrap=True)
        head.add_row(
            Text(f"step {self._step}{self._of}", style="bold"),
            ProgressBar(total=self._num_steps, completed=self._step),
            Text(f"{elapsed} elapsed, {self._left()} left", style="dim"),
        )
        drawn = [(n, rendering.draw_shares(s, self.console)) for n, s in self._shares.items()]
        body = rendering.facts_grid([*self._facts(), *drawn])
        return Panel(
            body if self._num_steps == 0 else Group(head, body),
            title=f"llamarl: {self._phase}",
            title_align="left",
            box=box.ROUNDED,
        )

    def _facts(self) -> list[rendering.Fact]:
        if (startup := self._startup) is not None:
            return [*startup.rows()]
        losses = rendering.losses(self._scalars.get("loss/train"), [*self._losses])
        facts = [*self._trained(), *self._held_out(), *losses]
        if self._drops.total:
            current = f"{self._drops.num_ready:,} ready, {self._drops.num_current:,} dropped"
            facts.append(("groups dropped", in_words(self._drops.total)))
            facts.append(("of the next step", current))
        scalars = self._scalars
        if "staleness/mean" in scalars:
            mean, most = scalars["staleness/mean"], scalars["staleness/max"]
            facts.append(("token staleness", f"mean {mean:.2f}  max {most:.0f}"))
        if "episode/turns" in scalars:
            turns, waited_s = scalars["episode/turns"], scalars["episode/environment_s"]
            facts.append(("turns", f"mean {turns:.2f}, {waited_s:,.2f} s with the environment"))
        if words := tools_in_words(scalars):
            facts.append(("tools", words))
        if "tokens/per_s" in scalars:
            facts.append(("trained", f"{scalars['tokens/per_s']:,.0f} tokens/s"))
        if self._sample:
            facts.append(("sample", self._sample))
        return facts

    def _trained(self) -> list[rendering.Fact]:
        if not self._scores:
            return []
        rewards, shares = zip(*self._scores, strict=True)
        accuracies = [share.value for share in shares]
        reward = rendering.draw_curve(rewards, f"{rewards[-1]:.3f}", self.console)
        accuracy = rendering.draw_curve(accuracies, with_margin(shares[-1]), self.console)
        return rendering.scores("training", reward, accuracy, (rewards[-1], accuracies[-1]))

    def _held_out(self) -> list[rendering.Fact]:
        if not self._evaluations:
            return []
        found = list(self._evaluations)  # the display has a thread of its own
        rewards = Text("  ".join(f"{each.reward:.3f} (v{each.version})" for each in found), "bold")
        pairs = [(each.reward, each.accuracy) for each in found]
        facts = rendering.scores("held-out", rewards, _shares(found, ACCURACY), *pairs)
        more = [name for name in found[-1].shares if name != ACCURACY]
        more += [f"{name}/{ACCURACY}" for name in found[-1].sets]
        return facts + [(share_words(name), _shares(found, name)) for name in more]

    def _dropped(self) -> str:
        """Return words such as `dropped 180: 160 solved, 20 equal rewards (60 after the last
        batch)`: those came once the batch of the last step was whole."""
        current = self._drops.num_current
        since = f" ({current:,} after the last batch)" if current else ""
        return f"dropped {in_words(self._drops.total)}{since}"


def _trained_share(scalars: Scalars) -> Share:
    return Share(*(scalars[f"{TRAINING}{end}"] for end in ("", "_low", "_high")))


def _shares(evaluations: Sequence[Evaluation], name: str) -> Text:
    """Return words such as "43.0% +-4.3 (v0)  98.4% +-1.4 (v30)"; `name` as `accuracy` or
    `gsm8k/accuracy`."""
    of_set, _, key = name.rpartition("/")
    words = []
    for each in evaluations:
        found = each.sets.get(of_set) if of_set else each
        if found is not None and key in found.shares:
            words.append(f"{with_margin(found.shares[key])} (v{each.version})")
    return Text("  ".join(words), "bold")


class Startup:
    """The executors of one start."""

    def __init__(self) -> None:
        self._states: dict[str, tuple[str, float]] = {}  # name -> (state, since when)
        self._started_s = time.monotonic()

    def mark(self, name: str, state: str) -> None:
        """Note that executor `name` has reached `state`."""
        self._states[name] = (state, time.monotonic())

    def rows(self) -> list[tuple[str, str]]:
        """Return (role, what its executors do) of each role."""
        roles = dict.fromkeys(map(executor_of, list(self._states)))
        return [(role, self.describe(role)) for role in roles]

    def describe(self, role: str) -> str:
        """Return words such as "1 of 2 ready; generator-1 loading (4 s)"."""
        states = {n: each for n, each in list(self._states.items()) if executor_of(n) == role}
        num_ready = sum(state == "ready" for state, _ in states.values())
        if num_ready == len(states):
            last_s = max(since_s for _, since_s in states.values())
            return f"{ALL_READY} {last_s - self._started_s:.0f} s"
        parts = [f"{num_ready} of {len(states)} ready"] if len(states) > 1 else []
        for state in ("starting", "loading"):
            members = {name: since_s for name, (its, since_s) in states.items() if its == state}
            if members:
                waited_s = time.monotonic() - min(members.values())
                named = ", ".join(members) if len(members) <= MAX_NAMES else f"{len(members)}"
                named = f"{named} " if len(states) > 1 else ""
                parts.append(f"{named}{state} ({waited_s:.0f} s)")
        return "; ".join(parts)


def hide_typed_keys() -> None:
    """Keep the terminal from drawing ^C, which would shift the display by a line."""
    if _is_ours() and not _found:
        _found.extend(termios.tcgetattr(sys.stdin))
        settings = list(_found)
        settings[3] &= ~termios.ECHOCTL
        termios.tcsetattr(sys.stdin, termios.TCSANOW, settings)


def restore_terminal() -> None:
    """Undo `hide_typed_keys`."""
    if _found and _is_ours():
        termios.tcsetattr(sys.stdin, termios.TCSANOW, _found)
    _found.clear()


def end_display() -> None:
    """Restore the terminal in a process that ends while its display is drawn."""
    restore_terminal()
    if sys.stdout.isatty():
        sys.stdout.write(SHOW_CURSOR)
        sys.stdout.flush()


def _is_ours() -> bool:
    """Return whether this process may change the terminal: in the background it would be
    stopped."""
    try:
        return sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):  # no terminal, or no standard input at all
        return False
