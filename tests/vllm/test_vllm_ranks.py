"""One replica of two tensor-parallel processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from llamarl.core.config import VllmConfig
from llamarl.model.architecture import read_any_architecture
from llamarl.publish.layout import formats_of
from tests.cluster.test_processes import is_loopback
from tests.uneven_publish import publish
from tests.vllm.checkpoints import check_logprobs, write_versions
from tests.vllm.engines import request
from tests.vllm.ranks import replicas

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    "family",
    ["qwen3_moe", *(pytest.param(each, marks=pytest.mark.slow)
                    for each in ("llama", "qwen25", "qwen3"))],
)  # fmt: skip
def test_two_ranks_write_what_transformers_would(family: str, tmp_path: Path) -> None:
    (first, old), (second, new) = write_versions(tmp_path, family)
    weights = {name: tensor.detach() for name, tensor in new.named_parameters()}
    before = set(Path("/dev/shm").iterdir())
    has_experts = family == "qwen3_moe"
    options = {"kv_after_commit": "recompute", "records_experts": has_experts}
    with replicas(first, [tmp_path / "meeting"], **options) as (replica,):
        assert set(Path("/dev/shm").iterdir()) <= before, "what has a name outlives a kill"
        memories = replica.call("memory")
        whole = sum(tensor.numel() for tensor in weights.values())
        assert all(memory.num_elements < 0.7 * whole for memory in memories)
        flats = publish(memories, weights)
        for flat, loaded in zip(flats, replica.call("load", second), strict=True):
            assert torch.equal(flat, loaded)  # from the trainer's shards, and from the file

        replica.call_each("commit", [(flat, 0) for flat in replica.call("load", first)])
        rows = [request(row, tuple(range(3, 5 + 9 * row)), max_tokens=20) for row in range(5)]
        replica.call("submit", rows)
        assert replica.call("step", 8) == [[], []]
        assert replica.call_each("commit", [(flat, 1) for flat in flats]) == [5, 5]
        mine, theirs = replica.call("drain")
        assert len(mine) == 5
        for row, item in mine.items():
            assert set(item.written.versions) == {0, 1}
            check_logprobs(item, [old, new])
            assert theirs[row].written.ids.tolist() == item.written.ids.tolist()
            num_fed = len(item.request.prompt_ids) + len(item.written.ids) - 1
            assert len(item.written.experts) == num_fed * has_experts
            np.testing.assert_array_equal(theirs[row].written.experts, item.written.experts)
        for found in replica.call("listening"):
            assert found
            assert [entry for entry in found if not is_loopback(entry[1])] == []


@pytest.mark.slow
def test_ranks_that_have_whole_experts_get_their_own(tmp_path: Path) -> None:
    """vLLM has no kernel for CPUs to write with them."""
    (first, _), (second, new) = write_versions(tmp_path, "qwen3_moe")
    weights = {name: tensor.detach() for name, tensor in new.named_parameters()}
    with replicas(first, [tmp_path / "meeting"], expert_parallel=True) as (replica,):
        memories = replica.call("memory")
        for rank, memory in enumerate(memories):
            for name, layout in memory.parameters.items():
                if name.endswith("experts.down_proj"):
                    assert [(b.start, b.stop) for b in layout.boxes] == [
                        ((3 * rank, 0, 0), (3 * rank + 3, 96, 64))
                    ]
        for flat, loaded in zip(
            publish(memories, weights), replica.call("load", second), strict=True
        ):
            assert torch.equal(flat, loaded)


@pytest.mark.slow
def test_two_replicas_of_two_ranks_do_not_meet_each_other(tmp_path: Path) -> None:
    """Their meeting files even have the same name."""
    ((first, _), (second, _)) = write_versions(tmp_path, "llama")
    meetings = [tmp_path / side / "meeting" for side in "ab"]
    for meeting in meetings:
        meeting.parent.mkdir()
    with replicas(first, meetings) as (a, b):
        for replica, folder in ((a, first), (b, second)):
            replica.call_each("commit", [(flat, 0) for flat in replica.call("load", folder)])
            replica.call("submit", [request(row) for row in range(4)])
        for replica in (a, b):  # both in flight at once
            for pipe in replica._pipes:
                pipe.send(("drain", ()))
        texts = [
            [[item.written.ids.tolist() for item in done.values()] for done in replica.answers()]
            for replica in (a, b)
        ]
        assert texts[0][0] == texts[0][1]
        assert texts[1][0] == texts[1][1]
        assert texts[0][0] != texts[1][0]


@pytest.mark.slow
def test_two_ranks_quantise_as_vllm_would(tmp_path: Path) -> None:
    ((first, _), (second, new)) = write_versions(tmp_path, "qwen25")
    weights = {name: tensor.detach() for name, tensor in new.named_parameters()}
    changes = {"quantization": "fp8_per_channel", "dtype": "bfloat16"}
    with replicas(first, [tmp_path / "meeting"], **changes) as (replica,):
        replica.call_each("commit", [(flat, 0) for flat in replica.call("load", first)])
        formats = formats_of(VllmConfig(**changes), read_any_architecture(first))
        flats = publish(replica.call("memory"), weights, formats)
        replica.call_each("commit", [(flat, 1) for flat in flats])
        replica.call("submit", [request(0)])
        mine, theirs = replica.call("drain")
        assert mine[0].written.ids.tolist() == theirs[0].written.ids.tolist()
        assert replica.call("differs_from_own_loader", second) == [[], []]
