"""vLLM with adapters, against the same model with merged weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from llamarl.core.config import LoraConfig
from llamarl.model.architecture import read_architecture
from llamarl.publish.comparison import compare_frozen
from llamarl.publish.fingerprint import shard_sums
from llamarl.publish.layout import kinds_of
from tests.adapter_oracle import merged, random_adapters
from tests.cluster.test_processes import is_loopback
from tests.uneven_publish import publish
from tests.vllm.checkpoints import check_logprobs, write_versions
from tests.vllm.engines import drain, make_engine, request, step
from tests.vllm.ranks import replicas

pytestmark = pytest.mark.vllm
LORA = LoraConfig(rank=5, alpha=6.0)  # vLLM has slots of rank 8


def versions(folder: str, model: Any, lora: LoraConfig) -> tuple[list[dict], list[Any]]:
    """Two versions of adapters, and the models that they make."""
    adapters = [random_adapters(read_architecture(folder), lora, seed) for seed in range(2)]
    return adapters, [merged(model, each, lora) for each in adapters]


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama", ["all-linear"]),
        pytest.param("qwen3", ["q_proj", "v_proj", "down_proj"], marks=pytest.mark.long),
        pytest.param("qwen25", ["k_proj", "gate_proj", "o_proj"], marks=pytest.mark.long),
    ],
)
def test_rollouts_are_those_of_the_merged_model_before_and_after_a_commit(
    family: str, targets: list[str], tmp_path: Path
) -> None:
    lora = LoraConfig(rank=5, alpha=6.0, targets=targets)
    ((folder, model), _) = write_versions(tmp_path, family)
    adapters, models = versions(folder, model, lora)
    engine = make_engine(folder, lora=lora, kv_after_commit="recompute")
    try:
        sums = engine.load_base(folder)
        whole = {name: each.detach() for name, each in model.named_parameters()}
        whole.pop("lm_head.weight", None) if engine.architecture.tie_embeddings else None
        compare_frozen([shard_sums(whole, kinds_of(engine._config, engine.architecture), 0, 1)],
                       [sums], 0)  # fmt: skip
        num_bytes = engine.memory.num_elements * engine.memory.dtype.itemsize
        assert num_bytes < 0.3 * sum(each.nbytes for each in whole.values())
        for row in range(6):
            engine.submit(request(row, tuple(range(3, 5 + 7 * row)), max_tokens=20))
        (flat,) = publish([engine.memory], adapters[0])
        engine.commit(engine.process_weights(flat), 0)
        done = step(engine, 8)
        (flat,) = publish([engine.memory], adapters[1])
        engine.commit(engine.process_weights(flat), 1)
        flat.fill_(7.0)  # the next publish writes there
        found = {item.request.row_id: item for item in done} | drain(engine)
        assert len(found) == 6
        for item in found.values():
            assert set(item.written.versions) == {0, 1}
            check_logprobs(item, models)
    finally:
        engine.close()


def test_two_ranks_share_adapters_and_count_each_weight_once(tmp_path: Path) -> None:
    ((folder, model), _) = write_versions(tmp_path, "llama")
    adapters, models = versions(folder, model, LORA)
    with replicas(folder, [tmp_path / "meeting"], lora=LORA) as (replica,):
        sums = replica.call("load_base", folder)
        whole = {name: each.detach() for name, each in model.named_parameters()}
        compare_frozen([shard_sums(whole, ["float32"], 0, 1)], sums, 0)
        flats = publish(replica.call("memory"), adapters[0])
        replica.call_each("commit", [(flat, 0) for flat in flats])
        replica.call("submit", [request(row, max_tokens=20) for row in range(4)])
        mine, theirs = replica.call("drain")
        for row, item in mine.items():
            check_logprobs(item, models)
            assert theirs[row].written.ids.tolist() == item.written.ids.tolist()
        for found in replica.call("listening"):
            assert [entry for entry in found if not is_loopback(entry[1])] == []


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"quantization": "fp8_per_channel"}, {}])
def test_in_bfloat16_and_beside_eight_bits_an_adapter_counts(changes: dict, tmp_path: Path) -> None:
    """Log-probs are nearer to the merged model's than to the checkpoint's."""
    ((folder, model), _) = write_versions(tmp_path, "llama", hidden_size=128, head_dim=64)
    adapters, models = versions(folder, model, LORA)
    engine = make_engine(folder, lora=LORA, dtype="bfloat16", **changes)
    try:
        sums = engine.load_base(folder)
        kinds = kinds_of(engine._config, engine.architecture)
        whole = load_file(Path(folder, "model.safetensors"))
        compare_frozen([shard_sums(whole, kinds, 0, 1)], [sums], 0)
        engine.commit(engine.process_weights(publish([engine.memory], adapters[0])[0]), 0)
        engine.submit(request(0, max_tokens=30))
        (item,) = drain(engine).values()
        tokens = torch.tensor([[*item.request.prompt_ids, *item.written.ids.tolist()]])
        num_prompt = len(item.request.prompt_ids)
        apart = []
        for each in (models[0], model):
            with torch.no_grad():
                logprobs = each(tokens).logits[0, num_prompt - 1 : -1].log_softmax(-1)
            own = logprobs.gather(1, tokens[0, num_prompt:, None])[:, 0]
            apart.append(np.abs(own.numpy() - item.written.logprobs).mean())
        assert apart[0] < 0.3
        assert apart[1] > 3 * apart[0]
    finally:
        engine.close()


def test_a_rank_that_vllm_has_no_slot_for_is_refused(tmp_path: Path) -> None:
    ((folder, _), _) = write_versions(tmp_path, "llama", hidden_size=1024, intermediate_size=1024)
    with pytest.raises(ValueError, match=r"trainer.lora.rank must be at most 512 with generator=v"):
        make_engine(folder, lora=LoraConfig(rank=513, targets=["gate_proj"]))
