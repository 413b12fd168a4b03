"""`math`: the completion's final answer is mathematically equal to the expected one, according to
math-verify. 0 means that the answers differ or the completion has none; every other problem raises.
"""

import logging
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from llamarl.config import RewardConfig
from llamarl.environments.rewards.answer import NUMBER, expected_answer, normal_form
from llamarl.types import Prompt

BARE_PERCENT = re.compile(r"(?<!\\)%")  # LaTeX reads a comment from there on
PERCENT = r"\\%"
LATEX_MARKS = ("\\boxed", "\\(", "\\[")

# It warns that its own time limit is off. The pool stops a reward from outside, which also ends
# computations that never return to Python.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def reward(prompt: Prompt, completion: str, finished: bool, config: RewardConfig) -> float:
    r"""1 if math-verify finds an answer in the completion that equals the expected one, else 0.

    The expected answer may be a number, an expression in LaTeX, a GSM8K solution ("... #### 42")
    or a MATH solution ("... \boxed{\frac{1}{2}}"). `finished` plays no part. Raises ValueError if
    it is not a mathematical expression.
    """
    expected = _parse_expected(expected_answer(prompt, config))
    found = _parse(completion)
    return float(verify(expected, found, timeout_seconds=None, raise_on_error=True))


def answer(completion: str, config: RewardConfig) -> str | None:
    """The answer that math-verify finds in the completion, in one spelling as far as that needs no
    algebra (0.5 and 1/2 are one answer, 2(x + 1) and 2x + 2 are two); None if it finds none."""
    found: Any = next(iter(_parse(completion)), None)
    if getattr(found, "is_Float", False) and found.is_finite:
        found = Fraction(str(found))
    return None if found is None else str(found)


def _parse(completion: str) -> list[Any]:
    text = BARE_PERCENT.sub(PERCENT, completion)
    found: list[Any] = parse(text, parsing_timeout=None, raise_on_error=True)
    return found


@lru_cache(maxsize=1024)
def _parse_expected(text: str) -> list[Any]:
    text = BARE_PERCENT.sub(PERCENT, text)
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
    return parsed
