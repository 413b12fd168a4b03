"""`llamarl view RUN`: the kept rollouts of a run in one file that a browser shows offline.

Owns: the command, and the file's form. Does not own: which rollouts (`selection.py`), or what of
them (`page_data.py`). Invariant: the page loads nothing, and its policy forbids it to; data are
compressed and in base64, so no text of a model or a prompt is ever read as HTML.
"""

import argparse
import base64
import gzip
import hashlib
import json
import os
from pathlib import Path
from string import Template
from typing import Any

from llamarl.checkpoints.tokenizer_files import TOKENIZER_FOLDER
from llamarl.config.check import require
from llamarl.data.tokenizer import load_tokenizer
from llamarl.view.page_data import Pieces, page_data
from llamarl.view.selection import choose, find_places, read_lines

USAGE = """usage: llamarl view RUN [--output FILE] [--max_rollouts N] [--max_tokens N]

Writes the rollouts that the run in the folder RUN has kept (experience.keep_rollouts) and those of
its evaluations as one HTML page, RUN/view.html or FILE, which needs no network. Of more than
--max_rollouts (5000) rollouts or --max_tokens (1000000) response tokens it shows some, spread
evenly over the steps.
"""
PAGE_FILE = "view.html"
MAX_ROLLOUTS, MAX_TOKENS = 5000, 1_000_000
PARTS = Path(__file__).parent / "parts"


def view(arguments: list[str]) -> str:
    """Write the page; what the command says. ValueError, in one line, for what is wrong with the
    arguments, or a run without kept rollouts."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("run", nargs="?")
    parser.add_argument("--output")
    parser.add_argument("--max_rollouts", type=int, default=MAX_ROLLOUTS)
    parser.add_argument("--max_tokens", type=int, default=MAX_TOKENS)
    try:
        options, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ValueError(f"the arguments of view must be as --help says, got: {error}") from None
    require(options.run is not None, "llamarl view", "be followed by the folder of a run", "none")
    require(not rest, "the arguments of view", "be RUN and its options", " ".join(rest))
    for name in ("max_rollouts", "max_tokens"):
        number = getattr(options, name)
        require(number >= 1, f"--{name}", "be at least 1", number)
    run_dir = Path(options.run)
    try:
        places, num_damaged = find_places(run_dir)
        chosen = choose(places, options.max_rollouts, options.max_tokens)
        must = "leave room for the rollouts of one group, got too little for any"
        if not chosen.places:
            raise ValueError(f"--max_rollouts and --max_tokens must {must}")
        lines = read_lines(chosen.places)
        data = page_data(run_dir, lines, chosen.num_found, read_pieces(run_dir))
    except OSError as error:
        raise ValueError(f"RUN must have files that can be read, got {error}") from error
    output = Path(options.output or run_dir / PAGE_FILE)
    _replace(output, render(data))
    num_shown, num_found = len(data["rollouts"]), chosen.num_found
    cut = f" of {num_found:,} (--max_rollouts, --max_tokens)" if num_shown < num_found else ""
    lost = f", without {num_damaged:,} damaged lines" if num_damaged else ""
    return f"{num_shown:,} rollouts{cut}{lost}: {output}\n"


def read_pieces(run_dir: Path) -> Pieces | None:
    """The texts of tokens by the tokenizer that the run has kept; None if it has kept none."""
    folder = run_dir / TOKENIZER_FOLDER
    return load_tokenizer(folder).pieces if folder.is_dir() else None


def render(data: dict[str, Any]) -> str:
    """The page with these data."""
    style, *scripts = ((PARTS / name).read_text() for name in ("page.css", "page.js", "tokens.js"))
    script = "\n".join(scripts)
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    packed = gzip.compress(text.encode(errors="replace"), mtime=0)
    return Template((PARTS / "page.html").read_text()).substitute(
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        data=base64.b64encode(packed).decode(),
    )


def _hash(text: str) -> str:
    """As a content security policy names a script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _replace(path: Path, text: str) -> None:
    """Write `path` in one move."""
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        unfinished.write_text(text)
        os.replace(unfinished, path)
    except OSError as error:
        raise ValueError(f"--output must name a file that can be written, got {error}") from error
