"""vLLM as an engine, against transformers: one process, one rank."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from llamarl.core.config import EmbeddedConfig
from llamarl.core.records import FinishReason, Purpose
from llamarl.generator.engine.engine import EmbeddedEngine as Embedded
from llamarl.generator.protocol import RequestOutput
from tests.cluster.test_processes import is_loopback, listening_addresses
from tests.vllm.checkpoints import TOLERANCE, VOCAB, check_logprobs, write_versions
from tests.vllm.engines import commit, drain, loaded, make_engine, request, step

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory):
    return write_versions(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def shared_engine(llama) -> Iterator:
    engine = make_engine(llama[0][0])
    yield engine
    engine.close()


@pytest.fixture
def engine(shared_engine, llama):
    """The shared engine with version 0's weights and nothing to do."""
    drain(shared_engine)
    shared_engine.decode_text = None
    commit(shared_engine, llama[0][0], 0)
    return shared_engine


def test_nothing_starts_before_the_first_commit(shared_engine) -> None:
    # Must stand first: the other tests commit the shared engine.
    if shared_engine.version < 0:
        shared_engine.submit(request(0))
        assert shared_engine.admit() == 0
        assert not shared_engine.has_work
        assert shared_engine.decode() == []
        shared_engine.abort_requests([0])
        (item,) = shared_engine.decode()
        assert item.reason is FinishReason.ABORTED


def test_an_update_that_changes_nothing_changes_no_token(engine, llama) -> None:
    """Under `keep` too: log-probs after it are those of the old keys and values."""
    rows = [request(row, max_tokens=20) for row in range(5)]
    for row in rows:
        engine.submit(row)
    whole = drain(engine)
    for row in rows:
        engine.submit(row)
    step(engine, 7)
    commit(engine, llama[0][0], 1)
    for row, item in drain(engine).items():
        assert item.written.ids.tolist() == whole[row].written.ids.tolist()
        np.testing.assert_allclose(item.written.logprobs, whole[row].written.logprobs, atol=1e-5)
        assert item.written.versions.tolist() == [0] * 7 + [1] * 13


def test_rollouts_do_not_depend_on_their_neighbours(engine) -> None:
    engine.submit(request(3, max_tokens=16))
    alone = drain(engine)[3].written
    for row in range(8):
        engine.submit(request(row, (4 + row,) * (row + 1) if row != 3 else (5, 6, 7),
                              max_tokens=9 + row if row != 3 else 16,
                              temperature=0.0 if row == 5 else 1.0))  # fmt: skip
    among = drain(engine)[3].written
    assert among.ids.tolist() == alone.ids.tolist()
    np.testing.assert_allclose(among.logprobs, alone.logprobs, atol=TOLERANCE)


def test_rollouts_of_a_prompt_share_its_prefill_and_differ(engine) -> None:
    prompt = tuple(i % 90 + 3 for i in range(100))  # three whole blocks of 32, and a rest
    for row in range(6):
        engine.submit(request(row, prompt, max_tokens=16))
    engine.admit()
    stats = [each.prefill_stats for each in engine._core.scheduler.requests.values()]
    engine.decode()
    assert [each.num_cached_tokens for each in stats] == [0] + [96] * 5
    texts = {tuple(item.written.ids.tolist()) for item in drain(engine).values()}
    assert len(texts) == 6


def test_a_prompt_is_not_shared_across_versions(engine, llama) -> None:
    prompt = tuple(range(3, 80))
    engine.submit(request(0, prompt, max_tokens=3))
    drain(engine)
    commit(engine, llama[1][0], 1)
    engine.submit(request(1, prompt, max_tokens=3))
    check_logprobs(drain(engine)[1], [llama[0][1], llama[1][1]])


def test_prompts_are_computed_again_once_the_cache_was_lost(engine, llama) -> None:
    prompt = tuple(range(3, 80))
    engine.submit(request(0, prompt, max_tokens=3))
    drain(engine)
    for tensor in engine.movable("kv"):
        tensor.fill_(50.0)
    engine.forget_prompts()
    engine.submit(request(1, prompt, max_tokens=3))
    check_logprobs(drain(engine)[1], [llama[0][1]])


def test_segments_are_cut_and_go_on(engine, llama) -> None:
    def run() -> RequestOutput:
        written = None
        for lap, reason in enumerate(["segment", "segment", "length"]):
            engine.submit(request(7, max_tokens=12, segment_tokens=5, resume=lap > 0), written)
            item = drain(engine)[7]
            assert item.reason == reason
            written = item.written
            assert len(written.ids) == min(5 * (lap + 1), 12)
        return item

    whole = run()
    check_logprobs(whole, [llama[0][1]])
    assert run().written.ids.tolist() == whole.written.ids.tolist()  # the same when repeated
    # A resumed rollout does not draw its first numbers again.
    ids = whole.written.ids.tolist()
    engine.submit(request(7, (5, 6, 7, *ids[:5]), max_tokens=5))
    assert drain(engine)[7].written.ids.tolist() != ids[5:10]


def test_a_resumed_rollout_keeps_what_other_versions_wrote(engine, llama) -> None:
    engine.submit(request(1, max_tokens=8, segment_tokens=4))
    half = drain(engine)[1].written
    commit(engine, llama[1][0], 5)
    engine.submit(request(1, max_tokens=8, segment_tokens=4, resume=True), half)
    whole = drain(engine)[1].written
    assert whole.versions.tolist() == [0] * 4 + [5] * 4
    assert whole.ids[:4].tolist() == half.ids.tolist()
    assert whole.logprobs[:4].tolist() == half.logprobs.tolist()


def test_stop_ids_and_stop_strings_end_a_rollout(engine) -> None:
    engine.submit(request(0, max_tokens=20))
    ids = drain(engine)[0].written.ids.tolist()
    stop = ids[9]
    engine.submit(request(0, max_tokens=20, stop_token_ids=(stop,)))
    item = drain(engine)[0]
    assert item.reason is FinishReason.STOP
    assert item.written.ids.tolist() == ids[: ids.index(stop) + 1]

    # A token is one letter, so the string needs as many tokens as it is long.
    engine.decode_text = lambda tokens: "".join(chr(0x21 + token) for token in tokens)
    text = engine.decode_text(ids[3:7])
    engine.submit(request(0, max_tokens=20, stop_strings=("absent", text)))
    item = drain(engine)[0]
    assert item.reason is FinishReason.STOP
    assert item.written.ids.tolist() == ids[:7]

    # The string may begin in an earlier segment.
    engine.submit(request(0, max_tokens=20, segment_tokens=6))
    half = drain(engine)[0].written
    assert half.ids.tolist() == ids[:6]
    engine.submit(request(0, max_tokens=20, temperature=0.0), half)
    rest = drain(engine)[0].written.ids.tolist()
    text = engine.decode_text(rest[3:8])
    engine.submit(request(0, max_tokens=20, temperature=0.0, stop_strings=(text,)), half)
    assert drain(engine)[0].written.ids.tolist() == rest[:8]


def test_aborted_rollouts_come_out_with_what_they_have(engine) -> None:
    for row in range(10):  # two more than may run
        engine.submit(request(row, max_tokens=30))
    step(engine, 4)
    engine.abort_requests([2, 9, 77])
    engine.submit(request(2, max_tokens=3))  # the same row again
    done = step(engine)
    assert [(item.request.row_id, len(item.written.ids)) for item in done] == [(9, 0), (2, 4)]
    assert {item.reason for item in done} == {FinishReason.ABORTED}
    assert engine.num_running == 8
    rest = drain(engine)
    assert sorted(rest) == [*range(9)]
    assert len(rest[2].written.ids) == 3
    assert engine.num_running == 0


def test_rollouts_wait_for_their_version_and_let_others_pass(engine, llama) -> None:
    engine.submit(request(0, min_version=1))
    engine.submit(request(1))
    assert list(drain(engine)) == [1]
    commit(engine, llama[1][0], 1)
    assert set(drain(engine)[0].written.versions) == {1}


def test_logprob_checks_start_before_everything_that_waits(engine) -> None:
    for row in range(8):
        engine.submit(request(row, max_tokens=30))
    step(engine, 2)
    engine.submit(request(10, max_tokens=2))
    engine.submit(request(11, max_tokens=2, purpose=Purpose.EVALUATE))
    engine.submit(request(12, max_tokens=2, purpose=Purpose.CHECK))
    engine.abort_requests([0])
    order = [item.request.row_id for item in step(engine, 12)]
    assert [row for row in order if row >= 10] == [12, 11, 10]
    drain(engine)


def test_evaluation_may_be_greedy_or_cut_the_distribution(engine, llama) -> None:
    model = llama[0][1]
    engine.submit(request(0, temperature=0.0))
    engine.submit(request(1, top_k=3, temperature=1.3))
    engine.submit(request(2, top_p=0.6))
    done = drain(engine)
    for row, (temperature, num_kept) in enumerate([(1.0, 1), (1.3, 3), (1.0, VOCAB)]):
        written = done[row].written
        sequence = torch.tensor([[5, 6, 7, *written.ids.tolist()]])
        with torch.no_grad():
            logits = model(sequence).logits[0, 2:-1] / temperature
        order = logits.argsort(-1, descending=True)
        for i, token in enumerate(written.ids.tolist()):
            kept = order[i, :num_kept]
            if row == 2:
                probs = logits[i].softmax(-1)[order[i]]
                kept = order[i, : int((probs.cumsum(0) < 0.6).sum()) + 1]
            assert token in kept.tolist()
            among = order[i] if row == 0 else kept  # greedy: log-prob at temperature 1
            expected = logits[i, token] - logits[i, among].logsumexp(0)
            assert written.logprobs[i] == pytest.approx(float(expected), abs=TOLERANCE)


def test_greedy_rollouts_equal_those_of_the_embedded_engine(engine, llama) -> None:
    embedded = Embedded(engine.architecture, EmbeddedConfig(max_num_seqs=8, max_model_len=192))
    flat = torch.zeros(embedded.memory.num_elements)
    embedded.load(flat, llama[0][0])
    embedded.commit(embedded.process_weights(flat), 0)
    rows = [
        request(row, tuple(range(3, 4 + 7 * row)), temperature=0.0, max_tokens=40)
        for row in range(8)
    ]
    texts = []
    for each in (engine, embedded):
        for row in rows:
            each.submit(row)
        texts.append(drain(each))
    for row, item in texts[0].items():
        other = texts[1][row].written
        assert item.written.ids.tolist() == other.ids.tolist()
        np.testing.assert_allclose(item.written.logprobs, other.logprobs, atol=TOLERANCE)


def test_requests_that_cannot_run_are_refused_in_one_line(engine) -> None:
    for bad, words in [
        (request(4, ()), "must have 1 to 191 tokens"),
        (request(4, (5,) * 192), "must have 1 to 191 tokens"),
        (request(4, (5, VOCAB)), "below the vocabulary size 99, got 99"),
        (request(4, stop_strings=("x",)), "without a tokenizer"),
        (request(4, temperature=0.001), "must be 0 or at least 0.01"),
    ]:
        with pytest.raises(ValueError, match=words) as raised:
            engine.submit(bad)
        assert "\n" not in str(raised.value)
        assert "row 4" in str(raised.value)
    assert not engine.has_work


def test_the_context_window_ends_a_rollout(engine) -> None:
    engine.submit(request(0, tuple([5] * 187), max_tokens=100))
    item = drain(engine)[0]
    assert (item.reason, len(item.written.ids)) == (FinishReason.LENGTH, 5)


def test_nothing_listens_beyond_loopback(engine) -> None:
    found = list(listening_addresses([os.getpid()]))
    assert found  # gloo's own
    assert [entry for entry in found if not is_loopback(entry[1])] == []


def test_every_element_of_the_memory_has_one_owner(engine) -> None:
    count = torch.zeros(engine.memory.num_elements)
    for layout in engine.memory.parameters.values():
        for box in layout.boxes:
            size = tuple(b - a for a, b in zip(box.start, box.stop, strict=True))
            assert math.prod(size)
            count.as_strided(size, box.strides, box.offset).add_(1)
    assert count.max() == 1
    assert (count == 0).sum() < 96 * 2 * 64 + 1024  # padding: of the vocabulary, and between


def test_a_checkpoint_with_numbers_that_are_not_finite_is_refused(engine, tmp_path: Path) -> None:
    ((folder, model), _) = write_versions(tmp_path, "llama")
    with torch.no_grad():
        model.lm_head.weight[3, 4] = float("inf")
    model.save_pretrained(folder)
    with pytest.raises(ValueError, match=r"lm_head.weight .* must hold finite numbers"):
        loaded(engine, folder)
