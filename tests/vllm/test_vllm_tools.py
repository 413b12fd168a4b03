"""Episodes with vLLM, token by token, started as a user starts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.commands import finish, read_rollouts, start
from tests.e2e.test_tools_exact import SMALL, check, metrics
from tests.json_lines import read_lines
from tests.places import TOOLS_RECIPE

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param([], marks=pytest.mark.slow),
        ["sampling.segment_tokens=5"],
        ["generator.num_ranks=2"],
    ],
    ids=["whole", "cut", "two ranks"],
)
def test_every_token_of_an_episode_is_what_it_should_be(
    overrides: list[str], tmp_path: Path
) -> None:
    small = [each for each in SMALL if each != "cluster=inline"]
    command = start(
        "train",
        f"--config-dir={TOOLS_RECIPE}",
        f"run_dir={tmp_path}",
        "generator=vllm",
        *small,
        *overrides,
    )
    code, out, err = finish(command, 300)
    assert code == 0, err + out
    rows = dict(enumerate(read_lines(TOOLS_RECIPE / "prompts.jsonl"), start=1))
    lines = [line for line in read_rollouts(tmp_path) if line["outcome"] == "trained"]
    num_turns = [len(check(line, rows)) // 2 + 1 for line in lines]
    assert max(num_turns) >= 3
    scalars = metrics(tmp_path)
    assert max(scalars["trained/ratio_max"]) < 1.05
    assert min(scalars["episode/kept_share"]) > 0, "of its prefix cache, keyed by version"
