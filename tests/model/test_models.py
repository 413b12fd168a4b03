"""The decoder against transformers, feature by feature, on packed rollouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llamarl.core.config import EmbeddedConfig, TrainerConfig, VllmConfig
from llamarl.model.architecture import Architecture
from llamarl.model.attention import ModelInputs, make_packing
from llamarl.model.inventory import check_parallel
from llamarl.model.transformer import Layer, Transformer, rope_tables
from tests.tiny_checkpoints import (
    CASES,
    LENGTHS,
    LLAMA,
    NUM_TOKENS,
    load,
    reference_logits,
    relative_error,
    token_ids,
    write_reference,
)

TOLERANCE = 1e-4
Reference = tuple[Path, torch.Tensor, Any]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    cache: dict[str, Reference] = {}

    def get(case: str) -> Reference:
        if case not in cache:
            folder = tmp_path_factory.mktemp(case)
            model = write_reference(folder, **CASES[case])
            cache[case] = (folder, reference_logits(model), model)
        return cache[case]

    return get


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_librarys(references: Callable[[str], Reference], case: str) -> None:
    folder, expected, _ = references(case)
    assert expected.std() >= 1, "small logits would hide differences"
    model = load(folder)
    assert relative_error(model.logits(token_ids(), LENGTHS), expected) <= TOLERANCE


SPARSE = ("qwen3_moe", "qwen3_moe_tied", "mixtral", "olmoe")


@pytest.mark.parametrize("case", ["llama32", "qwen25", "qwen3", *SPARSE])
def test_stats_and_gradients_are_theirs(references: Callable[[str], Reference], case: str) -> None:
    folder, _, reference = references(case)
    model, ids, temperature = load(folder), token_ids(), 0.7
    targets, weights = ids.flip(0), torch.linspace(-1, 1, NUM_TOKENS)
    rows = [reference(row[None]).logits[0] for row in ids.split(list(LENGTHS))]
    log_p = (torch.cat(rows) / temperature).log_softmax(-1)
    logprobs, entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    reference.zero_grad()
    (logprobs @ weights + 0.3 * entropy.sum()).backward()
    stats = model(ModelInputs(ids, make_packing(LENGTHS), targets), temperature)
    (stats.logprobs @ weights + 0.3 * stats.entropy.sum()).backward()
    torch.testing.assert_close(stats.logprobs, logprobs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(stats.entropy, entropy, rtol=1e-4, atol=1e-4)
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        error = relative_error(parameter.grad, expected[name].grad)
        assert error <= 1e-4, f"{name}: {error}"


def test_lengths_that_do_not_add_up_are_refused() -> None:
    model = Transformer(tiny())
    for lengths in ((8, 0), (9, -1), ()):
        with pytest.raises(ValueError, match="lengths must be above 0, and at least one, got"):
            make_packing(lengths)
    for lengths, multiple in (((3, 3), 1), ((3, 4, 1), 3)):
        packing = make_packing(lengths, multiple)
        ids = torch.zeros(8, dtype=torch.int64)
        with pytest.raises(ValueError, match="packing must be of 8 tokens for 8 token ids, got"):
            model(ModelInputs(ids, packing, ids), 1.0)


def tiny(**fields: Any) -> Architecture:
    sizes = {"vocab_size": 50, "num_heads": 4, "tie_embeddings": False}
    features = {"attention_bias": True, "qk_norm": True}
    return dataclasses.replace(LLAMA, **(sizes | features | fields))


@pytest.mark.parametrize(
    ("fields", "num_ranks"),
    [
        ({"num_heads": 6}, 4),
        ({"num_kv_heads": 2}, 4),
        ({"intermediate_size": 42}, 4),
        ({"vocab_size": 50}, 4),
        ({}, 3),
    ],
)
def test_sizes_that_ranks_cannot_share_are_named(fields: dict[str, Any], num_ranks: int) -> None:
    even = tiny(**({"vocab_size": 52, "num_heads": 4, "num_kv_heads": 4} | fields))
    one, many = (TrainerConfig(num_ranks=size, tensor_parallel=size) for size in (1, num_ranks))
    check_parallel(even, TrainerConfig(num_ranks=2), EmbeddedConfig(num_replicas=2))
    check_parallel(even, one, VllmConfig(num_ranks=num_ranks))  # vLLM pads; it has its own check
    said = rf"must divide the checkpoint's {even.num_heads} attention heads, .* got {num_ranks}"
    with pytest.raises(ValueError, match=rf"trainer\.tensor_parallel {said}"):
        check_parallel(even, many, EmbeddedConfig())
    with pytest.raises(ValueError, match=rf"generator\.num_ranks {said}"):
        check_parallel(even, one, EmbeddedConfig(num_ranks=num_ranks))


def test_softmax_is_float32_under_bfloat16_compute() -> None:
    torch.manual_seed(0)
    model = Transformer(tiny()).bfloat16()
    ids = torch.randint(0, 50, (40,))
    with torch.no_grad():
        hidden = model.hidden_states(ids, make_packing((30, 10)))
        stats = model(ModelInputs(ids, make_packing((30, 10)), ids), 1.0)
    assert hidden.dtype == torch.bfloat16
    exact = (hidden.double() @ model.head_weight.double().T).log_softmax(-1)
    assert stats.logprobs.dtype == torch.float32
    expected = exact.gather(1, ids[:, None])[:, 0].float()
    torch.testing.assert_close(stats.logprobs, expected, rtol=1e-5, atol=1e-5)


class Products(TorchDispatchMode):
    """Counts matrix products and attentions."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"mm": 0, "_scaled_dot_product_flash_attention_for_cpu": 0}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if name in self.counts:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


def test_activation_checkpointing_changes_no_gradient_and_computes_again_what_it_says() -> None:
    ids = torch.randint(0, 50, (60,), generator=torch.Generator().manual_seed(0))
    grads, kept_bytes, counts = {}, {}, {}
    for checkpointing in ("none", "selective", "full"):
        torch.manual_seed(0)
        model = Transformer(tiny(num_layers=4, attention_bias=False))
        for layer in model.model.layers:
            assert isinstance(layer, Layer)
            layer.checkpointing = checkpointing
        kept = {}

        def keep(tensor: torch.Tensor, kept: dict = kept) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            stats = model(ModelInputs(ids, make_packing((50, 10)), ids), 1.0)
        with Products() as products:
            stats.logprobs.sum().backward()
        grads[checkpointing] = [parameter.grad for parameter in model.parameters()]
        kept_bytes[checkpointing] = sum(kept.values())
        counts[checkpointing] = list(products.counts.values())
    for other in ("selective", "full"):
        for plain, recomputed in zip(grads["none"], grads[other], strict=True):
            assert torch.equal(plain, recomputed)
        assert kept_bytes[other] < kept_bytes["none"] / 2  # outside of what selective caches
    assert counts["selective"] == counts["none"]
    products_again, attentions_again = (
        again - once for again, once in zip(counts["full"], counts["none"], strict=True)
    )
    assert products_again >= 4 * 6  # the last one of a layer is not needed again
    assert attentions_again == 4 * 2  # blocks of 50 and of 10 tokens


def test_far_rope_tables_are_those_of_transformers(references: Callable[[str], Reference]) -> None:
    folder, _, reference = references("llama31")
    cos, sin = rope_tables(load(folder).architecture, 200_000)
    positions = torch.tensor([[0, 31, 32, 1000, 131_071, 199_999]])
    expected = reference.model.rotary_emb(torch.zeros(1), positions)
    for mine, theirs in zip((cos, sin), expected, strict=True):
        half = theirs[0, :, : theirs.shape[-1] // 2]
        assert torch.equal(mine[positions[0]], half)


def test_bfloat16_models_rotate_by_float32_angles(references: Callable[[str], Reference]) -> None:
    """Of bfloat16, neighbours from position 256 on would have the same angle."""
    model = load(references("llama31")[0]).to(torch.bfloat16)
    seen: list[tuple[torch.Tensor, ...]] = []
    model.layers[0].register_forward_pre_hook(lambda _, given: seen.append(given[1]))
    hidden = model.hidden_states(torch.zeros(300, dtype=torch.int64), make_packing([300]))
    assert hidden.dtype == torch.bfloat16
    (rotation,) = seen
    for mine, table in zip(rotation, rope_tables(model.architecture, 300), strict=True):
        assert torch.equal(mine.squeeze(1), table)
