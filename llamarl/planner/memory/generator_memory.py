"""What one generator rank has in memory.

Owns: weight buffer and staging, KV cache and working memory of the fullest rank, for both engines.
Does not own: sharing a device with others (`ranks.py`). Invariant: kinds mirror `publish/target.py`
and the embedded engine; vLLM's memory follows its own settings, and where it keeps its own weights
these are as large as the staging memory that they are copied from.
"""

from dataclasses import dataclass

import torch

from llamarl.core.config import Config, VllmConfig
from llamarl.core.device.names import is_gpu
from llamarl.generator.engine.engine import PREFILL_TOKENS
from llamarl.generator.engine.kv_cache import CpuKVCache, PaddedKVCache
from llamarl.generator.engine.weights import DTYPES
from llamarl.model.architecture import Architecture
from llamarl.planner.memory.shardings import published_buffer, weight_buffer
from llamarl.planner.memory.trainer_memory import Kinds
from llamarl.publish.layout import MESSAGE_BYTES
from llamarl.publish.reshard import DTYPE_BYTES
from llamarl.publish.transports.routes import TRANSPORTS

FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class GeneratorMemory:
    """Bytes by kind. `weights` and `kv_cache` leave the device while another executor has it, and
    `kept` bytes of the weights keep their content; `working` is there during decoding; `host` lies
    in host memory."""

    weights: Kinds
    kept: int
    kv_cache: int
    working: Kinds
    host: Kinds


def forecast_generator(config: Config, architecture: Architecture) -> GeneratorMemory:
    """Of the fullest rank."""
    generator = config.generator
    ranks = range(generator.num_ranks)
    num_bytes = max(published_buffer(config, architecture, rank)[1] for rank in ranks)
    weights: Kinds = {}
    kept = num_bytes
    if config.trainer.lora.is_used:  # the weights beside adapters are the engine's own
        weights["base"] = max(weight_buffer(config, architecture, rank)[1] for rank in ranks)
        kept += weights["base"]
    host: Kinds = {}
    in_host = config.weights.staging == "host" and is_gpu(generator.device)
    staging = host if in_host else weights
    weights["weights"] = staging["staging"] = num_bytes
    return GeneratorMemory(
        weights=weights,
        kept=kept,
        kv_cache=kv_cache_bytes(config, architecture),
        working=_working(config, architecture),
        host=host,
    )


def kv_cache_bytes(config: Config, architecture: Architecture) -> int:
    """Of one rank."""
    generator = config.generator
    if isinstance(generator, VllmConfig):
        return generator.kv_cache_bytes
    cache = (PaddedKVCache if is_gpu(generator.device) else CpuKVCache)(
        architecture,
        generator.num_ranks,
        generator.max_num_seqs,
        generator.max_model_len,
        DTYPES[generator.dtype],
        torch.device("meta"),
    )
    return cache.keys.nbytes + cache.values.nbytes


def _working(config: Config, architecture: Architecture) -> Kinds:
    """One layer of the largest prefill (residual, its norm and a copy of each, q, k, v twice, three
    of the feed-forward), float32 logits of all slots with their probabilities and a copy."""
    generator, a = config.generator, architecture
    item = DTYPE_BYTES[generator.dtype]
    tokens = generator.max_num_seqs * generator.max_model_len
    tokens = min(tokens, max(PREFILL_TOKENS, generator.max_model_len))
    split = 2 * (a.num_heads + 2 * a.num_kv_heads) * a.head_dim + 3 * a.intermediate_size
    kinds = {
        "activations": tokens * item * (4 * a.hidden_size + split // generator.num_ranks),
        "logits": 3 * FLOAT32_BYTES * generator.max_num_seqs * a.vocab_size,
    }
    if not TRANSPORTS[config.weights.transport].is_mapped:
        kinds["transfer"] = 2 * MESSAGE_BYTES
    return kinds
