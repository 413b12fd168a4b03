"""Decode steps as GPUs do them (padded, over slots, recorded), against those of CPUs, on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llamarl.core.config import EmbeddedConfig
from llamarl.generator.engine.decoder import padded_rows
from llamarl.generator.engine.engine import EmbeddedEngine
from llamarl.generator.protocol import RequestOutput
from tests.tiny_checkpoints import LLAMA, make_model
from tests.unit.engine_models import (
    VARIANTS,
    flat_weights,
    make_request,
    random_prompts,
    record_steps,
)


def write(
    engine: EmbeddedEngine, flats: list[torch.Tensor], live: torch.Tensor
) -> dict[int, RequestOutput]:
    """Rollouts of all kinds, twice as many as slots, some of equal prompts, through two commits
    into the live memory and a cache that was away."""
    prompts = random_prompts(6) + [tuple(range(30))] * 8
    kinds = [{}, {"temperature": 0.0}, {"top_p": 0.9}, {"temperature": 0.7, "top_k": 20}]
    live.copy_(flats[0])
    engine.commit(live, 0)
    for row, prompt in enumerate(prompts):
        engine.submit(make_request(row, prompt, 3 + 9 * row, **kinds[row % 4]))
    done = {}
    for step in range(1000):
        if step in (12, 40):
            live.copy_(flats[step == 12])
            engine.commit(live, step)
        if step == 20:
            engine.abort_requests([3])
        if step == 50:
            moved = [tensor.clone() for tensor in engine.movable("kv")]
            for tensor, kept in zip(engine.movable("kv"), moved, strict=True):
                tensor.copy_(kept)
        done |= {item.request.row_id: item for item in engine.step()}
        if not engine.has_work:
            break
    return done


@pytest.mark.parametrize("kind", [*VARIANTS, "int8", "bfloat16"])
def test_padded_and_recorded_steps_write_what_plain_ones_write(kind: str) -> None:
    architecture = VARIANTS.get(kind, LLAMA)
    config = EmbeddedConfig(
        max_num_seqs=7,
        max_model_len=160,
        kv_after_commit="recompute" if kind == "int8" else "keep",
        quantization="int8" if kind == "int8" else "none",
        dtype="bfloat16" if kind == "bfloat16" else "float32",
    )
    done = []
    for is_padded in (False, True):
        engine = EmbeddedEngine(architecture, config, is_padded=is_padded)
        if is_padded:
            graphs = record_steps(engine)
        flats = [flat_weights(engine, make_model(architecture, seed)) for seed in (1, 2)]
        flats = [flat.to(engine.memory.dtype) for flat in flats]
        done.append(write(engine, flats, torch.empty_like(flats[0])))
    assert 3 <= graphs.num_recorded <= 12
    assert graphs.num_forgotten == 3  # the first commit binds; the others overwrite; twice asked
    plain, padded = done
    assert len(plain) == len(padded) == 14
    num_tokens = num_compared = 0
    for row, item in plain.items():
        # A slot is known to be free one step later there, so what waits may start under a later
        # version; up to where versions part, all is equal.
        one, other = item.written, padded[row].written
        length = min(len(one.ids), len(other.ids))
        is_same = one.versions[:length] == other.versions[:length]
        if kind == "bfloat16":  # its tokens part ways at the first tie
            is_same &= one.ids[:length] == other.ids[:length]
        alike = slice(int(np.cumprod(is_same).sum()))
        num_tokens, num_compared = num_tokens + len(one.ids), num_compared + alike.stop
        differences = np.abs(one.logprobs[alike] - other.logprobs[alike])
        if kind == "bfloat16":
            assert differences.max(initial=0) < 0.3
            continue
        assert other.ids[alike].tolist() == one.ids[alike].tolist()
        np.testing.assert_allclose(other.logprobs[alike], one.logprobs[alike], rtol=1e-5, atol=1e-5)
    assert num_compared > num_tokens / (8 if kind == "bfloat16" else 2)
    assert len({version for item in plain.values() for version in item.written.versions}) == 3


@pytest.mark.parametrize("is_padded", [False, True])
def test_a_token_computed_for_a_rollout_that_had_stopped_does_not_count(is_padded: bool) -> None:
    config = EmbeddedConfig(max_num_seqs=4, max_model_len=160, dtype="float32")
    engine = EmbeddedEngine(LLAMA, config, is_padded=is_padded)
    engine.commit(flat_weights(engine, make_model(LLAMA, 1)), 0)
    for row in range(3):
        engine.submit(make_request(row, (1, 2), 7))
    done = []
    while engine.has_work:
        done += engine.step()
    assert len(done) == 3
    assert engine.num_written_tokens == sum(len(each.written.ids) for each in done) == 21


def test_a_row_without_a_rollout_reads_one_position() -> None:
    """It writes to a position behind all prompts, and would else read all before that."""
    config = EmbeddedConfig(max_num_seqs=4, max_model_len=160, dtype="float32")
    engine = EmbeddedEngine(LLAMA, config, is_padded=True)
    engine.commit(flat_weights(engine, make_model(LLAMA, 1)), 0)
    for row, prompt in enumerate([(1, 2), (3, 4, 5)]):
        engine.submit(make_request(row, prompt, 2 if row == 0 else 20))
    while engine.num_running != 1 or not engine._running.occupied[1]:
        engine.step()
    engine.step()
    positions, *_, lengths = engine._runner._static[:, :2].tolist()
    assert positions[0] > 100
    assert lengths == [1, positions[1] + 1]


def test_rows_are_padded_by_less_than_their_half_and_to_few_sizes() -> None:
    for most in (1, 2, 7, 64, 300):
        padded = [padded_rows(rows, most) for rows in range(1, most + 1)]
        assert all(rows <= size <= min(1.5 * rows, most) for rows, size in enumerate(padded, 1))
        assert len(set(padded)) <= 2 * most.bit_length()
