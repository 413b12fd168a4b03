"""Making vLLM engines, feeding them and running them; imports vLLM only when called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from llamarl.core.config import LoraConfig, VllmConfig
from llamarl.core.records import Request, Sampling
from llamarl.generator.engine.weights import DTYPES
from llamarl.generator.protocol import RequestOutput
from llamarl.generator.vllm.engine import VllmEngine

DEFAULTS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_model_len": 192,
    "kv_cache_bytes": 1 << 24,
}


def make_engine(
    checkpoint: str,
    rendezvous: Path | None = None,
    rank: int = 0,
    num_ranks: int = 1,
    keeps_addresses: bool | None = None,
    lora: LoraConfig | None = None,
    records_experts: bool = False,
    expert_parallel: bool = False,
    **changes,
) -> VllmEngine:
    config = VllmConfig(num_ranks=num_ranks, **(DEFAULTS | changes))
    config.expert_parallel = expert_parallel  # which a config for CPUs refuses
    return VllmEngine(
        checkpoint,
        config,
        rank=rank,
        num_ranks=num_ranks,
        rendezvous=str(rendezvous or ""),
        run_id="test",
        keeps_addresses=keeps_addresses,
        lora=lora,
        records_experts=records_experts,
    )


def loaded(engine: VllmEngine, folder: str) -> torch.Tensor:
    """Fresh flat memory with the weights of a checkpoint."""
    flat = torch.zeros(engine.memory.num_elements, dtype=engine.memory.dtype)
    engine.load(flat, folder)
    return flat


def commit(engine: VllmEngine, folder: str, version: int) -> int:
    return engine.commit(engine.process_weights(loaded(engine, folder)), version)


def request(row_id: int, prompt: tuple[int, ...] = (5, 6, 7), **kwargs) -> Request:
    fields = {"row_id": row_id, "prompt_ids": prompt, "seed": row_id}
    own = {key: kwargs.pop(key) for key in list(kwargs) if key in Request.__dataclass_fields__}
    sampling = Sampling(**({"max_tokens": 12} | kwargs))
    return Request(**(fields | {"sampling": sampling} | own))


def step(engine: VllmEngine, num_steps: int = 1) -> list[RequestOutput]:
    done: list[RequestOutput] = []
    for _ in range(num_steps):
        engine.admit()
        done += engine.decode()
    return done


def drain(engine: VllmEngine) -> dict[int, RequestOutput]:
    """Run until nothing is left to do; what finished, by row."""
    done: list[RequestOutput] = []
    while engine.has_work:
        done += step(engine)
    return {item.request.row_id: item for item in done}


def as_vllm_loads(engine: VllmEngine, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters after vLLM's own reload of whole tensors."""
    from vllm.model_executor.model_loader.reload import layerwise

    dtype = DTYPES[engine._config.dtype]
    layerwise.initialize_layerwise_reload(engine._model)
    engine._model.load_weights((name, tensor.to(dtype)) for name, tensor in weights.items())
    layerwise.finalize_layerwise_reload(engine._model, engine._core.vllm_config.model_config)
    return {name: tensor.data.clone() for name, tensor in engine._model.named_parameters()}
