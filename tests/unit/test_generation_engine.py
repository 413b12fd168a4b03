"""The engine against transformers and against the trainer's own model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llamarl.core.config import EmbeddedConfig
from llamarl.core.records import FinishReason, Purpose, Sampling
from llamarl.generator.engine.decoder import float32_product, product
from llamarl.generator.engine.engine import EmbeddedEngine
from llamarl.generator.engine.kv_cache import CALL_COST, cut
from llamarl.generator.engine.scheduler import completes_stop_string
from llamarl.model.transformer import rope_tables
from tests.tiny_checkpoints import LLAMA, make_model
from tests.unit.engine_models import (
    VARIANTS,
    CountedVersions,
    finish,
    flat_weights,
    make_engine,
    make_reference,
    make_request,
    model_logprobs,
    quantized,
    random_prompts,
)


def test_greedy_rollouts_equal_those_of_transformers() -> None:
    reference = make_reference(0)
    engine = EmbeddedEngine(LLAMA, EmbeddedConfig(max_num_seqs=4, max_model_len=160))
    engine.commit(flat_weights(engine, reference), 0)
    prompts = random_prompts(9)
    for row, prompt in enumerate(prompts):
        engine.submit(make_request(row, prompt, 5 + 10 * row, temperature=0.0))
    done = finish(engine)
    for row, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=5 + 10 * row,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert done[row].written.ids.tolist() == out[0, len(prompt) :].tolist()


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


def test_bfloat16_logprobs_are_near_the_trainers_model() -> None:
    model = make_model(LLAMA, 1)
    engine = EmbeddedEngine(
        LLAMA, EmbeddedConfig(max_num_seqs=4, max_model_len=160, dtype="bfloat16")
    )
    engine.commit(flat_weights(engine, model).bfloat16(), 0)
    for row, prompt in enumerate(random_prompts(6)):
        engine.submit(make_request(row, prompt))
    for item in finish(engine).values():
        error = np.abs(item.written.logprobs - model_logprobs(model, item))
        assert np.median(error) < 0.1


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


def test_a_rollout_alone_equals_the_same_rollout_in_a_full_batch() -> None:
    model = make_model(LLAMA, 1)
    full = make_engine(model, slots=7)
    requests = [
        make_request(row, prompt, 30, top_k=0 if row % 2 else 20, top_p=0.9 if row % 3 else 1.0)
        for row, prompt in enumerate(random_prompts(20))
    ]
    for request in requests:
        full.submit(request)
    together = finish(full)
    alone = make_engine(model, slots=1)
    for request in requests:
        alone.submit(request)
        (item,) = finish(alone).values()
        assert item.written.ids.tolist() == together[request.row_id].written.ids.tolist()
        np.testing.assert_allclose(
            item.written.logprobs, together[request.row_id].written.logprobs, atol=1e-5
        )


def test_sampled_first_tokens_have_the_models_frequencies() -> None:
    model = make_model(LLAMA, 1)
    prompt, num = (3, 1, 4, 1, 5), 4000
    engine = make_engine(model, slots=256)
    for row in range(num):
        engine.submit(make_request(row, prompt, 1, temperature=1.3, seed=row + 7))
    counts = np.zeros(LLAMA.vocab_size)
    for item in finish(engine).values():
        counts[item.written.ids[0]] += 1
    with torch.no_grad():
        logits = model.logits(torch.tensor(prompt), [len(prompt)])[-1] / 1.3
    expected = torch.softmax(logits, 0).numpy() * num
    common = expected > 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    freedom = len(wanted) - 1
    assert freedom > 10
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_stop_ids_end_a_rollout_and_are_part_of_it() -> None:
    model = make_model(LLAMA, 1)
    free, stopped = make_engine(model), make_engine(model)
    prompts = random_prompts(8)
    for row, prompt in enumerate(prompts):
        free.submit(make_request(row, prompt, 40))
        stopped.submit(make_request(row, prompt, 40, stop_token_ids=(7, 11, 30, 31)))
    whole, done = finish(free), finish(stopped)
    reasons = set()
    for row in done:
        ids = whole[row].written.ids.tolist()
        ends = [i for i, token in enumerate(ids) if token in (7, 11, 30, 31)]
        expected = ids[: ends[0] + 1] if ends else ids
        assert done[row].written.ids.tolist() == expected
        reasons.add(done[row].reason)
        assert done[row].reason is (FinishReason.STOP if ends else FinishReason.LENGTH)
    assert FinishReason.STOP in reasons


def test_stop_strings_end_a_rollout_at_the_token_that_completes_them() -> None:
    def decode(ids) -> str:
        return "".join(chr(97 + i % 26) for i in ids)

    model = make_model(LLAMA, 1)
    free = make_engine(model)
    free.submit(make_request(0, (1, 2, 3), 40))
    ids = finish(free)[0].written.ids.tolist()
    text = decode(ids)
    stop = text[17:20]
    engine = make_engine(model, decode_text=decode)
    engine.submit(make_request(0, (1, 2, 3), 40, stop_strings=("@@", stop)))
    item = finish(engine)[0]
    assert item.reason is FinishReason.STOP
    assert item.written.ids.tolist() == ids[: text.index(stop) + 3]


def test_a_prompt_never_completes_a_stop_string() -> None:
    model = make_model(LLAMA, 1)
    engine = make_engine(model, decode_text=lambda ids: "".join(f"<{i}>" for i in ids))
    engine.submit(make_request(0, (1, 2, 3), 6, stop_strings=("<3>",)))
    item = finish(engine)[0]
    assert 3 not in item.written.ids
    assert (len(item.written.ids), item.reason) == (6, FinishReason.LENGTH)


def test_a_stop_string_is_found_around_any_number_of_tokens_without_text() -> None:
    def decode(ids) -> str:
        return "".join(chr(97 + i) for i in ids if i < 26)  # the others are special ones

    sampling = Sampling(max_tokens=99, stop_strings=("yes",))
    ids = [4, 24, *[30] * 40, 4, *[31] * 40, 18]
    assert completes_stop_string(sampling, ids, decode)
    assert not completes_stop_string(sampling, ids[:-1], decode)
    assert not completes_stop_string(sampling, [30] * 40, decode)


def test_aborted_rollouts_come_back_with_what_they_had_and_free_their_slots() -> None:
    model = make_model(LLAMA, 1)
    engine = make_engine(model, slots=2)
    for row in range(4):
        engine.submit(make_request(row, (1, 2, row), 50))
    for _ in range(6):
        engine.step()
    engine.abort_requests([1, 3, 99])
    done = finish(engine)
    assert [done[row].reason for row in range(4)] == [
        FinishReason.LENGTH,
        FinishReason.ABORTED,
        FinishReason.LENGTH,
        FinishReason.ABORTED,
    ]
    assert [len(done[row].written.ids) for row in range(4)] == [50, 6, 50, 0]


def test_evaluation_starts_before_training() -> None:
    engine = make_engine(make_model(LLAMA, 1), slots=1)
    for row in range(3):
        engine.submit(make_request(row, (1,), 5))
    engine.submit(make_request(3, (1,), 5, purpose=Purpose.EVALUATE))
    assert list(finish(engine)) == [3, 0, 1, 2]


def test_the_context_window_ends_a_rollout() -> None:
    engine = make_engine(make_model(LLAMA, 1))
    engine.submit(make_request(0, tuple(range(90)), 100))
    item = finish(engine)[0]
    assert (len(item.written.ids), item.reason) == (70, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [((), "1 to 159 tokens"), ((1,) * 160, "1 to 159 tokens"), ((96,), "vocabulary size 96")],
)
def test_an_impossible_prompt_is_refused(prompt: tuple[int, ...], words: str) -> None:
    engine = make_engine(make_model(LLAMA, 1))
    with pytest.raises(ValueError, match=words):
        engine.submit(make_request(0, prompt))


def test_nothing_starts_before_weights_are_bound() -> None:
    engine = EmbeddedEngine(LLAMA, EmbeddedConfig(max_num_seqs=2, max_model_len=32))
    engine.submit(make_request(0, (1,)))
    assert not engine.has_work
    assert engine.step() == []


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


def test_logprob_checks_start_first() -> None:
    engine = make_engine(make_model(LLAMA, 1), slots=1)
    for row, purpose in enumerate((Purpose.TRAIN, Purpose.EVALUATE, Purpose.CHECK)):
        engine.submit(make_request(row, (1,), 5, purpose=purpose))
    assert list(finish(engine)) == [2, 1, 0]


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
