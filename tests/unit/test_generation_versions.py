"""Versions, shared prefixes and resumed rollouts: what a commit changes in a running engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from llamarl.core.config import EmbeddedConfig
from llamarl.core.records import FinishReason, Request
from llamarl.generator.engine.engine import EmbeddedEngine
from llamarl.generator.protocol import PartialOutput
from tests.tiny_checkpoints import LLAMA, make_model
from tests.unit.engine_models import (
    finish,
    flat_weights,
    make_engine,
    make_reference,
    make_request,
    model_logprobs,
    random_prompts,
)


def run_with_commit(engine: EmbeddedEngine, requests: list[Request], flat: torch.Tensor, at: int):
    for request in requests:
        engine.submit(request)
    for _ in range(at):
        assert engine.step() == []
    assert engine.commit(flat, 1) == len(requests)
    return finish(engine)


def test_a_commit_that_keeps_the_cache_equals_two_models_over_one_cache() -> None:
    from transformers import DynamicCache

    models = [make_reference(0), make_reference(1)]
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
    # Row 1 would draw a token of log-prob -7.6, which some processors round by more than 1e-5.
    engine.submit(make_request(2, prompt, 20))
    item = finish(engine)[2]
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


def test_a_rollout_waits_for_its_minimum_version_without_holding_up_others() -> None:
    model = make_model(LLAMA, 1)
    engine = make_engine(model, slots=1)
    engine.submit(make_request(0, (1,), 5, min_version=1))
    engine.submit(make_request(1, (1,), 5))
    assert list(finish(engine)) == [1]
    assert len(engine._queue) == 1
    engine.commit(flat_weights(engine, model), 1)
    assert finish(engine)[0].written.versions.tolist() == [1] * 5


def test_rollouts_that_may_not_start_yet_do_not_let_one_that_may_wait_for_more_slots() -> None:
    engine = make_engine(make_model(LLAMA, 1), slots=32)
    for row in range(40):
        engine.submit(make_request(row, (1,), 20, min_version=row // 31))
    engine.step()
    engine.submit(make_request(40, (1,), 20))
    engine.step()
    assert engine.num_running == 32


def test_prompts_are_computed_again_once_the_cache_was_lost() -> None:
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
