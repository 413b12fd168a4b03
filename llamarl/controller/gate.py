"""The gate: how many groups may be in flight, in what order they are trained, and why that bounds
the age of every trained token.

Words: P groups make a mini-batch, which an optimizer step learns from; S is the largest staleness,
v is the trainer's version. K mini-batches make a batch, and N = K E steps use it in E passes
(`trainer/packing.py`). F(v) groups are used for the last time by steps below version v, and group
number n, as they come into batches, by the step of version U(n): F(U(n)) <= n < F(U(n) + 1). With
one step per batch F(v) = P v. A group is *open* from its admission until the last step that uses it
has made a version, or until it is dropped.

Invariant (the bound): with `late="wait"`, every trained token was written by a version at least
(trainer version at use) - S.
Proof. A group is admitted only while fewer than F(v + S + 1) - F(v) groups are open, so at most
q < F(v + S + 1) - F(v) open groups stand before it, and F(v) are used up. Groups come into batches
in admission order, the oldest open ones into the mini-batch under way; drops only move a group
forward. So it is number F(v) + q or less, and each version u that uses it is at most U(F(v) + q),
which is at most v + S, because F(v) + q < F(v + S + 1). Its requests carry min_version =
U(F(v) + q) - S, and no replica below that starts them; versions of a replica only grow, so each
token's version w satisfies w >= U(F(v) + q) - S >= u - S.   QED
With one step per batch there are (S + 1) P slots, and U(F(v) + q) = v + q // P.
Limiting the number of open groups without the order is not enough: one slow group could be
overtaken for ever. Which versions are published has no place in the proof; every one is. S counts
optimizer steps, so a batch of N needs S >= N - 1 (`Config` checks it): then its groups have a
min_version up to that before its first step, and can be written by then.

Within a step the order does not matter, so a sampler other than `admission` may choose among the
settled groups of the step under way: with m groups missing, among the m oldest open ones that are
not taken yet. Proof. Count for a group what the step under way has taken, plus the open groups
before it that are not taken; at its admission that is n = F(v) + q less what is taken by complete
steps. To take one before it leaves the count as it is. To take one behind it makes the count at
most (P - m + 1) + (m - 2) = P - 1, because both are among the m oldest. A drop only lowers it. A
complete step has taken P, so each group with a count below P is among them, and for the others the
next step that takes groups begins with P less. So again the group is in mini-batch n // P of the
run or in an earlier one, and used for the last time at u <= U(n), which depends on n // P only. QED
Where the first step of a batch also looks ahead, at the (K - 1) P groups of the others, these are
taken in the same way, as if one step missed them, and then cut into mini-batches in order of
admission: a group that had k untaken ones before it has at most k before it there.   QED
In how many parts a step is taken, and of what sizes, has no place in either proof: all parts of a
step are used at one version, and together they are the P groups that a single part would be.

With `late="mask"` a group that is not ready is overtaken, so u may exceed U(F(v) + q); its tokens
older than u - S then get zero loss weight (`BatchRollout.oldest_version`), and the bound holds per
trained token again. It does so whatever a sampler chooses, among all settled groups: it may also
pass over a group, or take it without consuming it. Such a group stays open, keeps its slot, is
offered again once the step has made its version, and each use has its own u. With `late="wait"`
neither is possible: a group used twice would hold a place in a step that others count on, and
`Config` refuses a recipe's own sampler there.

S = 0 makes the loop synchronous: no replica starts a group before it serves the version of the
step before. In a run that is resumed F counts from its first version, which begins a batch.

Groups are admitted when a version is made, not when it has been published: replicas have their
requests and hold them until they commit, so none waits for the controller when it does.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile

from llamarl.controller.balance import RowIds
from llamarl.controller.batches import DropStreak
from llamarl.core.errors import TaskError
from llamarl.core.extensions import FILE
from llamarl.core.groups import Group
from llamarl.core.records import Prompt
from llamarl.metrics.span import Spans
from llamarl.prompts.stream import PromptStream
from llamarl.scoring.samplers import ReadyItem, Sample, Sampler, admission, draw, ready_item
from llamarl.trainer.advantages import EQUAL_REWARDS, SOLVED
from llamarl.trainer.packing import MiniBatches

ROOM_PAUSE_S = 1.0  # before storage is asked again whether it has room


@dataclass(kw_only=True)
class Gate:
    """Admits groups and hands them out for training.

    Example, S=1, P=2, nothing trained yet: groups 0 and 1 are admitted for step 0, groups 2 and 3
    for step 1, a fifth waits. When the trainer has made version 1 out of 0 and 1, two more may
    enter.
    """

    max_staleness: int
    steps: MiniBatches
    """Which steps use which groups, from the version on that the session begins with."""
    rollouts_per_group: int
    late: str
    max_drops_in_row: int
    sampler: Sampler = admission
    prompts: PromptStream
    spans: Spans
    next_group_id: int = 0
    next_row_id: int = 0
    num_units: int = 1  # of storage
    plan_units: Callable[[int], Sequence[int | None]]
    """Returns a storage unit for each of so many groups, as `allocate_rows` takes them."""
    has_room: Callable[[], Awaitable[bool]]
    """Returns whether storage takes more groups than those of one step, which it must take."""
    is_waited_for: bool = False
    """Whether the trainer has nothing to do until more groups are ready."""
    solved: str = ""
    """The groups that show that nothing is left to learn, in words."""
    ended: str = ""
    """The reason why the run ends before its last step, although more may be learnt."""
    _waiting: dict[int, Group] = field(default_factory=dict)  # admitted, not consumed, in order
    _settled: dict[int, ReadyItem] = field(default_factory=dict)  # of those, what may be taken
    _batch: list[Group] = field(default_factory=list)  # what the one under way has taken
    _given: int = 0  # of those, to its present step and before it in the same pass
    _kept: dict[int, ReadyItem] = field(default_factory=dict)  # of those, what was not consumed
    _chosen: Sample | None = None  # what the next `take` gives
    _last_step: int = 0  # of the group admitted last
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def __post_init__(self) -> None:
        self._row_ids = RowIds(self.next_row_id, self.num_units)
        self._drops = DropStreak(self.max_drops_in_row)
        self.version = self.steps.first_version

    @property
    def capacity(self) -> int:
        """The most groups that may be open at once: F(v + S + 1) - F(v)."""
        last = self.version + self.max_staleness + 1
        return self.steps.num_used_up(last) - self.steps.num_used_up(self.version)

    @property
    def num_ahead(self) -> int:
        """The number of groups that the step under way takes for later steps of its batch."""
        return self.steps.num_ahead(self.version)

    def oldest_version(self, version: int) -> int:
        """Return the oldest version whose tokens trainer version `version` may learn from."""
        return version - self.max_staleness

    def state(self, version: int) -> dict[str, object]:
        """Return the state that a run needs to resume at `version`, which is the gate's or the next
        one: the prompts of the groups admitted and not consumed by then, in order, as [epoch,
        prompt_id]; the next free ids; and where the prompts go on. Amid a batch, the groups that
        its steps have used count as consumed, since a run that is resumed begins with a new batch.
        """
        first = self.steps.first_of_batch(self.version)
        taken = self._batch[self.steps.num_used(first, version) :]
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
        """Return row ids that were never used before, also for evaluations and checks: of rows in
        one storage unit, or without `unit` spread over all."""
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
                        lambda: self.num_open < self.capacity and not self._is_closed
                    )
                has_room = await self.has_room()
            limit = self.capacity
            if not has_room:
                limit = min(limit, self.steps.num_needed(self.version))
            num_free = limit - self.num_open
            if num_free > 0 and not self._is_closed:
                units = zip(self.plan_units(num_free), self.prompts, strict=False)
                opened = [self._open(unit, prompt) for unit, prompt in units]
                async with self._changed:
                    self._changed.notify_all()  # the prompts may have come to their end
                if opened:
                    return opened
            with self.spans.span("gate", "wait"):
                await asyncio.sleep(ROOM_PAUSE_S)

    async def settle(self, group: Group, advantages: tuple[float, ...]) -> None:
        """Note that the group is scored and trainable: it may be consumed, in its order."""
        group.advantages = advantages
        self.prompts.learn(group.prompt, has_signal=any(advantages))
        async with self._changed:
            self._settled[group.group_id] = ready_item(group)
            self._drops.reasons.clear()
            self._changed.notify_all()

    async def drop(self, group: Group, reason: str) -> None:
        """Drop a group that is not trainable. Its slot is free at once, so S=0 cannot stall.

        When too many groups in a row were dropped, the run must end. If their prompts are solved,
        `solved` says so and `take` has nothing more to give; else RuntimeError.
        """
        if reason in (SOLVED, EQUAL_REWARDS):
            self.prompts.learn(group.prompt, has_signal=False)
        async with self._changed:
            del self._waiting[group.group_id]
            self._drops.reasons[reason] += 1
            all_prompts = max(self.prompts.num_prompts, self.capacity)
            self.solved = self.solved or self._drops.find_solved(all_prompts)
            self._changed.notify_all()
        if not self.solved:
            self._drops.require_signal()

    async def end(self, why: str) -> None:
        """Admit no more groups and hand out none for training: no further step begins."""
        async with self._changed:
            self.ended = self.ended or why
            self._changed.notify_all()

    async def wait_for(self, count: int) -> None:
        """Sleep until `take` could give `count` groups at once, or will never give another. The
        groups of a later pass are there already.

        If the prompts end before, the run has `ended`: `take` would wait for groups that are of no
        use, and that generators which have given up their device do not write.
        """
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._is_given or self._choose(count, count) or self._lacks(count)
            )
            if self._is_short(count) and not self._is_given and not self.solved:
                self.ended = self.ended or self.prompts.limit
                self._changed.notify_all()

    async def take(self, at_least: int, at_most: int, num_tokens: int = 0) -> list[Group]:
        """Return the next groups to train on, as the sampler chooses; wait until `at_least` with
        `num_tokens` tokens together may be taken, or `at_most`.

        By `admission`, in order: `late="wait"` stops at the first group that is not settled,
        `late="mask"` passes over it. The list is empty once the run has `ended`; once the prompts
        are solved and fewer than `at_most` groups are settled; and at the end of the prompts, which
        ends the run, since a last step would not be whole. TaskError if the sample is invalid, or
        if it is empty although no other group can become ready before the step.
        """
        async with self._changed:
            if self._is_given and not self.ended:
                again = self._batch[self._given : self._given + at_most]
                self._given += len(again)
                return again
            with self.spans.span("batch", "wait"):
                self.is_waited_for = True
                try:
                    await self._changed.wait_for(
                        lambda: self._choose(at_least, at_most, num_tokens) or self._lacks(at_most)
                    )
                finally:
                    self.is_waited_for = False
            (taken, consumed), self._chosen = self._chosen or ([], []), None
            if len(taken) < at_most and self._lacks(at_most) and not self.solved:
                self.ended = self.ended or self.prompts.limit
            if self.ended or (self.solved and len(taken) < at_most):
                return []
            groups = [self._waiting[group_id] for group_id in taken]
            self._batch += groups
            self._given += len(groups)
            for group_id in taken:
                item = self._settled.pop(group_id)
                self._kept[group_id] = replace(item, times_taken=item.times_taken + 1)
            for group_id in consumed:
                del self._waiting[group_id], self._kept[group_id]
            return groups

    @property
    def kept(self) -> list[Group]:
        """The groups that the step under way, or one before it whose version is not made, uses and
        that later steps will or may use again. They are still open, so their rollouts must stay.
        Ask before `advance`."""
        if not self.steps.is_last_pass(self.version):
            return self._batch[self.steps.first_group(self.version) :]
        return [group for group in self._batch if group.group_id in self._kept]

    async def advance(self, version: int) -> None:
        """Go on to `version`, which the trainer has made: the slots of the groups that its step
        used for the last time are free. The groups that it took and did not consume are ready
        again."""
        async with self._changed:
            assert version == self.version + 1, (version, self.version)
            end = self.steps.first_group(self.version) + self.steps.groups_per_step
            assert len(self._batch) >= end, "made before its batch"
            for group in self._batch[end - self.steps.groups_per_step : end]:
                if group.group_id in self._kept:
                    self._settled[group.group_id] = self._kept.pop(group.group_id)
            if self.steps.first_of_batch(version) == version:
                del self._batch[: self.steps.groups_per_batch]
                self._given -= self.steps.groups_per_batch
            else:
                if self._given > end:  # it looked ahead
                    self._batch[end:] = sorted(self._batch[end:], key=lambda group: group.group_id)
                self._given = self.steps.first_group(version)
            self.version = version
            self._changed.notify_all()

    @property
    def num_open(self) -> int:
        """The number of groups that were admitted and are neither used up nor dropped."""
        num_unused = len(self._batch) - self._num_used_up(self.version)
        return len(self._waiting) + num_unused - len(self._kept)

    @property
    def _is_given(self) -> bool:
        """Whether the batch has groups left for the step under way, from a pass before or taken
        ahead."""
        return self._given < len(self._batch)

    def _num_used_up(self, version: int) -> int:
        """Return how many groups of the batch under way no step from `version` on uses again."""
        first = self.steps.first_of_batch(self.version)
        return self.steps.num_used_up(version) - self.steps.num_used_up(first)

    @property
    def _is_closed(self) -> bool:
        """Whether no other group will be admitted."""
        return bool(self.solved or self.ended) or self.prompts.is_exhausted

    def _lacks(self, count: int) -> bool:
        """Return whether `count` groups will never be ready."""
        return bool(self.solved or self.ended) or self._is_short(count)

    def _is_short(self, count: int) -> bool:
        """Return whether the prompts end before `count` groups are there."""
        num_left = len(self._waiting) - len(self._kept)
        return self.prompts.is_exhausted and num_left < count

    def _open(self, unit: int | None, prompt: Prompt) -> Group:
        step = self.steps.last_use(self.steps.num_used_up(self.version) + self.num_open)
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
        """Return whether `take` has something to give, which is then in `_chosen` until it is
        taken."""
        if self._chosen is not None and len(self._chosen[0]) <= at_most:
            return True
        ready = self._ready(at_most)
        count = min(len(ready), at_most)
        is_large = count == at_most or sum(item.num_all_tokens for item in ready) >= num_tokens
        if count < at_least or not is_large:
            return False
        self._chosen = draw(self.sampler, ready, count, at_least=count)
        if self._chosen[0] or count == 0:
            return True
        self._chosen = None
        is_all = len(ready) == len(self._waiting) - len(self._kept)
        if is_all and self.prompts.is_exhausted:  # no other choice will come
            self.ended = self.ended or self.prompts.limit
        elif is_all and self.num_open == self.capacity and not self.solved:
            must = f"take {count} groups once all that may be open are ready"
            raise TaskError(f"what sample of {FILE} returns must {must} ({len(ready)}), got none")
        return False

    def _ready(self, at_most: int) -> list[ReadyItem]:
        """Return the groups that the sampler may choose from for a step that misses `at_most`
        groups."""
        ids: Iterable[int] = self._waiting
        if self.late == "wait":
            ids = islice(ids, at_most)
            if self.sampler is admission:
                ids = takewhile(self._settled.__contains__, ids)
        return [self._settled[group_id] for group_id in ids if group_id in self._settled]
