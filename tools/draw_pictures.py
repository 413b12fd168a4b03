"""Draw the README's pictures from one real run of the quickstart.

    python tools/draw_pictures.py [KEY=VALUE ...]
    python tools/draw_pictures.py --run RUN_DIR
    Each with --folder FOLDER, to see them elsewhere than in docs/pictures.

The first form runs `llamarl train --config-dir recipes/quickstart` in a terminal of its own and
writes the live display in the middle of that run and its learning curve.
The second draws only the curve, from the folder of a finished run.
"""

from __future__ import annotations

import argparse
import codecs
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterable, Sequence
from fcntl import ioctl
from pathlib import Path

from harness import ROOT
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from llamarl.view.compare import COLOURS, chart, picture

PICTURES = ROOT / "docs" / "pictures"
RECIPE = "recipes/quickstart"
COLUMNS, LINES = 92, 24
REDRAWN = re.compile(r"(?:\r?\x1b\[(?:\d*A|2K))+")  # the display goes up and clears its lines
OTHER_CONTROL = re.compile(r"\x1b\[\?[0-9]*[a-z]|\r")
BLUE, ORANGE, *_, GREY = COLOURS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--run", help="folder of a finished run; only its curve is drawn")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE of the run")
    parser.add_argument("--folder", type=Path, default=PICTURES, help="where the pictures go")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.run is not None:
        draw_curves(Path(options.run), options.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder, "quickstart")
        frames = split_frames(record(run_dir, options.overrides))
        draw_display(choose_frame(frames), options.folder)
        draw_curves(run_dir, options.folder)


def record(run_dir: Path, overrides: Sequence[str]) -> str:
    """Everything that the run writes to its terminal."""
    main_end, run_end = pty.openpty()
    ioctl(run_end, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    command = [sys.executable, "-m", "llamarl", "train", "--config-dir", RECIPE]
    environment = os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment["LC_ALL"] = "C.UTF-8"
    run = subprocess.Popen(
        [*command, f"run_dir={run_dir}", *overrides],
        cwd=ROOT,
        env=environment,
        stdin=run_end,
        stdout=run_end,
        stderr=run_end,
    )
    os.close(run_end)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    written = io.StringIO()
    while True:
        try:
            data = os.read(main_end, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        written.write(decoder.decode(data))
    if run.wait() != 0:
        sys.exit(f"the run failed; the end of its output:\n{written.getvalue()[-2000:]}")
    return written.getvalue()


def split_frames(written: str) -> list[str]:
    """The display as it stood after each redraw, with its colours."""
    return [OTHER_CONTROL.sub("", frame).strip("\n") for frame in REDRAWN.split(written)]


def choose_frame(frames: Iterable[str]) -> str:
    """The first frame in the second half of the run that shows all there is to show."""
    for frame in frames:
        plain = Text.from_ansi(frame).plain
        step = re.search(r"step (\d+)/(\d+)", plain)
        has_all = all(word in plain for word in ("held-out", "trainer", "generator", "sample"))
        if step and has_all and 2 * int(step[1]) > int(step[2]) and plain.count("\n") > 5:
            return frame
    sys.exit("no frame of the display shows the second half of the run")


def draw_display(frame: str, folder: Path) -> None:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), color_system="truecolor")
    console.print(Text.from_ansi(frame))
    svg = console.export_svg(title="make quickstart", theme=MONOKAI, unique_id="display")
    write(folder / "display.svg", svg)


def draw_curves(run_dir: Path, folder: Path) -> None:
    """Accuracy, and the length of the answers, over the steps of the run."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    held_out, trained = series(lines, "evaluation/accuracy"), series(lines, "accuracy/train")
    lengths = series(lines, "evaluation/length")
    percent = [(step, 100 * share) for step, share in held_out]
    sampled = [(step, 100 * share) for step, share in trained]
    charts = [
        chart(
            "accuracy, %",
            100,
            [("training", sampled, GREY), ("held out", percent, BLUE)],
            marked=["held out"],
        ),
        chart("answer length, tokens", 40, [("held out", lengths, ORANGE)], marked=["held out"]),
    ]
    write(folder / "learning.svg", picture(charts))


def series(lines: Iterable[dict[str, float]], tag: str) -> list[tuple[float, float]]:
    return [(line["step"], line[tag]) for line in lines if tag in line and "step" in line]


def write(path: Path, text: str) -> None:
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")
    print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
