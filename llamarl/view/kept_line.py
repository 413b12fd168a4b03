"""What a line of kept-N.jsonl must say for its rollout to be shown.

Owns: reading a line, and the check of all that the page takes from it. Does not own: what is
written (`executors/archive.py`). Invariant: whatever stands in a file, the page gets lines that it
can show; each other one is a ValueError of one short line.
"""

import reprlib
import sys
from collections.abc import Callable
from functools import partial
from types import NoneType
from typing import Any

from llamarl.json_file import parse
from llamarl.types import NO_VERSION

MOST_WHOLE = 2**53 - 1  # a browser takes larger ones for others
MOST_ID = 2**31 - 1
MOST = sys.float_info.max
NUMERIC = {int, float, NoneType}
TURN = {"role", "content"}
LOGPROBS = ("generator_logprobs", "trainer_logprobs", "ref_logprobs")
WHOLE = ("response_ids", "token_versions", "loss_weights", "clipped")


def read_kept(text: bytes) -> dict[str, Any]:
    """The line, with its `numbers` as an object. ValueError says what is wrong with it."""
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
    """A whole number that a browser holds."""
    return type(value) is int and abs(value) <= MOST_WHOLE


def is_number(value: Any) -> bool:
    """A finite number, no larger than a float can be."""
    return type(value) in (int, float) and abs(value) <= MOST


def _are_numbers(values: Any) -> bool:
    """NaN, infinities and what is larger than a float are none."""
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


Rules = dict[str, tuple[Callable[[Any], bool], str]]
RULES: Rules = {
    "a whole number": (
        is_whole,
        "row_id step prompt_id group_id version version_min version_max staleness",
    ),
    "a count": (lambda value: is_whole(value) and value >= 0, "num_tokens num_prompt_tokens"),
    "a number": (is_number, "reward advantage"),
    "a text": (
        lambda value: type(value) is str,
        "outcome reason finish error prompt_file prompt question fields numbers",
    ),
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
