"""Samplers, which choose the rollouts that a consumer takes next among those that are ready.

A sampler is a function `sample(ready, count) -> (taken, consumed)`, as in TransferQueue. `ready`
are the items that may be taken, in the order of admission; `taken` has the ids of at most `count`
of them, or none, to wait until more are ready; `consumed` has those of them that are done with.
Items that are taken and not consumed will be ready again. For the trainer an item is a whole
settled group, and exactly `count` of them or none must be taken; for other consumers it is a
rollout. A consumer gets only items that are ready, each once per sample."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

from llamarl.core.config import Config
from llamarl.core.errors import TaskError
from llamarl.core.extensions import FILE
from llamarl.core.fields import require, require_choice
from llamarl.core.groups import Group
from llamarl.core.partition import partition_in_equal_counts

TASK = "task"  # the recipe's own task.py


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyItem:
    """`num_rollouts` that may be taken together: one, or a settled group.

    `item_id` is the row id, or the group id of a group. `group_size` counts the rollouts of its
    group that are trained on. Prompt and response tokens are summed over the item's rollouts,
    `advantages` has one entry for each; `oldest_version` wrote the oldest of the tokens.
    `times_taken` counts how often the item was taken before.
    """

    item_id: int
    group_id: int
    group_size: int
    num_rollouts: int = 1
    num_prompt_tokens: int
    num_tokens: int
    oldest_version: int = 0
    advantages: tuple[float, ...] = ()
    times_taken: int = 0

    @property
    def num_all_tokens(self) -> int:
        """The tokens of prompts and responses together."""
        return self.num_prompt_tokens + self.num_tokens


def ready_item(group: Group) -> ReadyItem:
    """Return a settled group as a trainer's sampler sees it."""
    rows = group.sequences
    return ReadyItem(
        item_id=group.group_id,
        group_id=group.group_id,
        group_size=len(group.row_ids),
        num_rollouts=len(group.row_ids),
        num_prompt_tokens=sum(each.num_prompt_tokens for each in rows),
        num_tokens=sum(each.num_tokens for each in rows),
        oldest_version=min((span.version for each in rows for span in each.spans), default=0),
        advantages=group.advantages,
    )


Sample = tuple[Sequence[int], Sequence[int]]
"""The ids of the items that are taken, and of those among them that are consumed."""

Sampler = Callable[[Sequence[ReadyItem], int], Sample]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The processes of one consumer: each batch has `num_data_ranks` shares, and `num_peers`
    processes (those of tensor and pipeline parallelism) need the same share. `attention_cost` is
    the cost of a pair of tokens (`model.inventory.attention_cost`)."""

    num_data_ranks: int = 1
    num_peers: int = 1
    attention_cost: float = 0.0


def admission(ready: Sequence[ReadyItem], count: int) -> Sample:
    """Take the oldest `count`; none while there are fewer."""
    taken = [item.item_id for item in ready[:count]]
    return (taken, taken) if len(taken) == count else ([], [])


def group_complete(ready: Sequence[ReadyItem], count: int) -> Sample:
    """Take the oldest groups of which all rollouts are ready; none while more of them would fit."""
    groups: dict[int, list[ReadyItem]] = {}
    for item in ready:
        groups.setdefault(item.group_id, []).append(item)
    taken: list[int] = []
    for items in groups.values():
        if sum(item.num_rollouts for item in items) < items[-1].group_size:
            continue
        if len(taken) + len(items) > count:
            return taken, taken
        taken += [item.item_id for item in items]
    return (taken, taken) if len(taken) == count else ([], [])


def token_balanced(ready: Sequence[ReadyItem], count: int, ranks: Ranks) -> Sample:
    """Take the oldest `count`, those of the first data rank first. Ranks get equally many items and
    nearly equal costs, by tokens and attention; with fewer items than ranks, one or none each.
    Raises ValueError for another `count`."""
    num_ranks = ranks.num_data_ranks
    if count < num_ranks:
        return admission(ready, count)
    require(count % num_ranks == 0, "count", f"be a multiple of the {num_ranks} data ranks", count)
    if len(ready) < count:
        return [], []
    lengths = [item.num_all_tokens for item in ready[:count]]
    costs = [length + ranks.attention_cost * length * length for length in lengths]
    parts = partition_in_equal_counts(costs, num_ranks)
    taken = [ready[place].item_id for part in parts for place in sorted(part)]
    return taken, taken


SAMPLERS: dict[str, Callable[[Ranks], Sampler]] = {
    "admission": lambda ranks: admission,
    "group_complete": lambda ranks: group_complete,
    "token_balanced": lambda ranks: lambda ready, count: token_balanced(ready, count, ranks),
    "rank_aware": lambda ranks: admission,  # in a `RankAware`, as all that have several ranks
}
"""Samplers by their names in `experience.sampler`."""

OF_THE_TRAINER = ("admission", "group_complete", TASK)
"""Samplers that choose among groups for the trainer; `pack` decides how groups lie on its ranks."""


def check_sampler(config: Config) -> None:
    """Raise ValueError unless the sampler that the recipe selects exists and serves the trainer."""
    name = config.experience.sampler
    require_choice("experience.sampler", name, [*SAMPLERS, TASK])
    require(
        name in OF_THE_TRAINER,
        "experience.sampler",
        f"be one of {', '.join(OF_THE_TRAINER)} (others are for consumers with ranks of their own; "
        "the batches of the trainer's are always balanced)",
        name,
    )


def make_sampler(
    name: str, task: Mapping[str, Callable[..., Any]], ranks: Ranks | None = None
) -> Sampler:
    """Return the sampler of this name; `task` has the functions of task.py that the recipe
    names."""
    return task["sample"] if name == TASK else SAMPLERS[name](ranks or Ranks())


def draw(
    sampler: Sampler, ready: Sequence[ReadyItem], count: int, at_least: int = 1
) -> tuple[list[int], list[int]]:
    """Return the ids that `sampler` takes and consumes of `ready`: `at_least` to `count`, or none.

    Raises TaskError, one line, if it returns anything else."""
    found = sampler(ready, count)
    is_pair = isinstance(found, tuple | list) and len(found) == 2
    are_lists = is_pair and all(isinstance(ids, tuple | list) for ids in found)
    if not are_lists or not all(isinstance(item_id, int) for ids in found for item_id in ids):
        raise _wrong("be two lists of item ids, those taken and those consumed", found)
    taken, consumed = map(list, found)
    offered = {item.item_id for item in ready}
    for ids, what, allowed in (
        (taken, "take only what is ready", offered),
        (consumed, "consume only what it takes", set(taken)),
    ):
        unknown = [item_id for item_id in ids if item_id not in allowed]
        if unknown:
            raise _wrong(what, unknown[0])
        twice = [item_id for item_id, times in Counter(ids).items() if times > 1]
        if twice:
            raise _wrong(f"{what.split()[0]} an item once", f"{twice[0]} more often")
    if taken and not at_least <= len(taken) <= count:
        wanted = f"{at_least} to {count}" if at_least < count else count
        raise _wrong(f"take {wanted} items or none", len(taken))
    return taken, consumed


def _wrong(must: str, got: object) -> TaskError:
    return TaskError(f"what sample of {FILE} returns must {must}, got {got!s:.100}")


class RankAware:
    """Draws one sample per batch for all processes of a consumer that has several.

    The first process that asks for a batch draws it for all data ranks. Each data rank gets its
    share, and all its peers get the same."""

    def __init__(self, sampler: Sampler, ranks: Ranks) -> None:
        self._sampler, self._ranks = sampler, ranks
        self._shares: dict[int, list[list[int]]] = {}  # by batch, until all have theirs
        self._missing: dict[int, set[tuple[int, int]]] = {}  # who has yet to ask
        self._num_over = 0  # batches below were answered

    def sample(
        self,
        ready: Sequence[ReadyItem],
        count: int,
        *,
        data_rank: int,
        peer: int,
        batch_index: int,
    ) -> tuple[list[int] | None, list[int]]:
        """Return the ids of at most `count` items for this process, and of those that drawing the
        batch consumes.

        The first is None while nothing is ready. No batch waits to be full: ranks get equally many
        of the ready items, or one or none each where there are fewer items than ranks. Only the
        first answer of a batch consumes anything, and it consumes the whole batch: no later batch
        may get these items, though some processes have yet to ask. A process may ask again until
        all have their answer; then RuntimeError is raised."""
        if batch_index < self._num_over:
            raise RuntimeError(f"batch {batch_index} must not be asked for again: all have it")
        consumed: list[int] = []
        if batch_index not in self._shares:
            num_shares = self._ranks.num_data_ranks
            per_rank = min(count, len(ready) // num_shares)
            taken, consumed = draw(self._sampler, ready, per_rank * num_shares or len(ready))
            if not taken:
                return None, []
            ends = [len(taken) * i // num_shares for i in range(num_shares + 1)]
            self._shares[batch_index] = [taken[start:end] for start, end in pairwise(ends)]
            peers = range(self._ranks.num_peers)
            self._missing[batch_index] = set(product(range(num_shares), peers))
        share = self._shares[batch_index][data_rank]
        self._missing[batch_index].discard((data_rank, peer))
        if not self._missing[batch_index]:
            del self._shares[batch_index], self._missing[batch_index]
            self._num_over = batch_index + 1
        return share, consumed

    def is_missed(self, batch_index: int) -> bool:
        """Return whether some processes have yet to ask for this batch, which was drawn."""
        return batch_index in self._missing
