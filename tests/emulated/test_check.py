"""`llamarl check`: each mistake of a machine is caught, by the line that is meant for it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.emulated.checking import CARD, check_with
from tests.trainer.ranks import Ranks

FREE = CARD.format(free=81000)
COLOCATED = ["placement=colocated", "placement.offload=pinned"]
ALL = ["recipe", "torch", "cards", "memory", "executors start", "publish", "generation", "step"]
ALL += ["publish after a step", "generation after a step", "memory in use"]
EAGER = ["executors start, eager", "graphs"]


def check(folder: Path, mistake: str, overrides: list[str], card: str) -> tuple[list[str], str]:
    """What the command prints and its error, in a process of its own."""
    ranks = Ranks(1)
    try:
        (answer,) = ranks.run(check_with, mistake, str(folder), overrides, card)
        return answer
    finally:
        ranks.close()


@pytest.mark.parametrize("overrides", [[], pytest.param(COLOCATED, marks=pytest.mark.long)])
def test_all_passes_on_a_device_that_computes_what_the_cpu_does(
    overrides: list[str], tmp_path: Path
) -> None:
    lines, error = check(tmp_path, "none", overrides, FREE)
    assert [line[8:32].strip() for line in lines] == ALL + EAGER
    assert all(line.startswith("ok ") for line in lines), lines
    assert not error
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    ("mistake", "overrides", "card", "caught", "words"),
    [
        ("wrong products", [], FREE, "generation", r"must be below 0\.001 and 0\.01: this device"),
        ("no driver", [], FREE, "recipe", r"device must be cpu on a machine without a GPU"),
        ("none", ["cluster.gpu=A100-40GB"], FREE, "cards", r"number 0 is a NVIDIA H100 80GB HBM3"),
        (
            "none",
            ["cluster.gpu=auto"],
            "NVIDIA Odd Card, 4000, 9.0, 4000",
            "memory",
            r"must fit into the 3\.9 GiB that one 4\.2GB has",
        ),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                (
                    "bytes lost on the way",
                    [],
                    FREE,
                    "publish",
                    r"publish of version 0 to generator 0: .*",
                ),
                (
                    "torch for CPUs",
                    [],
                    FREE,
                    "torch",
                    r"must be a build for GPUs .*got '2\.13\.0\+cpu",
                ),
                (
                    "none",
                    [],
                    CARD.format(free=1000),
                    "cards",
                    r"memory of card 0 must be free, got 78\.7",
                ),
                ("wrong gradient", [], FREE, "step", r"must be within 0\.2%"),
                ("a device that hangs", [], FREE, "generation", r"did not end within 4 s: "),
                ("stale graphs", [], FREE, "graphs", r"0 of 8 rollouts are the same"),
                ("bytes lost in offload", COLOCATED, FREE, "generation", r"must be below 0\.001"),
            )
        ),
    ],
)
def test_a_mistake_is_caught_by_its_own_line(
    mistake: str, overrides: list[str], card: str, caught: str, words: str, tmp_path: Path
) -> None:
    lines, error = check(tmp_path, mistake, overrides, card)
    failed = {line[8:32].strip(): line for line in lines if line.startswith("FAILED")}
    assert caught in failed, lines
    assert re.search(words, failed[caught]), failed
    assert error.startswith(f"all checks must pass, got {len(failed)} that did not: ")
    assert not list(tmp_path.glob("runs/*"))
