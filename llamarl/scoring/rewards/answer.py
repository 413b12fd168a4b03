"""The expected answer of a prompt, and when two short answers are the same.

A missing or unusable expected answer raises; it never makes a completion wrong.
"""

import math
import re
from decimal import Decimal

from llamarl.core.config import RewardConfig
from llamarl.core.records import Prompt, value_at

GSM8K_MARK = "####"
ZERO_BELOW = re.compile(r"/\s*0+(?![\d.])|frac\s*\{[^{}]*\}\s*\{\s*0+\s*\}")  # of a fraction
NUMBER = re.compile(
    r"[$]?([+-]?)[$]?((?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?)"
)


def expected_answer(prompt: Prompt, config: RewardConfig) -> str:
    """The answer field of the data row as text; of a GSM8K solution, what follows its last ####.

    Raises KeyError if the row lacks `config.answer_field`, TypeError if it is neither text nor a
    number, ValueError if it is blank.
    """
    where, field = f"line {prompt.line}", config.answer_field
    try:
        answer = value_at(prompt.fields, field)
    except KeyError:
        must = f"{where}: the row must have the field {field!r} (reward.answer_field)"
        got = ", ".join(map(repr, prompt.fields)) or "no field"
        raise KeyError(f"{must}, got {got}") from None
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        got = type(answer).__name__
        raise TypeError(f"{where}: {field!r} must be text or a number, got {got}")
    if isinstance(answer, float) and not math.isfinite(answer):
        raise ValueError(f"{where}: {field!r} must be a finite number, got {answer}")
    text = str(answer).rpartition(GSM8K_MARK)[2].strip()
    if not text:
        raise ValueError(f"{where}: {field!r} must hold an answer, got {answer!r}")
    return text


def normal_form(answer: str) -> str:
    """One spelling for answers that differ in white space or in how a number is written.

    Examples: " 1,234.50 ", "1234.5" and "$1234.5" are equal; so are "-0" and "0", "7." and "7",
    "1e3" and "1000", "a  b" and "a b". Upper and lower case stay different, and so do "1/2" and
    "0.5" (use `math`).
    """
    text = " ".join(answer.split())
    match = NUMBER.fullmatch(text)
    if match is None:
        return text
    number = Decimal(match[1] + match[2].replace(",", ""))
    digits = format(number if number else Decimal(0), "f")
    return digits.rstrip("0").rstrip(".") if "." in digits else digits
