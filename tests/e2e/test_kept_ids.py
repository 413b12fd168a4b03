"""Runs whose tokens are drawn among the likeliest ones: what is stored of each is what transformers
computes under the same restriction."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from llamarl.core.records import NO_VERSION
from tests.e2e.commands import read_rollouts
from tests.e2e.forks import Forks
from tests.json_lines import read_lines
from tests.places import TOOLS_RECIPE

OPTIONS = [
    *("cluster=inline", "num_steps=3", "trainer.groups_per_step=6", "trainer.warmup_steps=0"),
    *("trainer.lr=0", "evaluation.max_prompts=3", "evaluation.every_steps=0"),
    *("checkpoint.export=false", "experience.keep_rollouts=1", "algorithm.kl_coefficient=0.01"),
]
PATHS = {
    "among 4": (["sampling.top_k=4"], {"top_k": 4}),
    "cut, among those of 10 that have most of the probability": (
        ["sampling.top_k=10", "sampling.top_p=0.7", "sampling.segment_tokens=4"],
        {"top_k": 10, "top_p": 0.7},
    ),
    "by transformers, among those that are likely enough": (
        ["sampling.top_k=10", "sampling.min_p=0.2", "trainer=transformers"],
        {"top_k": 10, "min_p": 0.2},
    ),
}


def restricted(logits: torch.Tensor, sampling: Mapping[str, float]) -> torch.Tensor:
    """Log-probs [V] by the definition: -inf for tokens that cannot be drawn."""
    probs = logits.double().softmax(-1)
    order = probs.argsort(descending=True)
    likely = [i for i in order.tolist() if probs[i] >= sampling.get("min_p", 0) * probs.max()]
    kept = likely[: int(sampling["top_k"])]
    total, mass, nucleus = probs[kept].sum(), 0.0, []
    for i in kept:
        if mass >= sampling.get("top_p", 1.0) * total:
            break
        nucleus.append(i)
        mass += float(probs[i])
    result = torch.full_like(probs, -torch.inf)
    result[nucleus] = (probs[nucleus] / probs[nucleus].sum()).log()
    return result


@torch.no_grad()
def check(
    lines: list[dict[str, Any]], sampling: Mapping[str, float], tolerance: float = 2e-4
) -> int:
    """Returns how many tokens were compared."""
    model = AutoModelForCausalLM.from_pretrained(TOOLS_RECIPE / "checkpoint", dtype=torch.float32)
    num_checked = 0
    for line in lines:
        ids = line["prompt_ids"] + line["response_ids"]
        logits = model(torch.tensor([ids])).logits[0]
        start = len(line["prompt_ids"])
        for place, version in enumerate(line["token_versions"]):
            if version == NO_VERSION:
                continue
            expected = restricted(logits[start + place - 1], sampling)[ids[start + place]]
            for name in ("generator_logprobs", "trainer_logprobs", "ref_logprobs"):
                if name in line:
                    assert line[name][place] == pytest.approx(float(expected), abs=tolerance), name
            num_checked += 1
    return num_checked


@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=pytest.mark.long if p != "among 4" else ()) for p in PATHS]
)
def test_every_log_prob_is_that_among_the_tokens_that_could_be_drawn(
    forks: Forks, tmp_path: Path, path: str
) -> None:
    overrides, sampling = PATHS[path]
    common = f"--config-dir={TOOLS_RECIPE}", f"run_dir={tmp_path}", *OPTIONS
    done = forks.run("train", *common, *overrides)
    assert done.returncode == 0, done.stderr
    lines = [line for line in read_rollouts(tmp_path) if line["outcome"] == "trained"]
    assert check(lines[:40], sampling) > 200
    steps = [line for line in read_lines(tmp_path / "metrics.jsonl") if "trainer/loss" in line]
    assert len(steps) == 3
    for step in steps:
        assert step["trained/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
        assert step["trained/ratio_max"] < 1.01
        assert step["trained/kl_reference"] == pytest.approx(0.0, abs=1e-4)
        assert np.isfinite(step["trained/entropy"])
