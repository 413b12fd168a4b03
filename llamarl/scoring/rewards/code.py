"""`code`: the program in the completion passes the tests in the prompt's row.

The answer field holds cases, each of which the program is run for, or asserts, which are run after
it:

    [{"input": "2 3\n", "output": "5"}, ...]      {"inputs": [...], "outputs": [...]}
    "assert add(2, 3) == 5"                       ["assert add(2, 3) == 5", ...]

Outputs are compared line by line without white space at their ends. What is expected never enters
the container, so cases cannot be cheated; asserts run in the program's own process, where a program
that wants to can.
"""

import re
import secrets
from typing import Any

from llamarl.core.config import RewardConfig
from llamarl.core.files import parse
from llamarl.core.records import Prompt, value_at
from llamarl.scoring.sandbox.contained import ProgramLimits, limits_of, run_in_turn

BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
Case = tuple[str, str]
"""(standard input, standard output expected)."""


async def reward(prompt: Prompt, completion: str, finished: bool, config: RewardConfig) -> float:
    """1 if the last fenced block of the completion, or all of it, is a Python program that passes
    every test; else 0. Raises ValueError for tests of another form."""
    tests = read_tests(prompt, config)
    source, limits = program_of(completion), limits_of(config)
    if isinstance(tests, str):
        return float(await _passes_asserts(source, tests, limits))
    for stdin, expected in tests:
        ran = await run_in_turn(source, stdin, limits)
        if not (ran.is_good and _lines(ran.stdout) == _lines(expected)):
            return 0.0
    return 1.0


def program_of(completion: str) -> str:
    """The last fenced block, or the whole text if there is none."""
    blocks: list[str] = BLOCK.findall(completion)
    return blocks[-1] if blocks else completion


def read_tests(prompt: Prompt, config: RewardConfig) -> str | list[Case]:
    """Asserts as one text, or cases. ValueError, which begins with the line, for anything else."""
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


async def _passes_asserts(source: str, tests: str, limits: ProgramLimits) -> bool:
    """A program that exits early does not print what follows its asserts."""
    mark = secrets.token_hex(8)
    whole = f"{source}\n\n{tests}\nprint('\\n{mark}')\n"
    ran = await run_in_turn(whole, "", limits)
    return ran.is_good and ran.stdout.endswith(f"\n{mark}\n")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
