"""The engine against transformers and against the trainer's own model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from llamarl.config import EmbeddedConfig
from llamarl.generation.cpu_kv_cache import CALL_COST, cut
from llamarl.generation.decoder import float32_product, product
from llamarl.generation.engine import EmbeddedEngine
from llamarl.generation.protocol import PartialOutput, RequestOutput
from llamarl.generation.quantized import QuantizedMatrix, make_scratch
from llamarl.models.architecture import Architecture, RopeScaling
from llamarl.models.transformer import Transformer
from llamarl.types import FinishReason, Purpose, Request, Sampling

LLAMA = Architecture(
    model_type="llama",
    vocab_size=96,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    max_positions=512,
    norm_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    tie_embeddings=True,
    attention_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    eos_token_ids=(),
)
VARIANTS = {
    "llama": LLAMA,
    "untied, llama3 rope, all biases": replace(
        LLAMA,
        tie_embeddings=False,
        rope_scaling=RopeScaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=32
        ),
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
    ),
    "qwen2": replace(LLAMA, model_type="qwen2", attention_bias=True, num_kv_heads=6),
    "qwen3": replace(LLAMA, model_type="qwen3", qk_norm=True, head_dim=24, num_kv_heads=1),
}


def make_model(architecture: Architecture, seed: int) -> Transformer:
    """Random weights, large enough that the logits differ clearly."""
    torch.manual_seed(seed)
    model = Transformer(architecture)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.25)
            if "norm" in name:
                parameter.add_(1.0)
    return model


def flat_weights(engine: EmbeddedEngine, model: torch.nn.Module) -> torch.Tensor:
    flat = torch.zeros(engine.layout.num_elements, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        engine.layout.parameter(flat, name).copy_(parameter.detach())
    return flat


def make_engine(model: Transformer, *, slots: int = 4, **kwargs) -> EmbeddedEngine:
    config = EmbeddedConfig(max_num_seqs=slots, max_model_len=160, **kwargs.pop("config", {}))
    engine = EmbeddedEngine(model.architecture, config, **kwargs)
    engine.commit(flat_weights(engine, model), 0)
    return engine


def make_request(row_id: int, prompt: tuple[int, ...], max_tokens: int = 20, **kwargs) -> Request:
    names = ("temperature", "top_k", "top_p", "stop_token_ids", "stop_strings")
    sampling = {name: kwargs.pop(name) for name in names if name in kwargs}
    return Request(
        row_id=row_id,
        prompt_ids=prompt,
        sampling=Sampling(max_tokens=max_tokens, **sampling),
        seed=kwargs.pop("seed", row_id),
        **kwargs,
    )


def random_prompts(num: int, longest: int = 40) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(0)
    return [tuple(rng.integers(0, 96, rng.integers(1, longest)).tolist()) for _ in range(num)]


def finish(engine: EmbeddedEngine) -> dict[int, RequestOutput]:
    done: dict[int, RequestOutput] = {}
    while engine.has_work:
        for item in engine.step():
            assert item.request.row_id not in done
            done[item.request.row_id] = item
    return done


def model_logprobs(model: Transformer, item: RequestOutput, temperature: float = 1.0) -> np.ndarray:
    """The trainer's log-probs of the response tokens."""
    prompt, ids = item.request.prompt_ids, item.written.ids.tolist()
    tokens = torch.tensor([*prompt, *ids])
    targets = torch.tensor([*prompt[1:], *ids, 0])
    with torch.no_grad():
        stats = model(tokens, [len(tokens)], targets, temperature)
    return stats.logprobs[len(prompt) - 1 : -1].numpy()


def test_greedy_rollouts_equal_those_of_transformers() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    a = LLAMA
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=a.vocab_size,
        hidden_size=a.hidden_size,
        intermediate_size=a.intermediate_size,
        num_hidden_layers=a.num_layers,
        num_attention_heads=a.num_heads,
        num_key_value_heads=a.num_kv_heads,
        head_dim=a.head_dim,
        rms_norm_eps=a.norm_eps,
        tie_word_embeddings=True,
        initializer_range=0.25,
    )
    reference = LlamaForCausalLM(config).eval()
    engine = EmbeddedEngine(a, EmbeddedConfig(max_num_seqs=4, max_model_len=160))
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


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("kind", ["tied", "untied", "int8"])
def test_a_bfloat16_engine_rounds_its_weights_but_not_its_logits(
    kind: str, is_padded: bool
) -> None:
    """Log-probs against float64 ones of the very hidden states and head that the engine has."""
    architecture = replace(LLAMA, tie_embeddings=kind == "tied")
    quantization = "int8" if kind == "int8" else "none"
    config = EmbeddedConfig(
        max_num_seqs=4, max_model_len=160, dtype="bfloat16", quantization=quantization
    )
    engine = EmbeddedEngine(architecture, config, is_padded=is_padded)
    engine.commit(flat_weights(engine, make_model(architecture, 1)).bfloat16(), 0)
    for row, prompt in enumerate(random_prompts(4)):
        engine.submit(make_request(row, prompt))
    engine.step()
    running, slots = engine._running, engine._slots[engine._live]
    positions = running.cached[slots]
    tokens = running.sequence[slots, positions]
    weights = engine._decoder.weights
    head = weights.head.dequantized() if kind == "int8" else weights.head

    with torch.inference_mode():
        logits = engine._runner.compute(tokens, positions)
        # A head that is the identity lets the hidden states through.
        size = architecture.hidden_size
        engine._decoder.weights = replace(weights, head=torch.eye(size, dtype=torch.bfloat16))
        engine._arrange()
        hidden = engine._runner.compute(tokens, positions)
    exact = (hidden.double() @ head.double()).log_softmax(-1)
    assert logits.dtype == torch.float32
    assert exact.std() > 1  # bfloat16 rounds numbers of this size by up to 0.01
    assert (logits.double().log_softmax(-1) - exact).abs().max() < 1e-4


@pytest.mark.parametrize("is_quantized", [False, True])
def test_logits_of_a_wide_head_are_exact_in_every_tile(is_quantized: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 700).bfloat16()
    head = torch.randn(700, 3300).bfloat16()  # more than one tile, the last one not whole
    matrix = QuantizedMatrix.of(head, "int8", make_scratch(700, head.dtype, x.device))
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


def run_with_commit(engine: EmbeddedEngine, requests: list[Request], flat: torch.Tensor, at: int):
    for request in requests:
        engine.submit(request)
    for _ in range(at):
        assert engine.step() == []
    assert engine.commit(flat, 1) == len(requests)
    return finish(engine)


def test_a_commit_that_keeps_the_cache_equals_two_models_over_one_cache() -> None:
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    def build(seed: int) -> LlamaForCausalLM:
        torch.manual_seed(seed)
        a = LLAMA
        config = LlamaConfig(
            vocab_size=a.vocab_size,
            hidden_size=a.hidden_size,
            intermediate_size=a.intermediate_size,
            num_hidden_layers=a.num_layers,
            num_attention_heads=a.num_heads,
            num_key_value_heads=a.num_kv_heads,
            head_dim=a.head_dim,
            rms_norm_eps=a.norm_eps,
            tie_word_embeddings=True,
            initializer_range=0.25,
        )
        return LlamaForCausalLM(config).eval()

    models = [build(0), build(1)]
    engine = EmbeddedEngine(LLAMA, EmbeddedConfig(max_num_seqs=4, max_model_len=160))
    engine.commit(flat_weights(engine, models[0]), 0)
    requests = [make_request(r, p, 25, temperature=0.0) for r, p in enumerate(random_prompts(4))]
    done = run_with_commit(engine, requests, flat_weights(engine, models[1]), at=9)
    for request in requests:
        cache, tokens, ids = DynamicCache(), torch.tensor([request.prompt_ids]), []
        with torch.no_grad():
            for index in range(25):
                logits = models[index >= 9](tokens, past_key_values=cache).logits[0, -1]
                ids.append(int(logits.argmax()))
                tokens = torch.tensor([ids[-1:]])
        item = done[request.row_id]
        assert item.written.ids.tolist() == ids
        assert item.written.versions.tolist() == [0] * 9 + [1] * 16


def test_a_commit_that_recomputes_gives_the_trainers_logprobs_of_each_version() -> None:
    models = [make_model(LLAMA, 1), make_model(LLAMA, 2)]
    engine = make_engine(models[0], config={"kv_after_commit": "recompute"})
    requests = [make_request(r, p, 25) for r, p in enumerate(random_prompts(4))]
    done = run_with_commit(engine, requests, flat_weights(engine, models[1]), at=9)
    for item in done.values():
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


def test_a_new_rollout_never_reads_a_running_siblings_older_prefix() -> None:
    models = [make_model(LLAMA, 1), make_model(LLAMA, 2)]
    engine = make_engine(models[0], slots=4)
    prompt = tuple(range(40))
    engine.submit(make_request(0, prompt, 60))
    for _ in range(5):
        engine.step()
    engine.commit(flat_weights(engine, models[1]), 1)
    engine.submit(make_request(1, prompt, 20))
    item = finish(engine)[1]
    np.testing.assert_allclose(item.written.logprobs, model_logprobs(models[1], item), atol=1e-5)


def test_a_cut_and_resumed_rollout_equals_the_uncut_one_and_keeps_what_it_had() -> None:
    model = make_model(LLAMA, 1)
    uncut = make_engine(model)
    requests = [make_request(r, p, 23) for r, p in enumerate(random_prompts(5))]
    for request in requests:
        uncut.submit(request)
    whole = finish(uncut)
    for request in requests:
        written: PartialOutput | None = None
        reasons = []
        while not reasons or reasons[-1] is FinishReason.SEGMENT:
            engine = make_engine(model)
            engine.version = len(reasons)
            cut_request = replace(request, segment_tokens=8, resume=bool(reasons))
            engine.submit(cut_request, written)
            (item,) = finish(engine).values()
            if written is not None:
                kept = len(written.ids)
                assert item.written.ids[:kept].tolist() == written.ids.tolist()
                assert item.written.logprobs[:kept].tobytes() == written.logprobs.tobytes()
            written = item.written
            reasons.append(item.reason)
        assert reasons == [FinishReason.SEGMENT, FinishReason.SEGMENT, FinishReason.LENGTH]
        expected = whole[request.row_id].written
        assert written.ids.tolist() == expected.ids.tolist()
        np.testing.assert_allclose(written.logprobs, expected.logprobs, atol=1e-5)
        assert written.versions.tolist() == [0] * 8 + [1] * 8 + [2] * 7


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


def test_a_rollout_waits_for_its_minimum_version_without_holding_up_others() -> None:
    model = make_model(LLAMA, 1)
    engine = make_engine(model, slots=1)
    engine.submit(make_request(0, (1,), 5, min_version=1))
    engine.submit(make_request(1, (1,), 5))
    assert list(finish(engine)) == [1]
    assert len(engine._queue) == 1
    engine.commit(flat_weights(engine, model), 1)
    assert finish(engine)[0].written.versions.tolist() == [1] * 5


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


def quantize_model(model: Transformer, kind: str) -> Transformer:
    """`model` with every linear weight replaced by what eight bits make of it; the tied head, which
    is quantised but not the embedding, gets its own copy."""
    plain = Transformer(replace(model.architecture, tie_embeddings=False))
    state = model.state_dict()
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    scratch = make_scratch(1, torch.float32, torch.device("cpu"))
    for name, weight in state.items():
        if weight.ndim == 2 and "embed" not in name:
            state[name] = QuantizedMatrix.of(weight.t(), kind, scratch).dequantized().t()
    plain.load_state_dict(state)
    return plain


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("recomputes", [False, True])
def test_int8_logprobs_are_those_of_the_dequantised_model(name: str, recomputes: bool) -> None:
    models = [make_model(VARIANTS[name], seed) for seed in (1, 2)]
    config = {"quantization": "int8"} | ({"kv_after_commit": "recompute"} if recomputes else {})
    engine = make_engine(models[0], config=config)
    assert engine.memory.is_staged
    requests = [make_request(r, p, 25) for r, p in enumerate(random_prompts(4))]
    flat = flat_weights(engine, models[1])
    processed = engine.process_weights(flat)
    flat.zero_()  # staged: what was prepared needs it no longer
    for request in requests:
        engine.submit(request)
    for _ in range(9):
        engine.step()
    engine.commit(processed, 1)
    for item in finish(engine).values():
        plain, quantised = (
            [model_logprobs(m, item) for m in choice]
            for choice in (models, [quantize_model(m, "int8") for m in models])
        )
        logprobs = item.written.logprobs
        np.testing.assert_allclose(logprobs[:9], quantised[0][:9], atol=1e-4)
        if recomputes:
            np.testing.assert_allclose(logprobs[9:], quantised[1][9:], atol=1e-4)
        assert np.abs(logprobs[:9] - plain[0][:9]).max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "steps"), [("int8", 254), ("fp8", 32)])
def test_a_quantised_matrix_is_near_the_plain_one_and_multiplies_as_it_says(
    kind: str, steps: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(700, 1500).mul_(torch.logspace(-3, 3, 1500)).to(dtype)
    matrix[:, 7] = 0
    quantised = QuantizedMatrix.of(matrix, kind, make_scratch(700, dtype, torch.device("cpu")))
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


class CountedVersions(int):
    """A version that counts how often it is compared."""

    count = 0

    def __ge__(self, other: int) -> bool:
        self.count += 1
        return int(self) >= other


def test_logprob_checks_start_first() -> None:
    engine = make_engine(make_model(LLAMA, 1), slots=1)
    for row, purpose in enumerate((Purpose.TRAIN, Purpose.EVALUATE, Purpose.CHECK)):
        engine.submit(make_request(row, (1,), 5, purpose=purpose))
    assert list(finish(engine)) == [2, 1, 0]


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_what_moves_is_the_cache_and_what_was_quantised(quantization: str) -> None:
    engine = make_engine(make_model(LLAMA, 1), config={"quantization": quantization})
    kv_bytes = sum(t.nbytes for t in engine.movable("kv"))
    assert kv_bytes == 2 * LLAMA.num_layers * 4 * LLAMA.num_kv_heads * 160 * LLAMA.head_dim * 4
    moved = engine.movable("weights")
    if quantization == "none":
        assert moved == []
    else:
        eighths = sum(t.numel() for t in moved if t.dtype == torch.int8)
        layer = 48 * (6 + 4) * 16 + 96 * 48 + 3 * 48 * 80
        assert eighths == LLAMA.num_layers * layer + 96 * 48


def test_prompts_are_computed_anew_once_the_cache_was_lost() -> None:
    model = make_model(LLAMA, 1)
    engine = make_engine(model)
    prompt = tuple(range(30))
    engine.submit(make_request(0, prompt, 3))
    finish(engine)
    engine.forget_prompts()
    for tensor in engine.movable("kv"):
        tensor.zero_()
    engine.submit(make_request(1, prompt, 5))
    item = finish(engine)[1]
    np.testing.assert_allclose(item.written.logprobs, model_logprobs(model, item), atol=1e-5)
