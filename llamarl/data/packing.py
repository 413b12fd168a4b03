"""From settled groups to a batch: which rollout is trained on which rank, in which micro-batch.

Owns: the rows of a batch and their assignment. Does not own: tensors, padding or what a micro-batch
costs. Invariant: pure, and every rank gets the same number of micro-batches (the all-gathers of
sharded parameters would deadlock otherwise); the gradient does not depend on the assignment.
"""

import heapq
from collections.abc import Sequence

from llamarl.types import Batch, BatchRollout, Group

Assignment = tuple[tuple[tuple[int, ...], ...], ...]
"""`assignment[rank][micro_batch]` lists positions in the batch's rows."""


def make_batch(
    groups: Sequence[Group],
    version: int,
    oldest_version: int,
    *,
    num_ranks: int,
    tokens_per_micro_batch: int,
) -> Batch:
    """The rows of `groups` for trainer version `version`, packed onto ranks and micro-batches.

    Tokens written by a version below `oldest_version` get zero loss weight.
    """
    rows = tuple(
        BatchRollout(
            row_id=row_id,
            group_id=group.group_id,
            num_prompt_tokens=group.rollouts[row_id].num_prompt_tokens,
            num_tokens=group.rollouts[row_id].num_tokens,
            advantage=advantage,
            oldest_version=oldest_version,
        )
        for group in groups
        for row_id, advantage in zip(group.row_ids, group.advantages, strict=True)
    )
    lengths = [row.num_prompt_tokens + row.num_tokens for row in rows]
    assignment = pack(lengths, num_ranks, tokens_per_micro_batch)
    return Batch(version=version, rows=rows, assignment=assignment)


def pack(lengths: Sequence[int], num_ranks: int, tokens_per_micro_batch: int) -> Assignment:
    """Assign every rollout to one micro-batch of one rank.

    `lengths[i]` is the number of tokens, prompt and response, of row i. Ranks are balanced by
    tokens: longest first, each to the emptiest rank, so their loads differ by at most the longest
    rollout. A rank then cuts its rollouts, longest first, into runs of at most
    `tokens_per_micro_batch` tokens: neighbours have like lengths, so padding them in attention
    wastes little, and the j-th micro-batches of all ranks take about as long. A rollout above the
    budget gets a micro-batch of its own; ranks with fewer micro-batches end with empty ones.

    Example: `pack([3, 9, 4, 4], num_ranks=2, tokens_per_micro_batch=8)` is
    `(((1,), ()), ((2, 3), (0,)))`.
    """
    ranks = [_cut(rows, lengths, tokens_per_micro_batch) for rows in _balance(lengths, num_ranks)]
    num_micro_batches = max(len(micro_batches) for micro_batches in ranks)
    return tuple(
        tuple(micro_batches) + ((),) * (num_micro_batches - len(micro_batches))
        for micro_batches in ranks
    )


def _balance(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]  # a heap: emptiest rank first, then lowest
    for position in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, rank = loads[0]
        rows[rank].append(position)
        heapq.heapreplace(loads, (load + lengths[position], rank))
    return rows


def _cut(rows: Sequence[int], lengths: Sequence[int], budget: int) -> list[tuple[int, ...]]:
    micro_batches: list[list[int]] = []
    room = 0
    for position in rows:
        if lengths[position] > room or not micro_batches:
            micro_batches.append([])
            room = budget
        micro_batches[-1].append(position)
        room -= lengths[position]
    return [tuple(micro_batch) for micro_batch in micro_batches]
