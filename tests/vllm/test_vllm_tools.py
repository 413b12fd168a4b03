"""Episodes with vLLM, token by token, started as a user starts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.commands import finish, read_rollouts, start
from tests.e2e.test_kept_ids import check as check_kept
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


def test_tokens_are_drawn_among_those_that_are_stored_with_them(tmp_path: Path) -> None:
    small = [each for each in SMALL if each != "cluster=inline"]
    own = ["sampling.top_k=6", "sampling.top_p=0.8", "sampling.segment_tokens=5"]
    common = f"--config-dir={TOOLS_RECIPE}", f"run_dir={tmp_path}", "generator=vllm"
    command = start("train", *common, *small, *own)
    code, out, err = finish(command, 300)
    assert code == 0, err + out
    lines = [line for line in read_rollouts(tmp_path) if line["outcome"] == "trained"]
    assert check_kept(lines[:40], {"top_k": 6, "top_p": 0.8}, tolerance=2e-3) > 200
    assert max(metrics(tmp_path)["trained/ratio_max"]) < 1.05
