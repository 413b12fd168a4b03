"""The reward `math`, which is 1 if math-verify finds the completion's final answer mathematically
equal to the expected one."""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, parse, verify

from llamarl.core.config import RewardConfig
from llamarl.core.records import Prompt
from llamarl.scoring.reward_functions import NUMBER, expected_answer, normal_form

BARE_PERCENT = re.compile(r"(?<!\\)%")  # LaTeX reads a comment from there on
PERCENT = r"\%"
MIXED = re.compile(r"(?<![\d.,/^_])(\d+) +(\d+)/(\d+)(?!\d|/|\.\d)")  # 3 1/2
EXPONENT = re.compile(r"(?<![\w.])\d+(?:\.\d+)?[eE][+-]?\d{1,3}(?!\w)")
BLANKS = "\u00a0\u2007\u2009\u202f"  # of typesetting
BLANK = rf"[ {BLANKS}]"
GAP = rf"(?:\\[,;:! ]|~|\\?_|\{{,\}}|,\\!|['\u2019{BLANKS}])"  # between thousands, and of no list
HEAD, TAIL = r"(?<![\w.,])[1-9]\d{0,2}", r"(?!\d)"
SET_THOUSANDS = re.compile(rf"{HEAD}(?:{GAP}\d{{3}})+{TAIL}")  # 1\,000
BLANK_THOUSANDS = re.compile(rf"{HEAD}(?:{BLANK}\d{{3}})+(?![\d,]*\d)")  # 1 000, or two numbers
POINT_THOUSANDS = re.compile(rf"{HEAD}(?:\.\d{{3}}){{2,}}(?:,\d+)?(?![.,]?\d)")  # 1.234.567,8
COMMA_DECIMALS = re.compile(r"\s*[+-]?[1-9]\d{0,2}(?:\.\d{3})+,\d+\s*")  # all of a text: 1.000,50
REPEATING = re.compile(
    r"(?<![\d.])(\d+)\.(\d*)(?:\\(?:overline|bar|dot)\s*\{(\d+)\}|(?<=\.)\((\d+)\))"
)
RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹"
POWER = re.compile(f"[⁺⁻]?[{RAISED}]+")
VULGAR = re.compile(r"(\d*) ?([¼-¾⅐-⅞])")  # ½
ROOT = re.compile(r"√ *(\d+|[a-z](?![a-z]))")
SIGNS = str.maketrans({"\u2013": "-", "\u2212": "-", "~": " "})  # dashes, and a blank
POWERS = re.compile(r"(?<=[\w)}]) ?\*\* ?(?=[\w({+-])")  # and not the ** of bold text
BARE_POWER = re.compile(r"\^([+-]\d+)")  # 10^-3
TIMES = re.compile("[\u00b7\u22c5]|(?<=\\d) ?[xX] ?(?=10 ?\\^)")  # 1.5x10^3
MONEY = re.compile(r"[€£¥₹] ?(?=[\d.])|(?<=\d) ?[€£¥₹]")
DEGREES = re.compile(r"(?:°|\\degree(?![a-z]))(?:[CF](?!\w))?")
LAST_POINT = re.compile(r"(?<=\d)[.,;](?=\s*(?:[}$]|\\[\])]|\Z))")  # of a sentence in a box


def spelled(text: str, *, blanks_join: bool) -> str:
    """Return the text with its numbers spelled as math-verify reads them. With `blanks_join`,
    blanks between groups of three digits separate the thousands of one number."""
    if COMMA_DECIMALS.fullmatch(text):
        text = text.replace(".", "").replace(",", ".")
    text = SET_THOUSANDS.sub(_digits, text.replace("{:}", ":"))
    text = POINT_THOUSANDS.sub(lambda found: found[0].replace(".", "").replace(",", "."), text)
    if blanks_join:
        text = BLANK_THOUSANDS.sub(_digits, text)
    text = DEGREES.sub(r"^\\circ ", text)
    text = BARE_PERCENT.sub(r"\\%", text.translate(SIGNS))
    text = BARE_POWER.sub(r"^{\1}", POWERS.sub("^", text))
    text = MONEY.sub("", TIMES.sub(r" \\cdot ", text)).replace("\u221e", r"\infty ")
    text = LAST_POINT.sub("", REPEATING.sub(_as_ratio, text))
    text = VULGAR.sub(_as_latex, text)
    text = POWER.sub(lambda found: f"^{{{unicodedata.normalize('NFKC', found[0])}}}", text)
    text = ROOT.sub(lambda found: f"\\sqrt{{{found[1]}}}", text)
    text = MIXED.sub(_as_fraction, text)
    return EXPONENT.sub(lambda found: normal_form(found[0]), text)


def _digits(number: re.Match[str]) -> str:
    return re.sub(r"\D", "", number[0])


def _as_fraction(mixed: re.Match[str]) -> str:
    whole, above, below = map(int, mixed.groups())
    return rf"\frac{{{whole * below + above}}}{{{below}}}"


def _as_ratio(decimals: re.Match[str]) -> str:
    """Return a repeating decimal as a fraction."""
    whole, once, again = decimals[1], decimals[2], decimals[3] or decimals[4]
    above = int(whole + once + again) - int(whole + once)
    return rf"\frac{{{above}}}{{{'9' * len(again)}{'0' * len(once)}}}"


def _as_latex(fraction: re.Match[str]) -> str:
    above, below = unicodedata.normalize("NFKC", fraction[2]).split("\u2044")
    above = str(int(fraction[1] or 0) * int(below) + int(above))
    return rf"\frac{{{above}}}{{{below}}}"


BOX = "\\boxed"
LATEX_MARKS = (BOX, "\\(", "\\[")
ONE_FORMULA = re.compile(
    r"\$[^$]+\$|\\\((?:(?!\\[()]).)+\\\)|\\\[(?:(?!\\[\[\]]).)+\\\]", re.DOTALL
)
EMPTY_BOX = re.compile(r"\\boxed\s*(?:\{\s*(?:\}|\Z)|\Z)")
CLOCK = re.compile(r"\d+(?::\d+)+")  # a time of day, or a ratio
BRACE = re.compile(r"(?<!\\)[{}]")
CLOSE = sympy.Rational(1, 10**5)
"""Two numbers below 1 are equal if their difference is at most this share of the larger one.
math-verify rounds to six decimals, which may be all zeros for such numbers."""
ROUNDED = sympy.Rational(1, 10**14)
"""The same share for large numbers of which one is a float: math-verify compares six decimals, and
floats have fifteen digits."""
NUM_DIGITS = 30

# math-verify warns that its own time limit is off. The pool stops a reward from outside, which
# also ends computations that never return to Python.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def reward(prompt: Prompt, completion: str, config: RewardConfig) -> float:
    r"""Return 1 if math-verify finds an answer in the completion equal to the expected one, else 0.

    The expected answer may be a number, an expression in LaTeX, a GSM8K solution ("... #### 42") or
    a MATH solution ("... \boxed{\frac{1}{2}}"). Of several boxes in a completion the last one
    counts, unless the expected answer consists of several values. Times and ratios (1:15) are equal
    if all their numbers are. Raises ValueError if the expected answer is not a mathematical
    expression with a finite value."""
    text = expected_answer(prompt, config)
    expected = _parse_expected(text)
    last = _last_box(completion)
    if CLOCK.fullmatch(text) and (found := CLOCK.findall(last.replace("{:}", ":"))):
        return float(_numbers(text) == _numbers(found[-1]))
    is_equal = _are_equal(expected, _parse(last))
    if not is_equal and last != completion and isinstance(expected[0], sympy.Set | sympy.Tuple):
        is_equal = _are_equal(expected, _parse(completion))
    return float(is_equal)


def find_answer(completion: str) -> str | None:
    """Return math-verify's answer in the completion, in one spelling as far as that needs no
    algebra (0.5 and 1/2 are one answer, 2(x + 1) and 2x + 2 are two); None if it finds none."""
    last = _last_box(completion)
    found: Any = next(iter(_parse(last)), None)
    if getattr(found, "is_Float", False) and found.is_finite:
        found = Fraction(str(found))
    return None if found is None else str(found)


def _are_equal(expected: Sequence[Any], found: Sequence[Any]) -> bool:
    pairs = [(one, other) for one in expected for other in found]
    if not verify([*expected], [*found], timeout_seconds=None, raise_on_error=True):
        floats = [pair for pair in pairs if any(map(_is_float, pair))]
        return any(_are_rounded(_values(one), _values(other)) for one, other in floats)
    values = [(_values(one), _values(other)) for one, other in pairs]
    alike = [(one, other) for one, other in values if one and len(one) == len(other)]
    return not alike or any(all(map(_are_close, *pair)) for pair in alike)


def _are_close(one: Any, other: Any) -> bool:
    """Return whether two numbers that math-verify takes for equal really are; one may be the other
    as percent."""
    largest = max(abs(one), abs(other))
    if largest >= 1 or one == other:
        return True
    scales = ((1, 1), (100, 1), (1, 100))
    return any(
        abs(one * a - other * b) <= CLOSE * max(abs(one * a), abs(other * b)) for a, b in scales
    )


def _are_rounded(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether both are one large number, equal up to the rounding of floats."""
    if not len(some) == len(others) == 1:
        return False
    one, other = some[0], others[0]
    largest = max(abs(one), abs(other))
    return bool(1 <= largest < sympy.oo and abs(one - other) <= ROUNDED * largest)


def _is_float(value: Any) -> bool:
    return isinstance(value, sympy.Expr) and bool(value.has(sympy.Float))


def _values(value: Any) -> list[Any]:
    """Return a real number, or the numbers of a tuple, matrix or set in order, as decimals; an
    empty list for anything else."""
    if isinstance(value, sympy.Interval):
        parts = [value.start, value.end]
    elif isinstance(value, sympy.Tuple | sympy.FiniteSet):
        parts = [*value.args]
    elif isinstance(value, sympy.MatrixBase):
        parts = value.flat()
    else:
        parts = [value]
    are_numbers = all(isinstance(each, sympy.Expr) and each.is_number for each in parts)
    found = [each.evalf(NUM_DIGITS) for each in parts] if are_numbers else []
    if not all(each.is_comparable or each.is_infinite for each in found):
        return []
    return sorted(found) if isinstance(value, sympy.FiniteSet) else found


def _has_value(value: Any) -> bool:
    return isinstance(value, str) or not value.has(sympy.nan, sympy.zoo)


def _last_box(completion: str) -> str:
    """Return the last box that is not empty, the text from there on if its braces do not close, or
    the whole text if it has no box."""
    places = [found.start() for found in re.finditer(re.escape(BOX), completion)]
    full = [place for place in places if EMPTY_BOX.match(completion, place) is None]
    start, depth = [0, *places, *full][-1], 0
    for brace in BRACE.finditer(completion, start) if full else ():
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return completion[start : brace.end()]
    return completion[start:]


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(":")]


def _parse(completion: str) -> list[Any]:
    """Return the answers that math-verify finds; none if one of them has no value."""
    is_box = completion.startswith(BOX)
    text = spelled(completion, blanks_join=is_box)
    if is_box:  # in prose math-verify reads the sign itself
        text = text.replace(PERCENT, "")
    found: list[Any] = parse(text, parsing_timeout=None, raise_on_error=True)
    return found if all(map(_has_value, found)) else []


@lru_cache(maxsize=1024)
def _parse_expected(text: str) -> list[Any]:
    is_solution = text.count("$") >= 2 or any(mark in text for mark in LATEX_MARKS)
    is_prose = is_solution and BOX not in text and not ONE_FORMULA.fullmatch(text)
    text = spelled(text, blanks_join=not is_prose).replace(PERCENT, "").strip()
    if NUMBER.fullmatch(text):
        latex = f"${normal_form(text)}$"
    else:
        latex = text[max(0, text.find(BOX)) :] if is_solution else f"${text}$"
    options: dict[str, Any] = {"parsing_timeout": None, "raise_on_error": True}
    if not is_prose:  # else math-verify takes the first number of what it cannot read
        options["extraction_config"] = [LatexExtractionConfig()]
    parsed: list[Any] = parse(latex, **options)
    if all(isinstance(value, str) for value in parsed):
        must = "be a mathematical expression for reward.functions=[math]"
        raise ValueError(f"the expected answer must {must}, got {text!r} (compare text with exact)")
    if not all(map(_has_value, parsed)) and not CLOCK.fullmatch(text):
        raise ValueError(f"the expected answer must have a finite value, got {text!r}")
    return parsed
