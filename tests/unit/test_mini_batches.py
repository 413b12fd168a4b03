"""Which step uses which groups: the arithmetic against a list of all steps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llamarl.trainer.packing import MiniBatches

NUM_BATCHES = 4

shapes = st.builds(
    MiniBatches,
    groups_per_step=st.integers(1, 4),
    number=st.integers(1, 4),
    num_passes=st.integers(1, 4),
    looks_ahead=st.booleans(),
    first_version=st.integers(0, 9),
)


def uses(shape: MiniBatches) -> list[tuple[int, list[int]]]:
    """(version, numbers of the groups that its step uses) of the first batches, written out."""
    found: list[tuple[int, list[int]]] = []
    version, group = shape.first_version, 0
    for _ in range(NUM_BATCHES):
        mini_batches = []
        for _ in range(shape.number):
            mini_batches.append([*range(group, group + shape.groups_per_step)])
            group += shape.groups_per_step
        for _ in range(shape.num_passes):
            for groups in mini_batches:
                found.append((version, groups))
                version += 1
    return found


@given(shapes)
def test_every_number_is_that_of_the_list_of_steps(shape: MiniBatches) -> None:
    steps = uses(shape)
    last_use = {group: version for version, groups in steps for group in groups}
    first_use = {group: version for version, groups in reversed(steps) for group in groups}
    per_batch = shape.number * shape.num_passes
    assert (shape.steps_per_batch, shape.groups_per_batch * NUM_BATCHES) == (
        per_batch,
        len(last_use),
    )
    for i, (version, groups) in enumerate(steps):
        first = steps[i - i % per_batch][0]
        in_batch = {g for start, used in steps for g in used if first <= start < first + per_batch}
        assert shape.first_of_batch(version) == first
        assert min(in_batch) + shape.first_group(version) == groups[0]
        assert shape.is_last_pass(version) == (last_use[groups[0]] == version)
        assert shape.num_used_up(version) == sum(last < version for last in last_use.values())
        later = {g for g in in_batch if first_use[g] > version}
        is_first = shape.looks_ahead and version == first
        assert shape.num_ahead(version) == (len(later) if is_first else 0)
        open_ = {g for g in in_batch if last_use[g] >= version}
        needed = open_ if shape.looks_ahead else open_ - later
        assert shape.num_needed(version) == len(needed)


@given(shapes)
def test_the_last_use_never_falls_and_lies_between_the_groups_used_up(shape: MiniBatches) -> None:
    last_use = {group: version for version, groups in uses(shape) for group in groups}
    versions = [shape.last_use(group) for group in sorted(last_use)]
    assert versions == [last_use[group] for group in sorted(last_use)] == sorted(versions)
    for group, version in last_use.items():
        assert shape.num_used_up(version) <= group < shape.num_used_up(version + 1)


@given(shapes, st.data())
def test_groups_are_enough_for_the_steps_before_the_first_that_lacks_one(
    shape: MiniBatches, data: st.DataObject
) -> None:
    num_groups = data.draw(st.integers(0, NUM_BATCHES * shape.groups_per_batch - 1))
    steps = uses(shape)
    for i, (_, groups) in enumerate(steps):
        rest_of_batch = steps[i : i - i % shape.steps_per_batch + shape.steps_per_batch]
        needed = [g for _, each in rest_of_batch for g in each] if shape.looks_ahead else groups
        if max(needed) >= num_groups:
            assert shape.num_steps(num_groups) == i
            return
