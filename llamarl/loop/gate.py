"""The gate: how many groups may be in flight, in what order they are trained, and why that bounds
the age of every trained token.

Owns: admission, the order of consumption, the bound, and the numbers of groups and rows. Does not
own: rewards or rollouts, or which of the groups that the bound allows come next
(`dataflow/samplers.py`).

Words: P groups make a step, S is the largest staleness, v is the trainer's version. A group is
*open* from its admission until the step that consumes it has made a version, or until it is
dropped.

Invariant (the bound): with `late="wait"`, every trained token was written by a version at least
(trainer version at use) - S.
Proof. A group is admitted only while fewer than (S+1)P groups are open, so at most q <= (S+1)P - 1
open groups stand before it. Groups are consumed in admission order, P per step, the oldest open
ones in step v; drops only move a group forward. So it is used at version u <= v + q // P <= v + S.
Its requests carry min_version = v + q // P - S, and no replica below that starts them; versions of
a replica only grow, so each token's version w satisfies w >= v + q // P - S >= u - S.   QED
Limiting the number of open groups without the order is not enough: one slow group could be
overtaken for ever.

Within a step the order does not matter, so a sampler other than `admission` may choose among the
settled groups of the step under way: with m groups missing, among the m oldest open ones that are
not taken yet. Proof. Count for a group what the step under way has taken, plus the open groups
before it that are not taken; at its admission that is at most q. To take one before it leaves the
count as it is. To take one behind it makes the count at most (P - m + 1) + (m - 2) = P - 1, because
both are among the m oldest. A drop only lowers it. A complete step has taken P, so each group with
a count below P is among them, and for the others the next step begins with P less. So again the
group is used at a version u <= v + q // P.   QED
In how many parts a step is taken, and of what sizes, has no place in either proof: all parts of a
step are used at one version, and together they are the P groups that a single part would be.

With `late="mask"` a group that is not ready is overtaken, so u may exceed v + q // P; its tokens
older than u - S then get zero loss weight (`BatchRollout.oldest_version`), and the bound holds per
trained token again. It does so whatever a sampler chooses, among all settled groups: it may also
pass over a group, or take it without consuming it. Such a group stays open, keeps its slot, is
offered again once the step has made its version, and each use has its own u. With `late="wait"`
neither is possible: a group used twice would hold a place in a step that others count on, and
`Config` refuses a recipe's own sampler there.

With `late="mask"`, `carry_over_groups` C more groups may be open, (S+1)P + C in all: a step finds P
ready groups while up to C others, the longest ones, are still being written. These stay open, are
written on under the next version (rollouts in flight go on at a commit), and a later step takes
them before younger ones. The bound per trained token does not use how many groups are open: a token
of version w has weight at u only if w >= u - S, whenever its group was admitted. What carrying over
costs is tokens: a group may start up to C places earlier, on versions from v + max(0, q - C) // P
- S on, and what it wrote before u - S has no weight. At S = 0 that is all that it wrote before the
last commit.

S = 0 makes the loop synchronous: no replica starts a group before it serves the version of the
step before.

Groups are admitted when a version is made, not when it has been published: replicas have their
requests and hold them until they commit, so none waits for the controller when it does.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile

from llamarl.algorithms.group_filters import EQUAL_REWARDS, SOLVED
from llamarl.dataflow.samplers import ReadyItem, Sample, Sampler, admission, draw
from llamarl.environments.prompt_stream import PromptStream
from llamarl.errors import TaskError
from llamarl.groups import Group
from llamarl.loop.nearby_units import RowIds
from llamarl.metrics.span import Spans
from llamarl.protocols import Storage
from llamarl.task_file import FILE
from llamarl.types import Prompt

log = logging.getLogger(__name__)

ROOM_PAUSE_S = 1.0  # before storage is asked again whether it has room


@dataclass
class Room:
    """`await room()` is False while a storage unit holds all that it may and cannot move rollouts
    to disk, and the log says so. It asks once in ROOM_PAUSE_S at most."""

    storage: Storage
    _next_s: float = -math.inf
    _is_full: bool = False

    async def __call__(self) -> bool:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._next_s:
            self._next_s = now_s + ROOM_PAUSE_S
            usage = await self.storage.usage()
            if usage["is_full"] and not self._is_full:
                log.warning(
                    "storage is full (%.1f GiB in memory, %.1f GiB on disk): no more than the "
                    "next step's rollouts are asked for until that changes",
                    usage["memory_bytes"] / 2**30,
                    usage["spilled_bytes"] / 2**30,
                )
            self._is_full = usage["is_full"] > 0
        return not self._is_full


@dataclass(kw_only=True)
class Gate:
    """Admits groups and hands them out for training.

    Example, S=1, P=2, nothing trained yet: groups 0 and 1 are admitted for step 0, groups 2 and 3
    for step 1, a fifth waits. When the trainer has made version 1 out of 0 and 1, two more may
    enter.
    """

    max_staleness: int
    groups_per_step: int
    rollouts_per_group: int
    late: str
    carry_over_groups: int = 0
    max_drops_in_row: int
    sampler: Sampler = admission
    prompts: PromptStream
    spans: Spans
    version: int = 0
    next_group_id: int = 0
    next_row_id: int = 0
    num_units: int = 1  # of storage
    plan_units: Callable[[int], Sequence[int | None]] | None = None
    """Which storage unit each of so many groups goes to, as `allocate_rows` takes them."""
    has_room: Callable[[], Awaitable[bool]] | None = None
    """Whether storage takes more groups than those of one step, which it must take."""
    is_waited_for: bool = False
    """The trainer has nothing to do until more groups are ready."""
    solved: str = ""
    """Which groups show that nothing is left to learn."""
    ran_out: bool = False
    """The epochs are over, and fewer groups are left than a step needs, or the sampler wants none
    of them."""
    _waiting: dict[int, Group] = field(default_factory=dict)  # admitted, not consumed, in order
    _settled: dict[int, ReadyItem] = field(default_factory=dict)  # of those, what may be taken
    _taken: list[Group] = field(default_factory=list)  # by steps whose version is not yet made
    _kept: dict[int, ReadyItem] = field(default_factory=dict)  # of those, what was not consumed
    _chosen: Sample | None = None  # what the next `take` gives
    _drops_in_row: Counter[str] = field(default_factory=Counter)
    _last_step: int = 0  # of the group admitted last
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def __post_init__(self) -> None:
        self._row_ids = RowIds(self.next_row_id, self.num_units)

    @property
    def capacity(self) -> int:
        """Most groups open at once: (S+1)P, and those carried over."""
        return (self.max_staleness + 1) * self.groups_per_step + self.carry_over_groups

    def oldest_version(self, version: int) -> int:
        """The oldest version whose tokens trainer version `version` may learn from."""
        return version - self.max_staleness

    def state(self, version: int) -> dict[str, object]:
        """What a run needs that resumes at `version`, which is the gate's or the next one: the
        prompts of the groups admitted and not consumed by then, in order, as [epoch, prompt_id];
        the next free ids; and where the prompts go on."""
        num_trained = (version - self.version) * self.groups_per_step
        taken = self._taken[num_trained:]
        consumed = [group for group in taken if group.group_id not in self._kept]
        groups = sorted([*self._waiting.values(), *consumed], key=lambda group: group.group_id)
        pending = [[group.prompt.epoch, group.prompt.prompt_id] for group in groups]
        return {
            "pending": pending,
            "next_group_id": self.next_group_id,
            "next_row_id": self.next_row_id,
            **self.prompts.state(),
        }

    def allocate_rows(self, count: int, unit: int | None = None) -> tuple[int, ...]:
        """Row ids that were never used before, also for evaluations and checks; of rows in one
        storage unit, or without one spread over all."""
        row_ids = self._row_ids.take(count, unit)
        self.next_row_id = self._row_ids.end
        return row_ids

    async def admit(self) -> list[Group]:
        """Wait for a free slot, then open a group for one prompt per free slot.

        Prompts are drawn only now, so what was drawn is always either open or done.
        """
        while True:
            with self.spans.span("gate", "wait"):
                async with self._changed:
                    await self._changed.wait_for(
                        lambda: self.num_open < self.capacity and not self._has_end
                    )
                has_room = self.has_room is None or await self.has_room()
            limit = self.capacity if has_room else min(self.capacity, self.groups_per_step)
            num_free = limit - self.num_open
            if num_free > 0 and not self._has_end:
                units = self.plan_units(num_free) if self.plan_units else [None] * num_free
                opened = [self._open(*each) for each in zip(units, self.prompts, strict=False)]
                async with self._changed:
                    self._changed.notify_all()  # the prompts may have come to their end
                if opened:
                    return opened
            with self.spans.span("gate", "wait"):
                await asyncio.sleep(ROOM_PAUSE_S)

    async def settle(self, group: Group, advantages: tuple[float, ...]) -> None:
        """The group is scored and trainable: it may be consumed, in its order."""
        group.advantages = advantages
        self.prompts.learn(group.prompt, has_signal=any(advantages))
        async with self._changed:
            self._settled[group.group_id] = _ready_item(group)
            self._drops_in_row.clear()
            self._changed.notify_all()

    async def drop(self, group: Group, reason: str) -> None:
        """The group is not trainable: its slot is free at once, so S=0 cannot stall.

        When too many groups in a row were dropped, the run must end. If their prompts are
        solved, `solved` says so and `take` has nothing more to give; else RuntimeError.
        """
        if reason in (SOLVED, EQUAL_REWARDS):
            self.prompts.learn(group.prompt, has_signal=False)
        async with self._changed:
            del self._waiting[group.group_id]
            self._drops_in_row[reason] += 1
            self.solved = self.solved or self._find_solved()
            self._changed.notify_all()
        num_drops = self._drops_in_row.total()
        if num_drops >= self.max_drops_in_row and not self.solved:
            reasons = ", ".join(f"{n} x {why}" for why, n in self._drops_in_row.most_common())
            raise RuntimeError(
                f"no trainable group among the last {num_drops} ({reasons}), and most of them "
                "without full marks: the reward gives no signal on these prompts; check reward, "
                "prompts and checkpoint"
            )

    def _find_solved(self) -> str:
        """Which groups show that nothing is left to learn, "" while more may be learnt.

        That is as many solved groups in a row as there are prompts, and as may be open (some are
        older than others); or `max_drops_in_row` drops in a row, most of them for being solved.
        """
        num_drops, num_solved = self._drops_in_row.total(), self._drops_in_row[SOLVED]
        all_prompts = max(self.prompts.num_prompts, self.capacity)
        if num_solved == num_drops >= min(all_prompts, self.max_drops_in_row):
            return f"all of the last {num_drops} groups"
        if num_drops < self.max_drops_in_row or 2 * num_solved <= num_drops:
            return ""
        others = "the others had equal rewards or failed ones"
        return f"{num_solved} of the last {num_drops} groups ({others})"

    async def wait_for(self, count: int) -> None:
        """Sleep until `take` could give `count` groups at once, or will never give another."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._choose(count, count) or self._lacks(count))

    async def take(self, at_least: int, at_most: int, num_tokens: int = 0) -> list[Group]:
        """The next groups to train on, as the sampler chooses; waits until `at_least` with
        `num_tokens` tokens together may be taken, or `at_most`.

        By `admission`, in order: `late="wait"` stops at the first group that is not settled,
        `late="mask"` passes over it. An empty list once the prompts are solved and fewer than
        `at_most` are settled, or at their end: a last step would not be whole. TaskError for an
        invalid sample, or none although no other group can become ready before the step.
        """
        async with self._changed:
            with self.spans.span("batch", "wait"):
                self.is_waited_for = True
                try:
                    await self._changed.wait_for(
                        lambda: self._choose(at_least, at_most, num_tokens) or self._lacks(at_most)
                    )
                finally:
                    self.is_waited_for = False
            (taken, consumed), self._chosen = self._chosen or ([], []), None
            if self._lacks(at_most) and len(taken) < at_most:
                self.ran_out = not self.solved
                return []
            groups = [self._waiting[group_id] for group_id in taken]
            self._taken += groups
            for group_id in taken:
                item = self._settled.pop(group_id)
                self._kept[group_id] = replace(item, times_taken=item.times_taken + 1)
            for group_id in consumed:
                del self._waiting[group_id], self._kept[group_id]
            return groups

    @property
    def kept(self) -> list[Group]:
        """Those that steps without a version yet have taken and not consumed: they are still open,
        and may be taken again, so their rollouts must stay. Ask before `advance`."""
        return [group for group in self._taken if group.group_id in self._kept]

    async def advance(self, version: int) -> None:
        """The trainer has made `version`: the slots of the groups that the step consumed are
        free, the others that it took are ready again."""
        async with self._changed:
            assert version == self.version + 1, (version, self.version)
            assert len(self._taken) >= self.groups_per_step, "made before its batch"
            for group in self._taken[: self.groups_per_step]:
                if group.group_id in self._kept:
                    self._settled[group.group_id] = self._kept.pop(group.group_id)
            del self._taken[: self.groups_per_step]
            self.version = version
            self._changed.notify_all()

    @property
    def num_open(self) -> int:
        """Groups that were admitted and are neither consumed nor dropped."""
        return len(self._waiting) + len(self._taken) - len(self._kept)

    @property
    def _has_end(self) -> bool:
        """No other group will be admitted."""
        return bool(self.solved) or self.prompts.is_exhausted

    def _lacks(self, count: int) -> bool:
        """Whether so many groups will never be ready."""
        num_left = len(self._waiting) - len(self._kept)
        is_over = self.prompts.is_exhausted and num_left < count
        return bool(self.solved) or self.ran_out or is_over

    def _open(self, unit: int | None, prompt: Prompt) -> Group:
        # Used then at the latest, if as many of those before it as may be are carried over.
        num_before = max(0, self.num_open - self.carry_over_groups)
        step = self.version + num_before // self.groups_per_step
        self._last_step = max(self._last_step, step)
        group = Group(
            group_id=self.next_group_id,
            prompt=prompt,
            row_ids=self.allocate_rows(self.rollouts_per_group, unit),
            min_version=max(0, self.oldest_version(step)),
            step=self._last_step,
        )
        self.next_group_id += 1
        self._waiting[group.group_id] = group
        return group

    def _choose(self, at_least: int, at_most: int, num_tokens: int = 0) -> bool:
        """Whether `take` has something to give: `_chosen`, until it is taken."""
        if self._chosen is not None and len(self._chosen[0]) <= at_most:
            return True
        ready = self._ready(at_most)
        count = min(len(ready), at_most)
        if count < at_least or (count < at_most and _num_tokens(ready) < num_tokens):
            return False
        self._chosen = draw(self.sampler, ready, count, at_least=count)
        if self._chosen[0] or count == 0:
            return True
        self._chosen = None
        is_all = len(ready) == len(self._waiting) - len(self._kept)
        if is_all and self.prompts.is_exhausted:  # no other choice will come
            self.ran_out = True
        elif is_all and self.num_open == self.capacity and not self.solved:
            must = f"take {count} groups once all that may be open are ready"
            raise TaskError(f"what sample of {FILE} returns must {must} ({len(ready)}), got none")
        return False

    def _ready(self, at_most: int) -> list[ReadyItem]:
        """What the sampler may choose from for a step that misses `at_most` groups."""
        ids: Iterable[int] = self._waiting
        if self.late == "wait":
            ids = islice(ids, at_most)
            if self.sampler is admission:
                ids = takewhile(self._settled.__contains__, ids)
        return [self._settled[group_id] for group_id in ids if group_id in self._settled]


def _num_tokens(items: Iterable[ReadyItem]) -> int:
    return sum(item.num_prompt_tokens + item.num_tokens for item in items)


def _ready_item(group: Group) -> ReadyItem:
    rollouts = group.rollouts.values()
    return ReadyItem(
        item_id=group.group_id,
        group_id=group.group_id,
        group_size=len(group.row_ids),
        num_rollouts=len(group.row_ids),
        num_prompt_tokens=sum(each.num_prompt_tokens for each in rollouts),
        num_tokens=sum(each.num_tokens for each in rollouts),
        oldest_version=min((span.version for each in rollouts for span in each.spans), default=0),
        advantages=group.advantages,
    )
