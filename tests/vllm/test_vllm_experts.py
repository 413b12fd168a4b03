"""Mixtures of experts in vLLM: what is published is what it computes with, and what its routers
choose is recorded."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from llamarl.core.records import FinishReason
from llamarl.generator.protocol import PartialOutput, RequestOutput
from tests.generator.engine_oracle import are_likeliest, routers_by
from tests.vllm.checkpoints import TOLERANCE, token_logprobs, write_versions
from tests.vllm.engines import commit, drain, make_engine, request, step

pytestmark = pytest.mark.vllm

FAMILIES = ("qwen3_moe", "mixtral", "olmoe")


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, Any]]]:
    folder = tmp_path_factory.mktemp("experts")
    return {family: write_versions(folder, family) for family in FAMILIES}


def check_record(model: Any, item: RequestOutput, first: int = 0) -> None:
    """The record, from position `first` on, has the likeliest experts of this model."""
    tokens = [*item.request.prompt_ids, *item.written.ids.tolist()]
    assert len(item.written.experts) == len(tokens) - 1
    probs = routers_by(model, tokens[:-1])
    assert are_likeliest(probs[first:], item.written.experts[first:]).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_published_experts_are_those_vllm_computes_with(
    versions: dict[str, list[tuple[str, Any]]], family: str
) -> None:
    engine = make_engine(versions[family][0][0], records_experts=True)
    try:
        for number, (folder, model) in enumerate(versions[family]):
            commit(engine, folder, number)
            for i in range(5):
                engine.submit(request(10 * number + i, (5, 6, 7 + i, *range(20, 40))))
            for item in drain(engine).values():
                ids = item.written.ids.tolist()
                expected = token_logprobs(model, item.request.prompt_ids, ids)
                found = torch.from_numpy(item.written.logprobs)
                torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
                check_record(model, item)
    finally:
        engine.close()


@pytest.mark.parametrize("kv_after_commit", ["keep", "recompute"])
def test_the_record_survives_the_prefix_cache_cuts_commits_and_other_engines(
    versions: dict[str, list[tuple[str, Any]]], kv_after_commit: str
) -> None:
    (first, one), (second, two) = versions["qwen3_moe"]
    rng = random.Random(0)
    prompts = [tuple(rng.choices(range(3, 90), k=length)) for length in (40, 70)]
    engine = make_engine(first, records_experts=True, kv_after_commit=kv_after_commit)
    try:
        commit(engine, first, 0)
        for row in range(4):  # the later ones find the prompt in the prefix cache
            engine.submit(request(row, prompts[row % 2], segment_tokens=5, max_tokens=20))
            step(engine, 2)
        cut = drain(engine)
        for item in cut.values():
            assert item.reason is FinishReason.SEGMENT
            check_record(one, item)
        for item in cut.values():
            again = replace(item.request, resume=True, segment_tokens=0)
            engine.submit(again, PartialOutput(**{k: getattr(item.written, k) for k in KEPT}))
        ended = step(engine, 4)
        commit(engine, second, 1)
        done = {item.request.row_id: item for item in ended} | drain(engine)
        assert done.keys() == cut.keys()
        for row, item in done.items():
            before = cut[row].written.experts
            assert np.array_equal(item.written.experts[: len(before)], before)
            num_tokens = len(item.request.prompt_ids) + len(item.written.ids)
            assert len(item.written.experts) == num_tokens - 1
            assert {*item.written.versions.tolist()} == {0, 1}
            # A row before a token is that of the version that wrote it; caches of the first one
            # go on with `keep`, so only recomputed ones have an oracle in one pass.
            if kv_after_commit == "recompute":
                tokens = [*item.request.prompt_ids, *item.written.ids.tolist()]
                written = np.flatnonzero(item.written.versions == 1)
                places = written + len(item.request.prompt_ids) - 1
                good = are_likeliest(routers_by(two, tokens[:-1]), item.written.experts)
                assert good[places].all()
    finally:
        engine.close()


KEPT = ("ids", "logprobs", "versions", "experts")


def test_without_a_record_asked_for_there_is_none(
    versions: dict[str, list[tuple[str, Any]]],
) -> None:
    folder = versions["olmoe"][0][0]
    engine = make_engine(folder)
    try:
        commit(engine, folder, 0)
        engine.submit(request(0))
        (item,) = drain(engine).values()
        assert item.written.experts.size == 0
    finally:
        engine.close()
