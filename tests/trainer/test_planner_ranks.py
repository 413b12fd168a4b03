"""What the planner says that ranks hold, against real ranks."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llamarl.core.config import EmbeddedConfig, LoraConfig, TrainerConfig
from llamarl.core.process_group import join, leave
from llamarl.model.architecture import read_architecture
from llamarl.model.attention import ModelInputs, make_packing
from llamarl.publish.shards import shard_boxes
from llamarl.trainer.activations import forecast_activations, fullest_packings
from llamarl.trainer.memory import forecast_trainer, trainer_layouts
from llamarl.trainer.parallel import make_mesh
from llamarl.trainer.policy import Policy
from tests.planner.planner_recipes import make_recipe
from tests.tiny_checkpoints import write_checkpoint

pytestmark = pytest.mark.full

TOKENS, CONTEXT = 60, 25
LORA = LoraConfig(rank=4, targets=["q_proj", "o_proj", "down_proj"])
LAYOUTS = {
    "shard": TrainerConfig(num_ranks=4, optimizer="sgd"),
    "replicate x shard": TrainerConfig(num_ranks=4, replicate=2),
    "tensor": TrainerConfig(num_ranks=4, tensor_parallel=4),
    "shard x tensor": TrainerConfig(num_ranks=4, tensor_parallel=2, reshard_after="backward"),
    "adapters, shard": TrainerConfig(num_ranks=4, lora=LORA),
    "adapters, shard x tensor": TrainerConfig(num_ranks=4, tensor_parallel=2, lora=LORA),
    "adapters, replicate x tensor": TrainerConfig(
        num_ranks=4, tensor_parallel=2, replicate=2, lora=LORA
    ),
}


def saved_bytes(policy: Policy, lengths: tuple[int, ...]) -> int:
    """What autograd holds on to after a forward, without parameters; runs the backward too."""
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        local = getattr(tensor, "_local_tensor", tensor)
        storages[local.untyped_storage()._cdata] = local.untyped_storage()
        return tensor

    token_ids = torch.arange(sum(lengths)) % 7
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        packing = make_packing(lengths, policy.model.num_tensor_ranks)
        stats = policy.model(ModelInputs(token_ids, packing, token_ids), 1.0)
    own = {
        getattr(p, "_local_tensor", p).untyped_storage()._cdata for p in policy.model.parameters()
    }
    total = sum(storage.nbytes() for key, storage in storages.items() if key not in own)
    (stats.logprobs.sum() + stats.entropy.sum()).backward()
    return total


async def hold(
    rank: int, num_ranks: int, checkpoint: str, rendezvous: str, configs: list[TrainerConfig]
) -> list[dict[str, Any]]:
    """What this rank holds under each config."""
    join(rendezvous, rank, num_ranks, torch.device("cpu"))
    found = []
    try:
        for config in configs:
            policy = Policy.load(checkpoint, make_mesh("cpu", config), config, seed=0)
            saved = saved_bytes(policy, *fullest_packings(TOKENS, CONTEXT - 1))
            grads = [parameter.grad.to_local() for parameter in policy.parameters.values()]
            moments = [
                getattr(tensor, "_local_tensor", tensor)
                for state in policy._optimizer.state.values()
                for tensor in state.values()
            ]
            found.append(
                {
                    "layout": shard_boxes(policy.parameters)[1],
                    "weights": sum(tensor.nbytes for tensor in policy.movable("weights")),
                    "gradients": sum(grad.nbytes for grad in grads),
                    "optimizer": sum(moment.nbytes for moment in moments),
                    "saved": saved,
                }
            )
        return found
    finally:
        leave()


@pytest.mark.long
def test_ranks_hold_what_the_planner_says(ranks: Any, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", vocab_size=60, num_key_value_heads=4)
    architecture = read_architecture(checkpoint)
    answers = ranks(4).run(hold, checkpoint, str(tmp_path / uuid.uuid4().hex), [*LAYOUTS.values()])
    for index, (name, trainer) in enumerate(LAYOUTS.items()):
        config = make_recipe(
            trainer=replace(trainer, tokens_per_micro_batch=TOKENS),
            generator=EmbeddedConfig(max_model_len=CONTEXT),
        )
        found = [answer[index] for answer in answers]
        for rank, layout in enumerate(trainer_layouts(config, architecture)):
            assert layout.parameters == found[rank]["layout"], (name, rank)
        memory = forecast_trainer(config, architecture)
        assert memory.weights == max(each["weights"] for each in found), name
        for kind in ("gradients", "optimizer"):
            assert memory.state.get(kind, 0) == max(each[kind] for each in found), (name, kind)
        # The planner counts what lives, also what no backward needs: results and packing.
        saved = forecast_activations(config, architecture).saved_bytes
        for each in found:
            assert saved == pytest.approx(each["saved"], rel=0.05), name
