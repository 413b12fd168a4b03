r"""Numbers in the spellings of people and models, rewritten as math-verify reads them.

Owns: mixed numbers, thousands, exponents, repeating decimals, per cent, money, typists' signs.
Does not own: reading mathematics (math-verify), or when two answers are equal (`math.py`).
Invariant: what is no number in one of these spellings stays as it is. math-verify reads `1\,000`
as 1 times 0, `1_000` as 1 and `2½` as 2, so that wrong answers would be right.
"""

import re
import unicodedata

from llamarl.environments.rewards.answer import normal_form

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
    """The text with its numbers as math-verify reads them; `blanks_join`: blanks between three
    digits each are those of one number."""
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
    """Digits that repeat without end, as a fraction."""
    whole, once, again = decimals[1], decimals[2], decimals[3] or decimals[4]
    above = int(whole + once + again) - int(whole + once)
    return rf"\frac{{{above}}}{{{'9' * len(again)}{'0' * len(once)}}}"


def _as_latex(fraction: re.Match[str]) -> str:
    above, below = unicodedata.normalize("NFKC", fraction[2]).split("\u2044")
    above = str(int(fraction[1] or 0) * int(below) + int(above))
    return rf"\frac{{{above}}}{{{below}}}"
