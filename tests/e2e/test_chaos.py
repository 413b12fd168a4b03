"""The short form of `make chaos`: one leg, other victims and moments every day. The default set has
test_healing.py."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.e2e.chaos import SMALL_RUN, Chaos
from tests.random_search import case, searched


@pytest.mark.long
@searched(few=1, many=12)
def test_a_run_of_which_processes_are_killed_and_stopped_ends_as_if_they_were_not(
    seeds: list[int], tmp_path: Path
) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        others = ["start", "publish", "save", "evaluation", "end"]  # some pass too fast to be met
        moments = ["step", rng.choice(others)]
        chaos = Chaos(tmp_path / str(seed), SMALL_RUN, rng, num_prompts=16, per_step=64)
        with case(seed):
            chaos.run_leg(moments)
        assert chaos.num_faults > 0
