"""A run of the shipped recipe whose generator is split over two processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.commands import finish, train

pytestmark = pytest.mark.slow


def test_a_generator_of_two_ranks_serves_a_run(tmp_path: Path) -> None:
    command = train(
        tmp_path, "num_steps=3", "generator.num_ranks=2", "generator.num_replicas=2",
        "weights.staging=host", "staleness.max_staleness=0",
    )  # fmt: skip
    code, out, err = finish(command, 300.0)
    assert code == 0, err + out
    assert command.wait_until_gone(10) == []
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 3
    # On-policy, so the trainer's log-probs are the generator's: of every rank, the right weights.
    assert summary["ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert summary["staleness_max"] == 0
