"""The parts of the display: lines, tables and bars, made of numbers."""

from __future__ import annotations

import asyncio
import logging
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import Any

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from llamarl.core import checkpoint
from llamarl.core.config import Config
from llamarl.core.groups import Share
from llamarl.metrics.estimates import with_margin
from llamarl.metrics.held_out import best_version, is_shaped, share_words
from llamarl.metrics.shares import Shares
from llamarl.metrics.step_metrics import in_words
from llamarl.metrics.summary import SUMMARY_FILE, summarize

log = logging.getLogger(__name__)

BAR_WIDTHS = (20, 8)  # on a console of usual width, on a narrow one
BAR_LINES = ("\u2501", "\u254c")  # filled, empty
BUSY_WIDTH = len(" 100% busy")
CURVE_BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
LABEL_WIDTH = 17
MARGINS = len("| ") + len("  ") + len(" |")  # of a row of the panel: left, between, right
SOURCE_FORMS = {"groups": "{groups:,.0f} groups", "dropped_share": "{dropped_share:.0%} dropped"}
SOURCE_FORMS |= {"reward": "reward {reward:.3f}", "length": "{length:.0f} tokens"}
LOG_WIDTH = 84
WHEN = "before", "after"

Fact = tuple[str, str | Text]
"""A label and its value."""


def show_end(
    config: Config, run_dir: str, state: dict[str, Any], console: Console
) -> dict[str, Any]:
    """Summarize a run that has ended and print the table, the paths of its results, what to try
    next and, if it stopped before its last step, why. Returns the summary. `state` has the run's
    version, and may say which prompts are "solved", why it "ended" early, or which "limit" other
    than num_steps its last step is set by."""
    why = _why_early(config, state) if state["version"] < config.most_steps else ""
    summary = summarize(run_dir, why or state.get("limit") or f"num_steps={config.most_steps}")
    paths = {"metrics": f"{run_dir}/metrics.jsonl", "timeline": f"{run_dir}/trace.json"}
    if "tensorboard" in config.metrics.trackers:
        paths = {"TensorBoard": f"{run_dir}/tensorboard", **paths}
    next_command = f"{find_program('tensorboard')} --logdir {shorten(run_dir)}"
    if config.checkpoint.export:
        paths["checkpoint"] = f"{run_dir}/export"
    if (best := checkpoint.marked_best(run_dir)) is not None:
        name = "export-best" if config.checkpoint.export else f"checkpoints/{checkpoint.BEST}"
        paths[f"best (v{checkpoint.version_of(best)})"] = f"{run_dir}/{name}"
    if config.checkpoint.export and config.held_out_sets:
        key = "model.adapter" if config.trainer.lora.is_used else "model.checkpoint"
        next_command = (
            f"{find_program('llamarl')} evaluate --config-dir {shorten(config.recipe_dir)} "
            f"{key}={run_dir}/export"
        )
    text = StringIO()
    render_summary(summary, paths, next_command, Console(file=text, width=LOG_WIDTH))
    log.info("%s", text.getvalue())
    render_summary(summary, paths, next_command, console)
    if why:
        of = "" if config.last_step is None else f" of {config.last_step}"
        console.out(f"stopped at step {state['version']}{of}: {why}", highlight=False)
    return summary


def _why_early(config: Config, state: Mapping[str, Any]) -> str:
    """Return why a run stopped before its last step; "" if it did not mean to."""
    if solved := state.get("solved"):
        why = "answered correctly, so nothing is left to learn from these prompts"
        return f"{solved} were {why}"
    key, patience, saved = config.checkpoint.best, config.evaluation.patience, state.get("best", {})
    return state.get("ended") or best_version(key, patience, saved).why_over


def is_finished(config: Config, run_dir: str, state: dict[str, Any]) -> bool:
    """Return True if the run whose checkpoint holds `state` has left all its results in the
    folder."""
    is_trained = state.get("version") == config.most_steps or bool(_why_early(config, state))
    names = ["export", *["export-best"] * bool(config.checkpoint.best)]
    has_export = all(Path(run_dir, name).is_dir() for name in names) or not config.checkpoint.export
    return is_trained and has_export and Path(run_dir, SUMMARY_FILE).is_file()


def resume_command(command: Sequence[str], run_dir: str) -> str:
    """Return the command that resumes the run in `run_dir`, which `command` started."""
    program, *arguments = command
    is_single = not {"--multirun", "-m"} & set(arguments)
    replaced = ("checkpoint.resume=", "run_dir=") if is_single else ("checkpoint.resume=",)
    kept = [argument for argument in arguments if not argument.startswith(replaced)]
    if is_single:
        kept.append(f"run_dir={shorten(run_dir)}")
    return shlex.join([find_program(program), *kept, "checkpoint.resume=auto"])


def find_program(name: str) -> str:
    """Return how to call a program of this environment from the working folder, whether it is on
    PATH or not."""
    beside = Path(sys.executable).with_name(name)
    return name if shutil.which(name) or not beside.exists() else shorten(str(beside))


def render_summary(
    summary: Mapping[str, Any], paths: Mapping[str, str], next_command: str, console: Console
) -> None:
    """Print the short table that ends a run: the result of `summary.summarize`, the `paths` by
    label in their order, and what the user may try next."""
    body = facts_grid([*_results(summary), ("", "")])
    for name, shares in summary["executors"].items():
        if name != "controller":
            body.add_row(name, draw_shares(Shares(shares["busy"], shares["wait"]), console))
    console.print()
    console.print(Panel(body, title="llamarl: done", title_align="left", box=box.ROUNDED))
    pairs = {label: Text(shorten(path)) for label, path in paths.items()}
    for label, value in (pairs | {"try next": Text(next_command, style="bold cyan")}).items():
        # It stands outside the panel and unwrapped, so that it can be copied whole.
        padded = Text(f"  {label:<{LABEL_WIDTH}}  ", style="dim", end="")
        console.print(padded, value, sep="", soft_wrap=True)
    console.print()


def facts_grid(facts: Iterable[Fact]) -> Table:
    """Return a table of labels and values without lines, in which no word is taken for markup."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, min_width=LABEL_WIDTH)
    grid.add_column()
    for label, value in facts:
        grid.add_row(Text(label), Text(value) if isinstance(value, str) else value)
    return grid


def scores(kind: str, reward: Text, accuracy: Text, *pairs: tuple[Any, Any]) -> list[Fact]:
    """Return the accuracy, and above it the reward if it says more in one of the `pairs` (reward
    and accuracy, None where there is none), as while no rollout is correct yet."""
    facts: list[Fact] = [(f"{kind} reward", reward), (f"{kind} accuracy", accuracy)]
    return facts if any(is_shaped(*pair) for pair in pairs) else facts[1:]


def losses(training: float | None, held_out: Sequence[tuple[int, float]]) -> list[Fact]:
    """Return the loss of a step, and of held-out demonstrations by version, as far as known."""
    shown = [] if training is None else [("training loss", f"{training:.4f}")]
    if held_out:
        words = (f"{loss:.4f} (v{version})" for version, loss in held_out)
        shown.append(("held-out loss", "  ".join(words)))
    return [(label, Text(words, "bold")) for label, words in shown]


def draw_shares(shares: Shares, console: Console) -> Text:
    """Return the busy share as a bar, then the two longest waits and their reasons as far as there
    is room."""
    room = console.width - LABEL_WIDTH - MARGINS
    wide, narrow = BAR_WIDTHS
    width = wide if room >= 2 * wide + BUSY_WIDTH else narrow
    full, empty = ("#", ".") if console.options.ascii_only else BAR_LINES
    filled = round(shares.busy * width)
    bar = Text.assemble((full * filled, "green"), (empty * (width - filled), "grey30"))
    bar.append(f" {shares.busy:4.0%} busy", "bold")
    waits = sorted(shares.waits.items(), key=lambda item: -item[1])[:2]
    label = "   waiting: " if width == wide else "  wait "
    words = [f"{share:.0%} {reason}" for reason, share in waits if share >= 0.005]
    while words and len(bar) + len(label + ", ".join(words)) > room:
        words.pop()
    return bar.append(label + ", ".join(words), "dim") if words else bar


def draw_curve(values: Sequence[float], latest: str, console: Console) -> Text:
    """Return the `latest` value in words, and one block per value, scaled from the smallest to the
    largest; none on ASCII consoles."""
    low, high = min(values), max(values)
    scale = (len(CURVE_BLOCKS) - 1) / ((high - low) or 1.0)
    blocks = "".join(CURVE_BLOCKS[round((value - low) * scale)] for value in values)
    shown = "" if console.options.ascii_only else blocks
    return Text(f"{latest:<11}  ", "bold").append(shown, "not bold cyan")


class RunClock:
    """The time since the command, or the library's loop, was started, which lines on the console
    show."""

    began_s = time.monotonic()

    def restart(self) -> None:
        self.began_s = time.monotonic()

    def words(self) -> str:
        """Return the time in words, such as 1:23."""
        return duration(time.monotonic() - self.began_s)


CLOCK = RunClock()
"""The clock of the process, for lines of the run's display and of its log."""


def duration(seconds: float) -> str:
    """Return seconds in words: 83 -> "1:23"; 3683 -> "1:01:23"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def one_line(text: str, width: int, encoding: str, *, keeps_end: bool = False) -> str:
    """Return `text` in one line of at most `width` columns, without control characters and those
    that `encoding` does not have. If it is too long, the beginning or the end is kept."""
    line = "".join(letter if letter.isprintable() else " " for letter in " ".join(text.split()))
    line = line.encode(encoding, "replace").decode(encoding)
    if cell_len(line) <= width:
        return line
    room = max(0, width - 3)
    if keeps_end:
        return "..." + set_cell_size(line[::-1], room)[::-1]
    return set_cell_size(line, room) + "..."


def shorten(path: str) -> str:
    """Return `path` relative to the working folder, if it lies inside."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def _results(summary: Mapping[str, Any]) -> list[Fact]:
    rows = _held_out(summary)
    rate = ""
    if summary["tokens_per_s"]:  # from the first step's start on, without that of the executors
        rate = f"  ({summary['tokens_per_s']:,.0f} tokens/s while it trained)"
    rows.append(("steps", f"{summary['steps']}  in {duration(summary['wall_s'])} {rate}"))
    kind = "demonstrations" if summary.get("training_loss") else "rollouts"
    rows.append((kind, f"{summary['rollouts_trained']:,} trained"))
    if kind != "rollouts":
        return rows
    if summary["groups_dropped"]:
        rows.append(("groups dropped", in_words(summary["groups_dropped"])))
    for name, numbers in summary["sources"].items():
        forms = (form for key, form in SOURCE_FORMS.items() if key in numbers)
        rows.append((f"of {name}", ", ".join(form.format(**numbers) for form in forms)))
    if None not in (summary["staleness_mean"], summary["staleness_max"]):
        words = f"mean {summary['staleness_mean']:.2f}, max {summary['staleness_max']} versions"
        mixed = f"{summary['mixed_version_share']:.0%} of rollouts mix versions"
        rows.append(("token staleness", f"{words}; {mixed}"))
    if summary["both_busy_share"] is not None:
        both = f"generator and trainer busy at once {summary['both_busy_share']:.0%} of the time"
        rows.append(("overlap", both))
    return rows


def _held_out(summary: Mapping[str, Any]) -> list[Fact]:
    """Return the held-out results before and after; without held-out prompts the training
    reward."""
    if losses := summary.get("training_loss"):
        first, last = losses
        facts: list[Fact] = [("training loss", f"{first:.4f} first step   {last:.4f} last step")]
        if summary["loss_after"] is not None:
            pair = summary["loss_before"], summary["loss_after"]
            facts.insert(0, ("held-out loss", _before_after(pair, "{:.4f}".format)))
        return facts
    if not summary["held_out_prompts"]:
        first, last = summary.get("training_reward") or (None, None)
        words = f"{first:.3f} first step   {last:.3f} last step" if last is not None else ""
        return [("training reward", words)] if words else []
    rewards, accuracies, ends = (
        [summary[f"{name}_{when}"] for when in WHEN] for name in ("reward", "accuracy", "interval")
    )
    shares = [e and [a, *e] for a, e in zip(accuracies, ends, strict=True)]

    def margin(share: Sequence[float]) -> str:
        return with_margin(Share(*share))

    reward, accuracy = _before_after(rewards, "{:.3f}".format), _before_after(shares, margin)
    facts = scores("held-out", reward, accuracy, *zip(rewards, accuracies, strict=True))
    if len(facts) > 1:
        accuracy.append("   (correct)", "dim")
    return facts + [
        (share_words(name), _before_after((of_name.get(when) for when in WHEN), margin))
        for name, of_name in summary["held_out_shares"].items()
    ]


def _before_after(values: Iterable[Any], words: Callable[[Any], str]) -> Text:
    before, after = ("-" if value is None else words(value) for value in values)
    return Text.assemble((before, "bold"), " before   ", (after, "bold green"), " after")


@contextmanager
def tokenizing_bar(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar that is gone once the block ends. Yields the function that draws it, which takes a
    file, how many of its pieces are done, and how many there are; it raises CancelledError once the
    present task was cancelled, as by Ctrl-C, though it has not come to an `await` since."""
    columns = TextColumn("tokenizing {task.description}"), BarColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    tasks: dict[str, TaskID] = {}
    start_s = time.monotonic()

    def show(name: str, num_done: int, num_pieces: int) -> None:
        if name not in tasks:
            bar.start()
            tasks[name] = bar.add_task(name, total=num_pieces)
        bar.update(tasks[name], completed=num_done, refresh=True)
        with suppress(RuntimeError):  # outside a loop
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError

    try:
        yield show
    finally:
        bar.stop()
    if tasks:
        words = f"tokenized {', '.join(tasks)} in {time.monotonic() - start_s:.1f} s"
        console.print(words, markup=False, highlight=False, soft_wrap=True)
