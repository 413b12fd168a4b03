"""The sharded decoder: gradients are the sum over ranks, also where a rank has no rows."""

from __future__ import annotations

import uuid
from pathlib import Path

import torch

from llamarl.data.micro_batch import micro_batch
from llamarl.models.architecture import Architecture
from llamarl.models.parallelize import shard
from llamarl.models.process_group import join, leave
from llamarl.models.transformer import Transformer
from llamarl.types import PROMPT_IDS, RESPONSE_IDS

LENGTHS = (30, 5, 11)
ARCHITECTURE = Architecture(
    model_type="qwen3",
    vocab_size=33,
    hidden_size=20,
    intermediate_size=31,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    max_positions=64,
    norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    tie_embeddings=True,
    attention_bias=True,
    output_bias=True,
    mlp_bias=False,
    qk_norm=True,
    eos_token_ids=(),
)


def build() -> Transformer:
    torch.manual_seed(0)
    return Transformer(ARCHITECTURE)


def add_gradient(model: Transformer, rows: tuple[int, ...]) -> None:
    ids = torch.randint(0, 33, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    rollouts = [part.numpy() for part in ids.split(list(LENGTHS))]
    columns = {
        PROMPT_IDS: [rollout[:1] for rollout in rollouts],
        RESPONSE_IDS: [rollout[1:] for rollout in rollouts],
    }
    packed = micro_batch(columns, rows, torch.device("cpu"))
    stats = model(packed.token_ids, packed.lengths, packed.targets, 0.8)
    logprobs, entropy = stats.logprobs[packed.response], stats.entropy[packed.response]
    (logprobs.sum() + 0.1 * entropy.sum()).backward()


async def sharded_gradient(
    rank: int, num_ranks: int, rendezvous: str, recompute: bool, rows: list[list[tuple[int, ...]]]
) -> dict[str, torch.Tensor]:
    """Gradients after the micro-batches `rows[i][rank]`."""
    mesh = join(rendezvous, rank, num_ranks, torch.device("cpu"))
    try:
        model = shard(
            build(), mesh, compute_dtype=torch.float32, activation_checkpointing=recompute
        )
        for micro_batch in rows:
            add_gradient(model, micro_batch[rank])
        assert all(parameter.grad is not None for parameter in model.parameters())
        return {name: p.grad.full_tensor().numpy() for name, p in model.named_parameters()}
    finally:
        leave()


def test_gradients_are_the_sum_over_ranks_even_if_one_has_no_rows(ranks, tmp_path: Path) -> None:
    plain = build()
    for rows in ((0, 2), (1,), (1, 2), (0,)):
        add_gradient(plain, rows)
    micro_batches = [[(0, 2), (1,)], [(), (1, 2)], [(0,), ()], [(), ()]]
    for recompute in (False, True):
        rendezvous = str(tmp_path / uuid.uuid4().hex)
        for gradients in ranks(2).run(sharded_gradient, rendezvous, recompute, micro_batches):
            for name, parameter in plain.named_parameters():
                assert parameter.grad is not None
                error = torch.from_numpy(gradients[name]) - parameter.grad
                assert error.norm() <= 1e-5 * parameter.grad.norm(), name
