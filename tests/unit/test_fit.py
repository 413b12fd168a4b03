"""What does not fit into memory is refused before a run starts, with a change that helps."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from llamarl.controller import fit
from llamarl.controller import memory as ranks
from llamarl.controller.fit import check_fit
from llamarl.recipe.prompt_inputs import as_sft
from llamarl.trainer.losses.sft import SFTConfig
from tests.unit.planner_recipes import LLAMA
from tests.unit.test_config import MINIMUM, make_config

GPUS = [
    *("trainer.device=cuda", "generator.device=cuda", "weights=collective"),
    *("trainer.num_ranks=8", "cluster.num_hosts=4"),
]
CPU_ROOM = 20 << 30
WIDE = replace(LLAMA, num_layers=32, hidden_size=2048, num_heads=16, num_kv_heads=8, head_dim=128)


def test_a_pool_that_does_not_fit_is_named_in_one_line() -> None:
    pools = ["num_replicas=2", "num_replicas=2 max_num_seqs=4096"]
    with pytest.raises(ValueError, match=r"^the fullest generator\.pools\[1\] must fit") as raised:
        check_fit(make_config(f"generator.pools={pools}", *GPUS, *MINIMUM), WIDE)
    assert "\n" not in str(raised.value)
    check_fit(make_config(f"generator.pools={pools[:1] * 2}", *GPUS, *MINIMUM), WIDE)


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
        check_fit(config, replace(WIDE, num_layers=400))


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
        ([*GPUS, *SHARDED, "cluster.num_hosts=2"], "trainer.num_ranks=16 cluster.num_hosts=4"),
        ([*GPUS, *SHARDED], "trainer.num_ranks=16"),
        ([*GPUS, *SHARDED, "cluster.num_hosts=1", "trainer.num_ranks=4", "weights=cuda_ipc"], ""),
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
