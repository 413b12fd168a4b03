"""The packing of settled groups into a batch and its mini-batches: which rollout is trained on
which rank, in which micro-batch."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llamarl.core.groups import Batch, BatchRollout, Group
from llamarl.core.partition import partition


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatches:
    """The schedule of batches of `number` mini-batches, trained `num_passes` times; the first batch
    begins with the step that `first_version` takes. `looks_ahead`: that step also takes the groups
    of the batch's other mini-batches. Groups are numbered in the order in which they come into
    batches, from 0."""

    groups_per_step: int
    number: int = 1
    num_passes: int = 1
    looks_ahead: bool = False
    first_version: int = 0

    @property
    def groups_per_batch(self) -> int:
        """The number of groups of a batch."""
        return self.number * self.groups_per_step

    @property
    def steps_per_batch(self) -> int:
        """The number of optimizer steps from a batch."""
        return self.number * self.num_passes

    def first_of_batch(self, version: int) -> int:
        """Return the trainer's version before the first step of the batch that the step of
        `version` belongs to."""
        return version - (version - self.first_version) % self.steps_per_batch

    def first_group(self, version: int) -> int:
        """Return the place in its batch where the mini-batch of this step begins."""
        step = version - self.first_of_batch(version)
        return step % self.number * self.groups_per_step

    def is_last_pass(self, version: int) -> bool:
        """Return whether this step uses its mini-batch for the last time."""
        step = version - self.first_of_batch(version)
        return step >= self.steps_per_batch - self.number

    def num_used_up(self, version: int) -> int:
        """Return F: how many groups are used for the last time by the steps below `version`."""
        num_batches, step = divmod(version - self.first_version, self.steps_per_batch)
        in_last_pass = max(0, step - (self.steps_per_batch - self.number))
        return num_batches * self.groups_per_batch + in_last_pass * self.groups_per_step

    def num_used(self, first: int, version: int) -> int:
        """Return how many groups of the batch that began at version `first` are used by its steps
        below `version`, for the last time or not."""
        return min(version - first, self.number) * self.groups_per_step

    def last_use(self, group: int) -> int:
        """Return U: the version whose step uses group number `group` for the last time, so that
        F(U) <= group < F(U + 1)."""
        batch, place = divmod(group, self.groups_per_batch)
        step = self.steps_per_batch - self.number + place // self.groups_per_step
        return self.first_version + batch * self.steps_per_batch + step

    def num_steps(self, num_groups: int) -> int:
        """Return the number of steps that so many groups are enough for, from the beginning of a
        batch on."""
        num_batches, rest = divmod(num_groups, self.groups_per_batch)
        more = 0 if self.looks_ahead else rest // self.groups_per_step
        return num_batches * self.steps_per_batch + more

    def num_ahead(self, version: int) -> int:
        """Return the number of groups that this step takes for later ones."""
        is_first = self.first_of_batch(version) == version
        return self.groups_per_batch - self.groups_per_step if self.looks_ahead and is_first else 0

    def num_needed(self, version: int) -> int:
        """Return the number of groups that must be open for this step, with those of its batch that
        are not used up."""
        first, num = self.first_of_batch(version), self.groups_per_batch
        if version < first + self.number and not self.looks_ahead:
            num = self.first_group(version) + self.groups_per_step
        return num - (self.num_used_up(version) - self.num_used_up(first))


MOST_EVENED = 4096  # rollouts of a round: with more, the even spread takes longer than it saves
Assignment = tuple[tuple[tuple[int, ...], ...], ...]
"""A tuple of ranks and micro-batches: `assignment[rank][micro_batch]` lists positions in the
batch's rows."""


def make_batch(
    groups: Sequence[Group],
    version: int,
    oldest_version: int,
    *,
    num_ranks: int,
    tokens_per_micro_batch: int,
    attention_cost: float = 0.0,
    scale: Callable[[Sequence[float]], Sequence[float]] = list,
) -> Batch:
    """Return the rows of `groups`, one for each conversation of an episode, for trainer version
    `version`, packed onto ranks and micro-batches.

    Tokens written by a version below `oldest_version` get zero loss weight. `attention_cost` is
    that of `pack`; `scale` is applied to the advantages of all groups together."""
    rollouts = [(group, group.rollouts[row_id]) for group in groups for row_id in group.row_ids]
    advantages = [advantage for group in groups for advantage in group.advantages]
    own = {i: advantage for group in groups for i, advantage in group.own_advantages.items()}
    advantages = [*scale([*advantages, *own.values()])]
    own = dict(zip(own, advantages[len(rollouts) :], strict=True))
    rows: list[BatchRollout] = []
    for (group, rollout), advantage in zip(rollouts, advantages, strict=False):
        counts = [row.num_generated for row in rollout.sequences]
        num_in_rollout, is_kept = sum(counts), group.prompt.is_kept
        rows += [
            BatchRollout(
                row_id=row.row_id,
                group_id=group.group_id,
                num_prompt_tokens=row.num_prompt_tokens,
                num_tokens=row.num_tokens,
                num_generated=num_generated,
                advantage=own.get(row.row_id, advantage),
                oldest_version=oldest_version,
                is_kept=is_kept,
                num_in_rollout=num_in_rollout,
            )
            for row, num_generated in zip(rollout.sequences, counts, strict=True)
        ]
    lengths = [row.num_prompt_tokens + row.num_tokens for row in rows]
    assignment = pack(lengths, num_ranks, tokens_per_micro_batch, attention_cost)
    return Batch(version=version, rows=tuple(rows), assignment=assignment)


def pack(
    lengths: Sequence[int], num_ranks: int, tokens_per_micro_batch: int, attention_cost: float = 0.0
) -> Assignment:
    """Assign every rollout to one micro-batch of one rank.

    `lengths[i]` is the number of tokens, prompt and response, of row i. Its cost is taken to be
    `lengths[i] + attention_cost * lengths[i] ** 2` (`model.inventory.attention_cost`). In each
    round the remaining rollouts go, the longest first, to the rank with the least cost that has
    room; then those of the round are spread more evenly, if they still fit. A micro-batch holds at
    most `tokens_per_micro_batch` tokens, or one longer rollout; in the last rounds some are empty.

    Example: `pack([3, 9, 4, 4], num_ranks=2, tokens_per_micro_batch=8)` is `(((1,), ()), ((2, 3),
    (0,)))`."""
    costs = [length + attention_cost * length * length for length in lengths]
    ranks: list[list[tuple[int, ...]]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    left = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    while left:
        filled, left = _fill(left, lengths, costs, num_ranks, tokens_per_micro_batch)
        even = _spread_evenly(filled, lengths, costs, tokens_per_micro_batch)
        cost_of = [(sum(costs[i] for i in positions), positions) for positions in even]
        cost_of.sort(key=lambda pair: -pair[0])
        # The costliest goes to the rank with the least cost so far, which evens out the rest.
        least_first = sorted(range(num_ranks), key=loads.__getitem__)
        for rank, (cost, positions) in zip(least_first, cost_of, strict=True):
            ranks[rank].append(tuple(positions))
            loads[rank] += cost
    return tuple(map(tuple, ranks))


def _fill(
    left: list[int], lengths: Sequence[int], costs: Sequence[float], num_ranks: int, budget: int
) -> tuple[list[list[int]], list[int]]:
    """Return one micro-batch per rank, and the rollouts that found no room, both from the longest
    rollout to the shortest, as `left` is."""
    filled: list[list[int]] = [[] for _ in range(num_ranks)]
    room = [budget] * num_ranks
    open_ = [(0.0, rank) for rank in range(num_ranks)]  # a heap: least cost first, then lowest rank
    tight: list[tuple[int, float, int]] = []  # a heap of the others: most room first, negative
    rest: list[int] = []
    at = 0
    while at < len(left):
        length = lengths[left[at]]
        while tight and -tight[0][0] >= length:
            heapq.heappush(open_, heapq.heappop(tight)[1:])
        while open_ and filled[open_[0][1]] and room[open_[0][1]] < length:
            cost, rank = heapq.heappop(open_)
            heapq.heappush(tight, (-room[rank], cost, rank))
        if open_:
            cost, rank = open_[0]
            filled[rank].append(left[at])
            room[rank] -= length
            heapq.heapreplace(open_, (cost + costs[left[at]], rank))
            at += 1
        else:  # on to the first one that is short enough
            fits = bisect_left(left, tight[0][0], lo=at, key=lambda i: -lengths[i])
            rest += left[at:fits]
            at = fits
    return filled, rest


def _spread_evenly(
    filled: list[list[int]], lengths: Sequence[int], costs: Sequence[float], budget: int
) -> list[list[int]]:
    """Return the same rollouts in as many micro-batches: those of `filled`, unless others are more
    even and keep within the budget."""
    positions = sorted((i for each in filled for i in each), key=lambda i: (-lengths[i], i))
    if not len(filled) < len(positions) <= MOST_EVENED:
        return filled
    parts = partition([costs[i] for i in positions], len(filled))
    even = [[positions[i] for i in sorted(part)] for part in parts]
    fits = all(len(each) == 1 or sum(lengths[i] for i in each) <= budget for each in even)

    def most(micro_batches: list[list[int]]) -> float:
        return max(sum(costs[i] for i in each) for each in micro_batches)

    return even if fits and most(even) < most(filled) else filled
