"""A few damaged inputs of every kind; `make fuzz` tries over a thousand. What each door refuses is
in the default set: tests/unit/test_inputs.py, test_mistakes.py, and test_damage.py here."""

from __future__ import annotations

import re

import pytest

from tests.e2e.forks import Forks
from tests.places import ROOT

FUZZ = str(ROOT / "tools" / "fuzz.py")


@pytest.mark.long
@pytest.mark.parametrize("num_cases", [48, pytest.param(60, marks=pytest.mark.slow)])
def test_damaged_files_and_keys_are_named_or_survived_and_never_believed(
    num_cases: int, forks: Forks
) -> None:
    done = forks.run(FUZZ, "--seed=0", f"--cases={num_cases}", "--runs=0.02")
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert re.match(rf"{num_cases} cases, 0 findings", last)
    counts = re.search(r"^all +(\d+) +(\d+) +(\d+)", done.stdout, re.MULTILINE)
    assert counts is not None
    refused, passed_over, accepted = map(int, counts.groups())
    assert refused > 25, "else the damage does not reach what is checked"
    assert passed_over > 3
    assert accepted > 3
