"""`llamarl view RUN`: it writes the kept rollouts of a run as one file that a browser shows
offline."""

from __future__ import annotations

import argparse
import base64
import gzip
import hashlib
import json
import logging
import os
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from string import Template
from types import NoneType
from typing import Any

import yaml

from llamarl.core.fields import require
from llamarl.core.files import parse
from llamarl.core.records import NO_VERSION
from llamarl.metrics.provenance import CONFIG_FILE
from llamarl.metrics.trackers import METRICS_FILE, read_metrics
from llamarl.model.tokenizer import TOKENIZER_FOLDER, load_tokenizer

MOST_WHOLE = 2**53 - 1  # a browser takes larger ones for others
MOST_ID = 2**31 - 1
MOST = sys.float_info.max
NUMERIC = {int, float, NoneType}
TURN = {"role", "content"}
LOGPROBS = ("generator_logprobs", "trainer_logprobs", "ref_logprobs")
WHOLE = ("response_ids", "token_versions", "loss_weights", "clipped")


def read_kept(text: bytes) -> dict[str, Any]:
    """Return the line, with its `numbers` as an object. ValueError says what is wrong with it."""
    line = parse(text)
    _require(type(line) is dict, "the line", "an object", line)
    for must, (rule, names) in RULES.items():
        for name in names.split():
            _require(name in line, "the line", f"one with {name}", "none")
            is_sound = rule(line[name]) or (line[name] is None and name in OR_NULL)
            _require(is_sound, name, must, line[name])
    numbers = parse(line["numbers"])
    is_sound = type(numbers) is dict and {*map(type, numbers.values())} <= NUMERIC
    _require(is_sound, "numbers", "an object of numbers, as text", numbers)
    line["numbers"] = {name: one if is_number(one) else None for name, one in numbers.items()}
    is_grouped = line["is_held_out"] or line["group_id"] is not None
    _require(is_grouped, "group_id", "there in training", None)
    if line["response_ids"] is not None:
        for name in ("prompt_ids", "token_versions"):
            _require(line[name] is not None, name, "there with response_ids", None)
        lengths = {len(line[name]) for name in (*WHOLE, *LOGPROBS) if line[name] is not None}
        must = "the length of each list of tokens"
        _require(lengths == {line["num_tokens"]}, "num_tokens", must, lengths)
    return line


def _require(holds: bool, name: str, must: str, got: object) -> None:
    if not holds:
        raise ValueError(f"{name} must be {must}, got {reprlib.repr(got)}")


def is_whole(value: object) -> bool:
    """Return whether this is a whole number that a browser holds."""
    return type(value) is int and abs(value) <= MOST_WHOLE


def is_number(value: Any) -> bool:
    """Return whether this is a finite number, no larger than a float can be."""
    return type(value) in (int, float) and abs(value) <= MOST


def _are_numbers(values: Any) -> bool:
    """Return whether this is a list of numbers or nulls; NaN, infinities and values that are larger
    than a float are no numbers."""
    is_list = type(values) is list and {*map(type, values)} <= NUMERIC
    return is_list and all(-MOST <= value <= MOST for value in values if value is not None)


def _are_of_tokens(values: Any, least: int = 0) -> bool:
    if type(values) is not list or not {*map(type, values)} <= {int}:
        return False
    return min(values, default=0) >= least and max(values, default=0) <= MOST_ID


def _are_turns(values: Any) -> bool:
    return type(values) is list and all(
        type(turn) is dict and turn.keys() == TURN and {*map(type, turn.values())} == {str}
        for turn in values
    )


INTEGERS = "row_id step prompt_id group_id version version_min version_max staleness"
TEXTS = "outcome reason finish error prompt_file prompt question fields numbers"
RULES: dict[str, tuple[Callable[[Any], bool], str]] = {  # what a value must be, and of which names
    "a whole number": (is_whole, INTEGERS),
    "a count": (lambda value: is_whole(value) and value >= 0, "num_tokens num_prompt_tokens"),
    "a number": (is_number, "reward advantage"),
    "a text": (lambda value: type(value) is str, TEXTS),
    "true or false": (lambda value: type(value) is bool, "is_held_out correct"),
    "an object of numbers": (
        lambda value: type(value) is dict and _are_numbers([*value.values()]),
        "rewards",
    ),
    "messages": (_are_turns, "turns"),
    "a list of token ids": (_are_of_tokens, "prompt_ids response_ids loss_weights clipped"),
    "a list of versions": (partial(_are_of_tokens, least=NO_VERSION), "token_versions"),
    "a list of numbers": (_are_numbers, " ".join(LOGPROBS)),
}
OR_NULL = {
    *("group_id", "version", "version_min", "version_max", "staleness", "reward", "advantage"),
    *("reason", "finish", "correct", "turns", "prompt_ids", *WHOLE, *LOGPROBS),
}


log = logging.getLogger(__name__)

KEPT_FILES = "archive/kept-*.jsonl"
MOST_NAMED = 10  # damaged lines; more are only counted
SHRINK = 0.98  # from one try to the next


@dataclass(frozen=True, slots=True)
class KeptPlace:
    """The place where the line of a rollout begins, and the figures by which rollouts are
    chosen."""

    path: Path
    byte: int
    together: tuple[bool, int, int]
    """The key (held out, step or prompt, group), which is equal for rollouts that are shown
    together, in order."""
    num_tokens: int


def find_places(run_dir: Path) -> tuple[list[KeptPlace], int]:
    """Return the places of the kept rollouts of a run, and how many lines are damaged: these are
    skipped, the first ones with a warning. A line that a killed process left unfinished is skipped
    without one. ValueError if no rollout is found."""
    if not run_dir.is_dir():
        raise ValueError(f"RUN must be the folder of a run, got {run_dir}")
    places: list[KeptPlace] = []
    num_damaged = 0
    for path in sorted(filter(Path.is_file, run_dir.glob(KEPT_FILES))):
        byte = 0
        with path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                try:
                    line = read_kept(text)
                    is_held_out, group = line["is_held_out"], line["group_id"]
                    shown = (line["prompt_id"], 0) if is_held_out else (line["step"], group)
                    # A count that is damaged must not take the room of others.
                    num_tokens = min(line["num_tokens"], len(text))
                    places.append(KeptPlace(path, byte, (is_held_out, *shown), num_tokens))
                except ValueError as error:
                    if text.endswith(b"\n"):
                        num_damaged += 1
                        if num_damaged <= MOST_NAMED:
                            log.warning("%s:%d is not shown: %s", path, number, error)
                byte += len(text)
    if not places:
        must = "be the folder of a run that kept rollouts (experience.keep_rollouts above 0, or an "
        got = f"{num_damaged} damaged lines" if num_damaged else "none"
        raise ValueError(f"RUN must {must}evaluation), got {got} in {run_dir}/{KEPT_FILES}")
    return places, num_damaged


def choose(places: Sequence[KeptPlace], max_rollouts: int, max_tokens: int) -> list[KeptPlace]:
    """Return as many rollouts as both limits allow, spread evenly over steps and over held-out
    prompts; none if no group fits."""
    sets: dict[tuple[bool, int, int], list[KeptPlace]] = {}
    for place in sorted(places, key=lambda place: place.together):
        sets.setdefault(place.together, []).append(place)

    def fits(some: Sequence[KeptPlace]) -> bool:
        num_tokens = sum(place.num_tokens for place in some)
        return len(some) <= max_rollouts and num_tokens <= max_tokens

    fitting = {key: each for key, each in sets.items() if fits(each)}
    kinds = [[each for key, each in fitting.items() if key[0] is kind] for kind in (False, True)]
    chosen, share = [*chain(*fitting.values())], 1.0
    while not fits(chosen):
        share *= SHRINK
        counts = [int(len(kind) * share) for kind in kinds]
        spread = (  # at even distances
            kind[i * len(kind) // count]
            for kind, count in zip(kinds, counts, strict=True)
            for i in range(count)
        )
        chosen = [*chain(*spread)]
    return chosen or next(iter(fitting.values()), [])


def read_lines(places: Sequence[KeptPlace]) -> Iterator[dict[str, Any]]:
    """Yield the lines there, in order; a run that goes on from a checkpoint may have cut off
    some."""
    with ExitStack() as stack:
        paths = {place.path for place in places}
        files = {path: stack.enter_context(path.open("rb")) for path in paths}
        for place in places:
            files[place.path].seek(place.byte)
            with suppress(ValueError):
                yield read_kept(files[place.path].readline())


CURVES = {
    "reward": "reward/mean",
    "accuracy": "accuracy/train",
    "evaluation": "evaluation/accuracy",
}
"""The curves of the overview, and their tags in metrics.jsonl."""
SAME = (
    *("row_id", "step", "group_id", "outcome", "reason", "is_held_out", "version"),
    *("reward", "rewards", "correct", "error", "advantage", "numbers", "finish", "turns"),
    *("num_prompt_tokens", "num_tokens", "version_min", "version_max", "staleness"),
)
"""The fields that a rollout of the page takes from its line."""
PROMPT = ("prompt_file", "prompt_id", "question", "fields")
DAMAGED = (LookupError, TypeError, ValueError, AttributeError, RecursionError, yaml.YAMLError)
"""The exceptions that reading a config may raise."""
DIGITS = 6  # of a log-prob

Pieces = Callable[[Sequence[int]], list[str]]
"""Returns the text of each token."""


def page_data(
    run_dir: Path, lines: Iterable[dict[str, Any]], num_found: int, pieces: Pieces | None
) -> dict[str, Any]:
    """Return everything that the page shows; without `pieces` only whole texts, not those of
    tokens."""
    prompts: dict[tuple[str, int], int] = {}
    texts: list[dict[str, Any]] = []
    rollouts = []
    for line in lines:
        place = prompts.setdefault((line["prompt_file"], line["prompt_id"]), len(texts))
        if place == len(texts):
            texts.append({name: line[name] for name in PROMPT})
        rollouts.append(_rollout(line, pieces) | {"prompt": place})
    return {
        "run": run_dir.resolve().name,
        "num_found": num_found,
        "curves": _curves(run_dir / METRICS_FILE),
        "sets": _sets(run_dir / CONFIG_FILE),
        "prompts": texts,
        "rollouts": rollouts,
    }


def _sets(path: Path) -> dict[str, str]:
    """Return the name of each held-out set by its file, as far as the run's config can be read."""
    try:
        sets = yaml.safe_load(path.read_bytes())["evaluation"]["sets"]
        return {str(file): str(name) for name, file in sets.items()}
    except (*DAMAGED, OSError):
        return {}


def _rollout(line: dict[str, Any], pieces: Pieces | None) -> dict[str, Any]:
    rollout = {name: line[name] for name in SAME}
    rollout["prompt_text"] = line["prompt"]  # an environment may have made it, of one row several
    if line["response_ids"] is not None and pieces is not None:
        texts = {"texts": pieces(line["response_ids"])}
        logprobs = {
            name: line[name]
            and [None if each is None else round(each, DIGITS) for each in line[name]]
            for name in LOGPROBS
        }
        rollout["tokens"] = texts | {name: line[name] for name in WHOLE} | logprobs
        rollout["prompt_text"] = "".join(pieces(line["prompt_ids"]))  # with special tokens
    return rollout


def _curves(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Return (step, value) of each curve."""
    steps = read_metrics(path, CURVES.values()) if path.is_file() else {}
    lines = [(step, line) for step, line in steps.items() if is_whole(step)]
    return {
        name: [(step, line[tag]) for step, line in lines if is_number(line.get(tag))]
        for name, tag in CURVES.items()
    }


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
    """Write the page; return the text that the command prints. ValueError, in one line, says what
    is wrong with the arguments, or that the run has kept no rollouts."""
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
        if not chosen:
            raise ValueError(f"--max_rollouts and --max_tokens must {must}")
        folder = run_dir / TOKENIZER_FOLDER
        pieces = load_tokenizer(folder).pieces if folder.is_dir() else None
        data = page_data(run_dir, read_lines(chosen), len(places), pieces)
    except OSError as error:
        raise ValueError(f"RUN must have files that can be read, got {error}") from error
    output = Path(options.output or run_dir / PAGE_FILE)
    unfinished = output.with_name(f"{output.name}.tmp")
    try:
        unfinished.write_text(render(data))
        os.replace(unfinished, output)
    except OSError as error:
        raise ValueError(f"--output must name a file that can be written, got {error}") from error
    num_shown, num_found = len(data["rollouts"]), len(places)
    cut = f" of {num_found:,} (--max_rollouts, --max_tokens)" if num_shown < num_found else ""
    lost = f", without {num_damaged:,} damaged lines" if num_damaged else ""
    return f"{num_shown:,} rollouts{cut}{lost}: {output}\n"


def render(data: dict[str, Any]) -> str:
    """Return the page with these data."""
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
    """Return the hash by which a content security policy names a script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
