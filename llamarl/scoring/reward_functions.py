"""The expected answer of a prompt, and the rewards `exact`, `format` and `code`.

A missing or unusable expected answer raises; it never makes a completion wrong. The expected output
of a case of `code` never enters the sandbox, so a program cannot cheat; asserts run in the
program's own process, where it can."""

import math
import re
import secrets
from decimal import Decimal
from typing import Any

from llamarl.core.config import RewardConfig
from llamarl.core.files import parse
from llamarl.core.records import Prompt, value_at
from llamarl.scoring.sandbox.containers import limits_of, run_in_turn

GSM8K_MARK = "####"
NUMBER = re.compile(
    r"[$]?([+-]?)[$]?((?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?)"
)
BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
Case = tuple[str, str]
"""The standard input of a program, and the standard output expected."""


def expected_answer(prompt: Prompt, config: RewardConfig) -> str:
    """Return the answer field of the data row as text; for a GSM8K solution, the text after its
    last ####.

    Raises KeyError if the row lacks `config.answer_field`, TypeError if it is neither text nor a
    number, ValueError if it is blank."""
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
    """Return one spelling for answers that differ in white space or in how a number is written.

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


def reward_exact(prompt: Prompt, completion: str, finished: bool, config: RewardConfig) -> float:
    """Return 1 if group 1 of `config.pattern`, searched in the completion, is the expected answer,
    up to white space and number format; else 0, also if `config.require_stop` and not `finished`.
    Raises as `expected_answer` does."""
    expected = normal_form(expected_answer(prompt, config))
    if config.require_stop and not finished:
        return 0.0
    return float(find_exact(completion, config) == expected)


def find_exact(completion: str, config: RewardConfig) -> str | None:
    """Return group 1 of `config.pattern` in the completion, in one spelling; None without a
    match."""
    match = re.search(config.pattern, completion)
    return None if match is None or match[1] is None else normal_form(match[1])


def reward_format(prompt: Prompt, completion: str, finished: bool, config: RewardConfig) -> float:
    """Return 1 if `config.pattern` is found in the completion; 0 if not, or if
    `config.require_stop` and the completion did not end by itself."""
    if config.require_stop and not finished:
        return 0.0
    return float(re.search(config.pattern, completion) is not None)


async def reward_code(
    prompt: Prompt, completion: str, finished: bool, config: RewardConfig
) -> float:
    r"""Return 1 if the last fenced block of the completion, or all of it, is a Python program that
    passes every test of the answer field; else 0. Raises ValueError for tests of another form.

    The program is run for each case, and asserts are run after it:

        [{"input": "2 3\n", "output": "5"}, ...]      {"inputs": [...], "outputs": [...]}
        "assert add(2, 3) == 5"                       ["assert add(2, 3) == 5", ...]

    Outputs are compared line by line without white space at their ends."""
    tests, limits = read_tests(prompt, config), limits_of(config)
    blocks: list[str] = BLOCK.findall(completion)
    source = blocks[-1] if blocks else completion
    if isinstance(tests, str):
        mark = secrets.token_hex(8)  # a program that exits early does not print it
        ran = await run_in_turn(f"{source}\n\n{tests}\nprint('\\n{mark}')\n", "", limits)
        return float(ran.is_good and ran.stdout.endswith(f"\n{mark}\n"))
    for stdin, expected in tests:
        ran = await run_in_turn(source, stdin, limits)
        if not (ran.is_good and _lines(ran.stdout) == _lines(expected)):
            return 0.0
    return 1.0


def read_tests(prompt: Prompt, config: RewardConfig) -> str | list[Case]:
    """Return asserts as one text, or cases. Raises ValueError, which begins with the line number,
    for anything else."""
    value = None
    try:
        value = value_at(prompt.fields, config.answer_field)
        tests = _tests(value)
    except (ValueError, TypeError, KeyError):
        tests = []
    if not tests:
        must = "hold asserts, or cases with input and output"
        where = f"line {prompt.line}: {config.answer_field!r} (reward.answer_field)"
        raise ValueError(f"{where} must {must}, got {value!r:.100}")
    return tests


def _tests(value: Any) -> str | list[Case]:
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        value = parse(value)
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        value = "\n".join(value)
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, dict):
        return [*zip(map(str, value["inputs"]), map(str, value["outputs"]), strict=True)]
    return [(str(each["input"]), str(each["output"])) for each in value or ()]


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
