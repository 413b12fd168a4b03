"""Bringing the flat memory's tensors to the device that vLLM's layers compute on."""

from __future__ import annotations

import torch
from torch import Tensor

from llamarl.generator.vllm.staging import on_device


def groups_of(*shapes: list[tuple[int, ...]]) -> list[dict[str, Tensor]]:
    return [
        {str(i): torch.randn(shape).to(torch.bfloat16) for i, shape in enumerate(group)}
        for group in shapes
    ]


def test_tensors_elsewhere_come_to_the_device_in_two_slots_that_take_turns() -> None:
    groups = groups_of([(5, 7)], [(3, 3), (9,)], [(2, 8)], [(5, 7), (1,)])
    slots = []
    for group, moved in zip(groups, on_device(groups, torch.device("meta")), strict=True):
        assert {name: each.device.type for name, each in moved.items()} == dict.fromkeys(
            group, "meta"
        )
        assert [each.shape for each in moved.values()] == [each.shape for each in group.values()]
        assert {each.dtype for each in moved.values()} == {torch.bfloat16}
        slots.append({each.untyped_storage()._cdata for each in moved.values()})
    assert all(len(slot) == 1 for slot in slots)
    assert slots[0] == slots[2] != slots[1] == slots[3]


def test_each_group_arrives_whole_and_is_not_overwritten_while_it_is_used() -> None:
    groups = groups_of([(5, 7)], [(3, 3), (9,)], [(2, 8)], [(5, 7), (1,)])
    named = torch.device("cpu", 0)  # the same memory under a name that no tensor bears
    for group, moved in zip(groups, on_device(groups, named), strict=True):
        assert moved.keys() == group.keys()
        for name, tensor in moved.items():
            assert torch.equal(tensor, group[name])
            assert tensor.data_ptr() != group[name].data_ptr()


def test_tensors_that_are_there_already_are_not_copied() -> None:
    groups = groups_of([(5, 7)], [(3, 3)])
    found = list(on_device(groups, torch.device("cpu")))
    assert [each["0"].data_ptr() for each in found] == [each["0"].data_ptr() for each in groups]
