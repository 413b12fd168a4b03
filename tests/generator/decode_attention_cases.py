"""The kernels of decode attention against torch's attention, on any device that runs Triton.

As a program, in a process of its own, for whether Triton interprets its functions is settled when
it is imported:
`TRITON_INTERPRET=1 python -m tests.generator.decode_attention_cases (engine | SEED...)`.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from llamarl.core.config import EmbeddedConfig
from llamarl.core.device.devices import PLATFORMS
from llamarl.core.device.platform import Platform
from llamarl.generator.engine import decode_attention, kv_cache
from llamarl.generator.engine.engine import EmbeddedEngine
from tests.generator.engine_models import (
    finish,
    flat_weights,
    make_request,
    random_prompts,
    record_steps,
)
from tests.random_search import case
from tests.tiny_checkpoints import LLAMA, make_model

# Of the largest value. Weights and the output become bfloat16, each less by 2^-8 of itself at most:
# the interpreter cuts off what a GPU rounds.
TOLERANCES = {torch.float32: 2**-20, torch.bfloat16: 2**-7}
ROUNDING = 2**-21  # of a float32 sum, by the sum of its terms' sizes


def check(seed: int, device: str) -> None:
    """One launch: what it writes is what torch's attention does in float64, whatever lies behind
    the rows' ends and in slots without a rollout; and a row alone gets the same bits."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    decode_attention.SPLIT = rng.choice([16, 64, 256])
    decode_attention.MOST_SPLITS = rng.choice([1, 3, 32])
    dtype = rng.choice(list(TOLERANCES))
    num_kv_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 3, 4, 8, 17])
    head_dim = rng.choice([8, 24, 32, 64, 64, 80, 128, 128])
    num_rows, num_positions = rng.randint(1, 5), 32 * rng.choice([1, 2, 3, 8, 20])
    ends = [rng.choice([1, num_positions, rng.randint(1, num_positions)]) for _ in range(num_rows)]
    held = [row for row in range(num_rows) if rng.random() < 0.8]  # rows with a rollout
    shape = (num_rows + rng.randint(0, 2), num_kv_heads, num_positions, head_dim)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    num_heads = num_kv_heads * group
    queries = draw(num_rows, num_heads + num_kv_heads, head_dim, scale=rng.choice([0, 1, 30]))
    queries = queries[:, :num_heads]  # the decoder's lie beside its keys
    keys, values = draw(*shape), draw(*shape, scale=rng.choice([1, 1e-3, 1e3]))
    unseen = torch.ones(shape[0], num_positions, dtype=torch.bool)
    for row in held:
        unseen[row, : ends[row]] = False
    for cache in (keys, values):
        cache.masked_fill_(unseen[:, None, :, None], torch.nan)
    given = [each.to(device) for each in (keys, values, torch.tensor(ends))]
    queries = queries.to(device)
    out = decode_attention.attend(queries, *given)
    assert out.dtype == dtype
    alone = decode_attention.attend(queries[:1], *given)
    assert 0 not in held or torch.equal(alone, out[:1])
    for row in held:
        end = ends[row]
        q, k, v = (
            each.double().cpu() for each in (queries[row], keys[row, :, :end], values[row, :, :end])
        )
        expected = functional.scaled_dot_product_attention(q[:, None], k, v, enable_gqa=True)
        apart = (out[row].double().cpu() - expected.flatten()).abs().max()
        keys_of_heads = k.abs().repeat_interleave(group, 0).transpose(1, 2)
        in_exponent = ROUNDING * (q[:, None].abs() @ keys_of_heads).max() / head_dim**0.5
        most = (TOLERANCES[dtype] + 2 * in_exponent) * v.abs().max()
        assert apart <= most, f"row {row}: {apart} apart, at most {most}"


class WithTriton(Platform):
    """A CPU on which Triton's kernels run: interpreted."""

    def has_triton(self, device: torch.device) -> bool:
        return True


def check_engine() -> None:
    """Recorded steps with the kernels write what plain ones write on a CPU, and there is one
    recording for each number of rows."""
    decode_attention.SPLIT, kv_cache.SHORTEST = 32, 8
    done = []
    for has_triton in (False, True):
        PLATFORMS["cpu"] = WithTriton() if has_triton else Platform()
        config = EmbeddedConfig(max_num_seqs=2, max_model_len=64, dtype="float32")
        engine = EmbeddedEngine(LLAMA, config, is_padded=has_triton)
        if has_triton:
            record_steps(engine)
        engine.commit(flat_weights(engine, make_model(LLAMA, 1)), 0)
        for row, prompt in enumerate([*random_prompts(2, longest=6), tuple(range(50))]):
            engine.submit(make_request(row, prompt, 9 - 2 * row))
        done.append(finish(engine))
    assert {length for _, length in engine._runner._replays} == {config.max_model_len}
    for row, item in done[0].items():
        other = done[1][row].written
        assert other.ids.tolist() == item.written.ids.tolist()
        np.testing.assert_allclose(other.logprobs, item.written.logprobs, rtol=1e-5, atol=1e-5)


def mend_interpreter() -> None:
    """Triton's interpreter holds bfloat16 as the integers of its bits, and `tl.dot` would multiply
    those: give it the float32 that each stands for."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot = InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    InterpreterBuilder.create_dot = create_dot


if __name__ == "__main__":
    torch.set_num_threads(1)
    mend_interpreter()
    if sys.argv[1:] == ["engine"]:
        check_engine()
    for seed in map(int, sys.argv[1:] if sys.argv[1] != "engine" else []):
        with case(seed):
            check(seed, "cpu")
