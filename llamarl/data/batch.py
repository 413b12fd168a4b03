"""From settled groups to a batch. Invariant: metadata only; a pure function of the groups, the
version and the trainer's shape."""

from __future__ import annotations

from collections.abc import Sequence

from llamarl.data.packing import pack
from llamarl.types import Batch, BatchRow, Group


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
        BatchRow(
            row_id=row_id,
            group_id=group.group_id,
            num_prompt_tokens=group.rows[row_id].num_prompt_tokens,
            num_tokens=group.rows[row_id].num_tokens,
            advantage=advantage,
            oldest_version=oldest_version,
        )
        for group in groups
        for row_id, advantage in zip(group.row_ids, group.advantages, strict=True)
    )
    lengths = [row.num_prompt_tokens + row.num_tokens for row in rows]
    assignment = pack(lengths, num_ranks, tokens_per_micro_batch)
    return Batch(version=version, rows=rows, assignment=assignment)
