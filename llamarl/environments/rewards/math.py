"""`math`: the completion's final answer is mathematically equal to the expected one, according to
math-verify. 0 means that the answers differ or the completion has none; every other problem raises.
"""

import logging
import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from math_verify import parse, verify

from llamarl.config import RewardConfig
from llamarl.environments.rewards.answer import NUMBER, expected_answer, normal_form
from llamarl.types import Prompt

BARE_PERCENT = re.compile(r"(?<!\\)%")  # LaTeX reads a comment from there on
PERCENT = r"\\%"
BOX = "\\boxed"
LATEX_MARKS = (BOX, "\\(", "\\[")
MIXED = re.compile(r"(?<![\d.,/^_])(\d+) +(\d+)/(\d+)(?!\d|/|\.\d)")  # 3 1/2
EXPONENT = re.compile(r"(?<![\w.])\d+(?:\.\d+)?[eE][+-]?\d{1,3}(?!\w)")
THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d.,]*\d)")
CLOCK = re.compile(r"\d+(?::\d+)+")  # a time of day, or a ratio
CLOSE = sympy.Rational(1, 10**5)
"""Two numbers below 1 are equal if they are no farther apart than this share of the larger one.
math-verify rounds to six decimals, of which such numbers may have none."""

# It warns that its own time limit is off. The pool stops a reward from outside, which also ends
# computations that never return to Python.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def reward(prompt: Prompt, completion: str, finished: bool, config: RewardConfig) -> float:
    r"""1 if math-verify finds an answer in the completion that equals the expected one, else 0.

    The expected answer may be a number, an expression in LaTeX, a GSM8K solution ("... #### 42")
    or a MATH solution ("... \boxed{\frac{1}{2}}"). Of several boxes in a completion the last one
    counts, unless the expected answer consists of several values. Times and ratios (1:15) are
    equal if all their numbers are. `finished` plays no part. Raises ValueError if the expected
    answer is not a mathematical expression with a finite value.
    """
    text = expected_answer(prompt, config)
    expected = _parse_expected(text)
    last = _last_box(completion)
    if CLOCK.fullmatch(text) and (found := CLOCK.findall(last)):
        return float(_numbers(text) == _numbers(found[-1]))
    is_equal = _are_equal(expected, _parse(last))
    if not is_equal and last != completion and isinstance(expected[0], sympy.Set | sympy.Tuple):
        is_equal = _are_equal(expected, _parse(completion))
    return float(is_equal)


def answer(completion: str, config: RewardConfig) -> str | None:
    """The answer that math-verify finds in the completion, in one spelling as far as that needs no
    algebra (0.5 and 1/2 are one answer, 2(x + 1) and 2x + 2 are two); None if it finds none."""
    last = _last_box(completion)
    found: Any = next(iter(_parse(last)), None)
    if getattr(found, "is_Float", False) and found.is_finite:
        found = Fraction(str(found))
    return None if found is None else str(found)


def _are_equal(expected: Sequence[Any], found: Sequence[Any]) -> bool:
    if not verify([*expected], [*found], timeout_seconds=None, raise_on_error=True):
        return False
    pairs = [(one, other) for one in expected for other in found]
    numbers = [pair for pair in pairs if all(map(_is_number, pair))]
    return not numbers or any(_are_close(*pair) for pair in numbers)


def _are_close(one: Any, other: Any) -> bool:
    """Of two numbers that math-verify takes for equal; one may be the other in per cent."""
    largest = max(abs(one), abs(other))
    if largest >= 1 or one == other:
        return True
    scales = ((1, 1), (100, 1), (1, 100))
    return any(
        abs(one * a - other * b) <= CLOSE * max(abs(one * a), abs(other * b)) for a, b in scales
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, sympy.Expr) and bool(value.is_number) and bool(value.is_real)


def _is_finite(value: Any) -> bool:
    return isinstance(value, str) or not value.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo)


def _last_box(completion: str) -> str:
    """The text from the last box on, the whole without one."""
    place = completion.rfind(BOX)
    return completion if place < 0 else completion[place:]


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(":")]


def _spelled(text: str) -> str:
    """The text with numbers in forms that math-verify reads as others written as it reads them."""
    text = BARE_PERCENT.sub(PERCENT, text)
    text = MIXED.sub(_as_fraction, text)
    return EXPONENT.sub(lambda found: normal_form(found[0]), text)


def _as_fraction(mixed: re.Match[str]) -> str:
    whole, above, below = map(int, mixed.groups())
    return f"{whole * below + above}/{below}"


def _parse(completion: str) -> list[Any]:
    """What math-verify finds; nothing if that has no finite value."""
    text = _spelled(completion)
    if text.startswith(BOX):
        text = THOUSANDS.sub(lambda found: found[0].replace(" ", ""), text)
    found: list[Any] = parse(text, parsing_timeout=None, raise_on_error=True)
    return found if all(map(_is_finite, found)) else []


@lru_cache(maxsize=1024)
def _parse_expected(text: str) -> list[Any]:
    text = _spelled(text)
    if THOUSANDS.fullmatch(text):
        text = text.replace(" ", "")
    if NUMBER.fullmatch(text):
        latex = f"${normal_form(text)}$"
    elif text.count("$") >= 2 or any(mark in text for mark in LATEX_MARKS):
        latex = text
    else:
        latex = f"${text}$"
    parsed: list[Any] = parse(latex, parsing_timeout=None, raise_on_error=True)
    if all(isinstance(value, str) for value in parsed):
        must = "be a mathematical expression for reward.functions=[math]"
        raise ValueError(f"the expected answer must {must}, got {text!r} (compare text with exact)")
    if not all(map(_is_finite, parsed)) and not CLOCK.fullmatch(text):
        raise ValueError(f"the expected answer must have a finite value, got {text!r}")
    return parsed
