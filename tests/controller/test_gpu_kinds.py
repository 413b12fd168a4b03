"""Which card is of which kind, and what does not fit into its memory is refused before a run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from llamarl.cli.reports import plan
from llamarl.controller import fit
from llamarl.controller import memory as ranks
from llamarl.controller.fit import check_fit, kind_here, on_this_card
from llamarl.controller.memory import forecast_memory
from llamarl.core.config import Config
from llamarl.core.device.devices import check_gpu
from llamarl.core.device.hardware import CPU, GPUS, gpu
from llamarl.core.device.names import is_kind
from llamarl.planner.recipe import forecast_recipe
from llamarl.planner.report import render_memory, render_report
from llamarl.recipe.inputs import read_planned_architecture
from llamarl.recipe.prompt_inputs import as_sft
from llamarl.trainer.losses.sft import SFTConfig
from tests.places import ROOT
from tests.planner.planner_recipes import LLAMA
from tests.recipe.composing import compose_recipe
from tests.recipe.test_config import MINIMUM, make_config

pytestmark = pytest.mark.full

RECIPE = ROOT / "recipes" / "gsm8k_llama32_1b_1gpu"
SMALL = (
    *("trainer.activation_checkpointing=full", "trainer.tokens_per_micro_batch=4096"),
    *("generator.max_num_seqs=64", "trainer.groups_per_step=4", "plan.num_steps=3"),
)
CARDS = [  # name and MiB as NVML gives them
    ("NVIDIA H100 80GB HBM3", 81_559, "H100-80GB"),
    ("NVIDIA H100 PCIe", 81_559, "H100-80GB"),
    ("NVIDIA H100 NVL", 95_830, "H100-NVL-94GB"),
    ("NVIDIA H200", 143_771, "H200-141GB"),
    ("NVIDIA H20", 97_871, "H20-96GB"),
    ("NVIDIA GH200 480GB", 97_871, "GH200-96GB"),
    ("NVIDIA GH200 144G HBM3e", 146_831, "GH200-144GB"),
    ("NVIDIA B200", 183_359, "B200-180GB"),
    ("NVIDIA A100-SXM4-80GB", 81_920, "A100-80GB"),
    ("NVIDIA A100 80GB PCIe", 81_920, "A100-80GB"),
    ("NVIDIA A100-SXM4-40GB", 40_960, "A100-40GB"),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97_887, "RTX-PRO-6000-96GB"),
    ("NVIDIA L40S", 46_068, "L40S-48GB"),
    ("NVIDIA RTX A6000", 49_140, "RTX-A6000-48GB"),
    ("NVIDIA GeForce RTX 5090", 32_607, "RTX-5090-32GB"),
    ("NVIDIA GeForce RTX 4090", 24_564, "RTX-4090-24GB"),
    ("NVIDIA GeForce RTX 3090", 24_576, "RTX-3090-24GB"),
    ("NVIDIA A10G", 23_028, "A10G-24GB"),
    ("Tesla T4", 15_360, "T4-16GB"),
    ("NVIDIA GeForce RTX 4090 D", 24_564, ""),
    ("NVIDIA GeForce RTX 3090 Ti", 24_564, ""),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 16_376, ""),
    ("NVIDIA RTX 6000 Ada Generation", 49_140, ""),
    ("NVIDIA GB200", 189_471, ""),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9_856, ""),
]


def config_of(*overrides: str) -> Config:
    return compose_recipe(RECIPE, [f"recipe_dir='{RECIPE}'", *overrides])


def install_tool(folder: Path, monkeypatch: pytest.MonkeyPatch, *rows: str) -> None:
    """An nvidia-smi that answers with these rows: name, MiB, compute capability; all is free."""
    rows = tuple(f"{row}, {row.split(',')[1]}" if row.count(",") == 2 else row for row in rows)
    tool = folder / "nvidia-smi"
    tool.write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(rows) + "\nEND\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(("name", "mib", "kind"), CARDS)
def test_a_card_is_of_one_kind_at_most(name: str, mib: int, kind: str) -> None:
    found = [each for each in GPUS if each != CPU and is_kind(each, name, mib * 2**20)]
    assert found == [kind] * bool(kind)
    if kind:  # torch counts up to 3% less than NVML
        assert is_kind(kind, name, int(0.97 * mib * 2**20))
    check_gpu("auto", name, mib * 2**20)


def test_the_card_with_the_least_memory_of_this_machine_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = "NVIDIA GeForce RTX 4090, 24564, 8.9"
    install_tool(tmp_path, monkeypatch, big, big)
    assert kind_here() == "RTX-4090-24GB"
    assert on_this_card(config_of()).cluster.gpu == "RTX-4090-24GB"
    for own in ({"gpu": "H200-141GB"}, {"num_hosts": 2}):  # named, or elsewhere
        config = config_of()
        config = replace(config, cluster=replace(config.cluster, **own))
        assert on_this_card(config) == config
    install_tool(tmp_path, monkeypatch, big, "NVIDIA GeForce RTX 3060, 12288, 8.6")
    assert kind_here() == "12.9GB"
    for sick in ("No devices were found", "NVIDIA T1000, [N/A], 7.5", ""):
        install_tool(tmp_path, monkeypatch, sick)
        assert kind_here() == ""
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert kind_here() == ""


@pytest.mark.full
def test_a_run_on_an_unknown_card_starts_if_its_memory_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(*SMALL)
    architecture = read_planned_architecture(config)
    install_tool(tmp_path, monkeypatch, "Some New Card, 34000, 13.0")
    check_fit(config, architecture)
    assert "bfloat16" not in caplog.text
    install_tool(tmp_path, monkeypatch, "Tesla V100-SXM2-32GB, 32768, 7.0")
    check_fit(config, architecture)
    assert "a Tesla V100-SXM2-32GB has no arithmetic in bfloat16: set float32" in caplog.text
    install_tool(tmp_path, monkeypatch, "NVIDIA GeForce RTX 3060, 12288, 8.6")
    with pytest.raises(ValueError, match=r"must fit into the 12\.0 GiB that one 12\.9GB has"):
        check_fit(config, architecture)
    install_tool(tmp_path, monkeypatch, "Tesla T4, 15360, 7.5")
    with pytest.raises(ValueError, match=r"trainer\.compute_dtype must be float32 on T4-16GB, whi"):
        check_fit(config, architecture)


@pytest.mark.parametrize(
    "kind",
    [
        *("H100-80GB", "T4-16GB"),
        *(
            pytest.param(kind, marks=pytest.mark.long)
            for kind in GPUS
            if kind not in (CPU, "H100-80GB", "T4-16GB")
        ),
    ],
)
def test_every_kind_has_a_forecast_of_the_1b_recipe_or_too_little_memory(kind: str) -> None:
    dtypes = () if "bfloat16" in GPUS[kind].flops else ("float32",)
    own = (
        f"{key}={name}" for name in dtypes for key in ("trainer.compute_dtype", "generator.dtype")
    )
    config = config_of(f"cluster.gpu={kind}", *SMALL, *own)
    architecture = read_planned_architecture(config)
    forecast = forecast_recipe(config, architecture)
    assert 0.1 < forecast.step.step_s < 60
    assert f"1 x {kind} (1 host): " in render_report(config, forecast)
    assert forecast.memory.fits == (GPUS[kind].memory_bytes > 30 * 2**30)


def test_a_size_is_planned_by_its_memory_alone() -> None:
    config = config_of("cluster.gpu=40GB", *SMALL)
    architecture = read_planned_architecture(config)
    text = render_memory(config, forecast_memory(config, architecture))
    assert text.startswith("on cards of 40GB: fits\n")
    assert text.endswith("no forecast of times: peaks are not known\n")
    with pytest.raises(ValueError, match=r"cluster\.gpu must be a kind of GPU with known peaks"):
        forecast_recipe(config, architecture)


def test_the_memory_that_a_size_needs_can_be_written_as_json(tmp_path: Path) -> None:
    path, config = tmp_path / "plan.json", config_of("cluster.gpu=80GB")
    options = {"trace": None, "sweep": False}
    plan(config, Console(file=StringIO()), json=str(path), **options)
    found = json.loads(path.read_text())
    memory = forecast_memory(config, read_planned_architecture(config))
    assert found["fits"] is memory.fits is True
    assert found["gpu_bytes"] == 80 * 10**9
    totals = [rank.total_bytes for rank in memory.ranks]
    assert found["peak_bytes"] == max(totals)
    assert [sum(rank["bytes_by_kind"].values()) for rank in found["memory"]] == totals
    assert "publish_s" not in found, "no time is known"


@pytest.mark.parametrize("name", ["B300", "B200", "0GB", "cpu", "80 GB"])
def test_what_is_no_kind_is_refused_with_those_that_are(name: str) -> None:
    known = "H100-80GB, H200-141GB"
    with pytest.raises(
        ValueError, match=f"cluster.gpu must be auto, a size such as 24GB, or one of {known}"
    ):
        gpu(name)


def test_auto_is_planned_like_the_kind_that_its_key_names() -> None:
    config = config_of(*SMALL)
    named = replace(config, cluster=replace(config.cluster, gpu="H100-80GB"))
    architecture = read_planned_architecture(config)
    assert forecast_memory(config, architecture) == forecast_memory(named, architecture)


ON_GPUS = [
    *("trainer.device=cuda", "generator.device=cuda", "weights=collective"),
    *("trainer.num_ranks=8", "cluster.num_hosts=4"),
]
CPU_ROOM = 20 << 30
WIDE = replace(LLAMA, num_layers=32, hidden_size=2048, num_heads=16, num_kv_heads=8, head_dim=128)


def test_a_pool_that_does_not_fit_is_named_in_one_line() -> None:
    pools = ["num_replicas=2", "num_replicas=2 max_num_seqs=4096"]
    with pytest.raises(ValueError, match=r"^the fullest generator\.pools\[1\] must fit") as raised:
        check_fit(make_config(f"generator.pools={pools}", *ON_GPUS, *MINIMUM), WIDE)
    assert "\n" not in str(raised.value)
    check_fit(make_config(f"generator.pools={pools[:1] * 2}", *ON_GPUS, *MINIMUM), WIDE)


@pytest.mark.parametrize("overrides", [[], ["trainer.device=cuda", "cluster.gpu=H100-80GB"]])
def test_demonstrations_need_the_trainer_alone(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (fit, ranks):
        monkeypatch.setattr(module, "available_bytes", lambda: CPU_ROOM)
    config = as_sft(make_config("algorithm=sft", *overrides, *MINIMUM))
    found = {rank.executor: rank for rank in ranks.forecast_memory(config, WIDE).ranks}
    others = [rank for name, rank in found.items() if name not in ("trainer", "host")]
    assert [set(rank.bytes_by_kind) - {"reserve"} for rank in others] == [set() for _ in others]
    on_host = set(found.get("host", found["trainer"]).bytes_by_kind)
    assert on_host == set(found["trainer"].bytes_by_kind)
    with pytest.raises(
        ValueError, match=r"^(the fullest trainer|all processes of a host) must fit"
    ):
        check_fit(config, replace(WIDE, intermediate_size=400_000))


OF_ROLLOUTS = {
    "algorithm.proximal": "interpolate",
    "algorithm.kl_coefficient": "0.1",
    "algorithm.mask_truncated": "true",
    "algorithm.advantage": "mean_std",
    "algorithm.overlong_penalty_tokens": "64",
    "algorithm.filters": "[equal_rewards]",
}


def test_of_the_keys_that_algorithms_share_only_those_of_a_likelihood_count_in_sft() -> None:
    shared = [f"{key}={value}" for key, value in OF_ROLLOUTS.items()]
    of_sft = ["algorithm.entropy_coefficient=0.01", "algorithm.normalization=rollouts"]
    found = as_sft(make_config("algorithm=sft", *shared, *of_sft, *MINIMUM))
    assert found.algorithm == SFTConfig(entropy_coefficient=0.01, normalization="rollouts")
    constant = make_config("algorithm=sft", "algorithm.normalization=constant", *MINIMUM)
    with pytest.raises(ValueError, match=r"^algorithm\.normalization must be tokens or rollouts"):
        as_sft(constant)


SHARDED = ["generator.num_ranks=4", "trainer.activation_checkpointing=full"]
HUGE = replace(WIDE, hidden_size=8192, intermediate_size=28672, num_heads=64, num_layers=48)


@pytest.mark.full
@pytest.mark.parametrize(
    ("overrides", "advised"),
    [
        (["trainer.num_ranks=64", "trainer.groups_per_step=64"], "trainer.num_ranks=32"),
        (["generator.num_replicas=200"], "generator.num_replicas=25"),
        pytest.param(
            [*ON_GPUS, *SHARDED, "cluster.num_hosts=2"],
            "trainer.num_ranks=16 cluster.num_hosts=4",
            marks=pytest.mark.long,
        ),
        ([*ON_GPUS, *SHARDED], "trainer.num_ranks=16"),
        (
            [*ON_GPUS, *SHARDED, "cluster.num_hosts=1", "trainer.num_ranks=4", "weights=cuda_ipc"],
            "",
        ),
    ],
)
def test_a_change_that_is_advised_is_enough(
    overrides: list[str], advised: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named with all that it needs, or not at all."""
    for module in (fit, ranks):
        monkeypatch.setattr(module, "available_bytes", lambda: CPU_ROOM)
    architecture = HUGE if "trainer.device=cuda" in overrides else LLAMA
    config = make_config(*overrides, *MINIMUM)
    with pytest.raises(ValueError, match=" must fit into the ") as raised:
        check_fit(config, architecture)
    change = str(raised.value).partition("; ")[2].partition(": ")[0]
    if not advised:
        assert change == "no single change is enough"
        return
    assert re.fullmatch(advised, change)
    check_fit(make_config(*overrides, *change.split(), *MINIMUM), architecture)
