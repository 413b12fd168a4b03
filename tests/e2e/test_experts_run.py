"""Runs of a mixture of experts: what generators record is where the trainer sends tokens."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from llamarl.model.architecture import read_architecture
from llamarl.model.tokenizer import TOKENIZER_FILES, copy_files
from llamarl.model.transformer import Transformer
from tests.e2e.forks import Forks
from tests.json_lines import read_lines
from tests.places import CHECKPOINT, RECIPE

SMALL = [
    "cluster=inline",
    "num_steps=2",
    "trainer.groups_per_step=4",
    "trainer.warmup_steps=0",
    "data.held_out=null",
    "checkpoint.export=false",
    "algorithm.filters=[]",
    "algorithm.entropy_coefficient=0.01",  # rollouts of one reward are passed over otherwise
    "sampling.rollouts_per_prompt=4",
    "sampling.max_tokens=24",
]
Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights with the quickstart's tokenizer: 8 experts, 2 for a token."""
    folder = tmp_path_factory.mktemp("mixture")
    copy_files(CHECKPOINT, TOKENIZER_FILES, folder)
    values = json.loads((CHECKPOINT / "config.json").read_text()) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    }
    (folder / "config.json").write_text(json.dumps(values))
    torch.manual_seed(0)
    model = Transformer(read_architecture(folder))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layernorm" not in name and "norm" not in name:
                parameter.normal_(0.0, 0.2)
    tensors = {name: each.detach() for name, each in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def train(forks: Forks, mixture: Path, tmp_path: Path) -> Run:
    """Runs `llamarl train` on the mixture; the metrics of its steps."""

    def run(*overrides: str) -> list[dict[str, Any]]:
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        places = [f"model.checkpoint={mixture}", f"run_dir={folder}"]
        done = forks.run("train", f"--config-dir={RECIPE}", *SMALL, *places, *overrides)
        assert done.returncode == 0, done.stderr
        return [
            line for line in read_lines(folder / "metrics.jsonl") if "trained/ratio_max" in line
        ]

    return run


@pytest.mark.parametrize(
    "overrides",
    [
        ["sampling.segment_tokens=7"],
        ["generator.kv_after_commit=recompute", "generator.max_num_seqs=8"],
        ["algorithm.kl_coefficient=0.1", "algorithm.proximal=recompute"],
    ],
)
def test_without_an_update_every_ratio_is_one_and_routers_agree(
    train: Run, overrides: list[str]
) -> None:
    for step in train("staleness.max_staleness=0", "trainer.lr=0", *overrides):
        assert step["trained/ratio_max"] == pytest.approx(1.0, abs=1e-3)
        assert step["trained/kl_generator"] == pytest.approx(0.0, abs=1e-6)
        assert step["trained/kl_reference"] == pytest.approx(0.0, abs=1e-6)
        assert step["experts/moved_share"] <= 1e-3  # where two experts are alike to rounding
        assert 1 / 8 < step["experts/busiest_share"] < 1
        assert 0 < step["experts/router_entropy"] < math.log(8)


def test_rounding_moves_routers_and_the_record_undoes_it(train: Run) -> None:
    rounded = ["generator.dtype=bfloat16", "staleness.max_staleness=0", "trainer.lr=0"]
    replayed, free = train(*rounded), train(*rounded, "trainer.routing_replay=off")
    assert all(step["experts/moved_share"] > 0 for step in replayed)
    assert all(step["experts/moved_share"] == 0 for step in free), (
        "there is no record to differ from"
    )
    means = [sum(step["trained/kl_generator"] for step in steps) for steps in (replayed, free)]
    assert means[0] < means[1]


def test_a_run_that_is_resumed_and_one_whose_weights_change_amid_rollouts_go_on(
    train: Run, forks: Forks, mixture: Path, tmp_path: Path
) -> None:
    options = ["sampling.segment_tokens=5", "staleness.max_staleness=1", "trainer.lr=1e-3"]
    steps = train(*options, "num_steps=3", "checkpoint.every_steps=2")
    assert [step["step"] for step in steps] == [1, 2, 3]
    places = [f"model.checkpoint={mixture}", f"run_dir={tmp_path / 'run'}"]
    more = ["num_steps=5", "checkpoint.resume=auto"]
    done = forks.run("train", f"--config-dir={RECIPE}", *SMALL, *options, *places, *more)
    assert done.returncode == 0, done.stderr


def test_ranks_that_cannot_share_the_experts_are_refused_before_anything_starts(
    forks: Forks, mixture: Path, tmp_path: Path
) -> None:
    places = [f"model.checkpoint={mixture}", f"run_dir={tmp_path / 'run'}"]
    wrong = ["trainer.num_ranks=3", "trainer.expert_parallel=3"]
    done: subprocess.CompletedProcess[str] = forks.run(
        "train", f"--config-dir={RECIPE}", *SMALL[1:], *places, *wrong
    )
    assert done.returncode == 2
    assert "trainer.expert_parallel must divide the checkpoint's 8 experts, got 3" in done.stderr
    assert "starting" not in done.stderr
