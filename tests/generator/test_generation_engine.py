"""The engine against the trainer's own model, with fewer bits, and with steps as GPUs do them.

Ends, aborts, versions, resumed rollouts and eight bits are what test_engine_search draws."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from llamarl.core.config import EmbeddedConfig
from llamarl.core.records import Sampling
from llamarl.generator.engine import decoder
from llamarl.generator.engine.decoder import float32_product, padded_rows, product
from llamarl.generator.engine.engine import EmbeddedEngine
from llamarl.generator.engine.kv_cache import CALL_COST, cut
from llamarl.generator.engine.scheduler import completes_stop_string
from llamarl.generator.protocol import RequestOutput
from llamarl.model.transformer import rope_tables
from tests.generator.engine_models import (
    VARIANTS,
    CountedVersions,
    finish,
    flat_weights,
    make_engine,
    make_request,
    model_logprobs,
    quantized,
    random_prompts,
    record_steps,
)
from tests.tiny_checkpoints import LLAMA, make_model


@pytest.mark.parametrize("name", VARIANTS)
def test_logprobs_equal_the_trainers_model(name: str) -> None:
    model = make_model(VARIANTS[name], 1)
    engine = make_engine(model)
    for row, prompt in enumerate(random_prompts(9)):
        engine.submit(make_request(row, prompt, 3 + 12 * row, temperature=0.7 + 0.1 * row))
    for item in finish(engine).values():
        expected = model_logprobs(model, item, item.request.sampling.temperature)
        np.testing.assert_allclose(item.written.logprobs, expected, rtol=1e-5, atol=1e-5)
        assert expected.std() > 0.1


@pytest.mark.parametrize("is_quantized", [False, True])
def test_logits_of_a_wide_head_are_exact_in_every_tile(is_quantized: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 700).bfloat16()
    head = torch.randn(700, 3300).bfloat16()  # more than one tile, the last one not whole
    matrix = quantized(head, "int8")
    exact = x.double() @ (matrix.dequantized() if is_quantized else head).double()
    logits = float32_product(x, matrix if is_quantized else head)
    assert logits.dtype == torch.float32
    assert (logits - exact).abs().max() < 1e-3
    assert (product(x, matrix if is_quantized else head) - exact).abs().max() > 0.1


def test_a_stop_string_is_found_around_any_number_of_tokens_without_text() -> None:
    def decode(ids) -> str:
        return "".join(chr(97 + i) for i in ids if i < 26)  # the others are special ones

    sampling = Sampling(max_tokens=99, stop_strings=("yes",))
    ids = [4, 24, *[30] * 40, 4, *[31] * 40, 18]
    assert completes_stop_string(sampling, ids, decode)
    assert not completes_stop_string(sampling, ids[:-1], decode)
    assert not completes_stop_string(sampling, [30] * 40, decode)


def test_reading_groups_waste_little_and_cover_every_row_once() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        lengths = -np.sort(-rng.integers(1, 600, rng.integers(1, 65)))
        runs = cut(lengths)
        assert [row for start, stop in runs for row in range(start, stop)] == list(
            range(len(lengths))
        )
        for start, stop in runs:
            assert (lengths[start] - lengths[start:stop]).sum() <= CALL_COST


def test_a_long_queue_costs_a_submit_nothing() -> None:
    engine = make_engine(make_model(LLAMA, 1), slots=2)
    for row in range(5000):
        engine.submit(make_request(row, (1, 2), min_version=1 + row % 2))
    engine.submit(make_request(5000, (1, 2), 3))
    examined = CountedVersions(0)
    engine.version = examined
    assert engine.has_work
    assert len(engine._queue.take(examined, 2)) == 1
    assert examined.count < 50


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_what_moves_beside_the_weight_buffer_is_the_cache(quantization: str) -> None:
    engine = make_engine(make_model(LLAMA, 1), config={"quantization": quantization})
    kv_bytes = sum(t.nbytes for t in engine.movable("kv"))
    assert kv_bytes == 2 * LLAMA.num_layers * 4 * LLAMA.num_kv_heads * 160 * LLAMA.head_dim * 4
    assert engine.movable("weights") == []


def test_an_engine_in_bfloat16_rotates_by_float32_angles() -> None:
    """Those of the trainer's model, which neighbours far out would share in bfloat16."""
    engine = EmbeddedEngine(
        LLAMA, EmbeddedConfig(max_num_seqs=4, max_model_len=300, dtype="bfloat16")
    )
    cos, sin = rope_tables(LLAMA, 300)
    half = LLAMA.head_dim // 2
    assert torch.equal(engine._decoder._cos[:300, half:], cos)
    assert torch.equal(engine._decoder._sin[:300, half:], sin)


def test_a_commit_that_recomputes_gives_the_trainers_logprobs_of_each_version() -> None:
    models = [make_model(LLAMA, 1), make_model(LLAMA, 2)]
    engine = make_engine(models[0], config={"kv_after_commit": "recompute"})
    for row, prompt in enumerate(random_prompts(4)):
        engine.submit(make_request(row, prompt, 25))
    for _ in range(9):
        assert engine.step() == []
    assert engine.commit(flat_weights(engine, models[1]), 1) == 4
    for item in finish(engine).values():
        before, after = (model_logprobs(model, item) for model in models)
        np.testing.assert_allclose(item.written.logprobs[:9], before[:9], atol=1e-5)
        np.testing.assert_allclose(item.written.logprobs[9:], after[9:], atol=1e-5)
        assert np.abs(before - after).max() > 0.1
        assert item.written.versions.tolist() == [0] * 9 + [1] * 16


def test_rollouts_of_one_prompt_share_one_prefill_per_version() -> None:
    models = [make_model(LLAMA, 1), make_model(LLAMA, 2)]
    engine = make_engine(models[0], slots=4)
    prompt = random_prompts(1, 40)[0] + tuple(range(40))
    for row in range(10):
        engine.submit(make_request(row, prompt, 3 + row))
    finish(engine)
    assert engine.num_prefilled_tokens == len(prompt) - 1
    engine.commit(flat_weights(engine, models[1]), 1)
    for row in range(10):
        engine.submit(make_request(row, prompt, 3 + row))
    done = finish(engine)
    assert engine.num_prefilled_tokens == 2 * (len(prompt) - 1)
    for item in done.values():
        expected = model_logprobs(models[1], item)
        np.testing.assert_allclose(item.written.logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("kind", ["tied", "untied", "int8"])
def test_a_bfloat16_engine_rounds_its_weights_but_not_its_logits(
    kind: str, is_padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probs against float64 ones of the very hidden states and head that the engine has."""
    architecture = replace(LLAMA, tie_embeddings=kind == "tied")
    quantization = "int8" if kind == "int8" else "none"
    config = EmbeddedConfig(
        max_num_seqs=4, max_model_len=160, dtype="bfloat16", quantization=quantization
    )
    engine = EmbeddedEngine(architecture, config, is_padded=is_padded)
    engine.commit(flat_weights(engine, make_model(architecture, 1)), 0)
    for row, prompt in enumerate(random_prompts(4)):
        engine.submit(make_request(row, prompt))
    seen = []

    def record(hidden, head):
        seen.append((hidden.clone(), head, float32_product(hidden, head)))
        return seen[-1][2].clone()  # sampling overwrites them

    monkeypatch.setattr(decoder, "float32_product", record)
    engine.step()
    hidden, head, logits = seen[-1]
    head = head.dequantized() if kind == "int8" else head
    exact = (hidden.double() @ head.double()).log_softmax(-1)
    assert logits.dtype == torch.float32
    assert exact.std() > 1  # bfloat16 rounds numbers of this size by up to 0.01
    assert (logits.double().log_softmax(-1) - exact).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "steps"), [("int8", 254), ("fp8", 32)])
def test_a_quantised_matrix_is_near_the_plain_one_and_multiplies_as_it_says(
    kind: str, steps: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(700, 1500).mul_(torch.logspace(-3, 3, 1500)).to(dtype)
    matrix[:, 7] = 0
    quantised = quantized(matrix, kind)
    wide = quantised.dequantized()
    span = 2 * matrix.float().abs().amax(dim=0)
    assert ((wide - matrix.float()).abs() <= span / steps * 1.02).all()
    assert not wide[:, 7].any()
    for num_rows in (1, 5, 40):
        x = torch.randn(num_rows, 700).to(dtype)
        exact = x.double() @ wide.double()
        error = (quantised.product(x) - exact).abs()
        sizes = x.double().abs() @ wide.double().abs()  # of the terms that were added up
        assert (error <= (1e-6 if dtype is torch.float32 else 1e-2) * sizes).all()


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padded_and_recorded_steps_write_what_plain_ones_write(dtype: str) -> None:
    config = EmbeddedConfig(max_num_seqs=7, max_model_len=160, dtype=dtype)
    done = []
    for is_padded in (False, True):
        engine = EmbeddedEngine(LLAMA, config, is_padded=is_padded)
        if is_padded:
            graphs = record_steps(engine)
        flats = [flat_weights(engine, make_model(LLAMA, seed)) for seed in (1, 2)]
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
        if dtype == "bfloat16":  # its tokens part ways at the first tie
            is_same &= one.ids[:length] == other.ids[:length]
        alike = slice(int(np.cumprod(is_same).sum()))
        num_tokens, num_compared = num_tokens + len(one.ids), num_compared + alike.stop
        assert other.ids[alike].tolist() == one.ids[alike].tolist()
        atol = 0.3 if dtype == "bfloat16" else 1e-5
        np.testing.assert_allclose(other.logprobs[alike], one.logprobs[alike], rtol=0, atol=atol)
    assert num_compared > num_tokens / (8 if dtype == "bfloat16" else 2)
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
