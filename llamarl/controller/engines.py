"""The verbs of reinforcement learning over the executors that are there: write and score groups,
settle them, accumulate gradients, make a version, bring it to the generators.

The rollouts that steps learnt from are retired once, after the last of these steps is logged, and
never while they may be trained on again."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from llamarl.controller.dispatch import Dispatch
from llamarl.controller.gate import Gate
from llamarl.controller.rollouts import Rollouts
from llamarl.core.faces import RunObserver, Trainer
from llamarl.core.groups import Batch, Dropped, Group, StepStats, Verdict
from llamarl.core.records import Outcome, Purpose, Request, RolloutInfo, StageStatus
from llamarl.publish.publisher import Publisher, PublishStats
from llamarl.storage.archive import make_record


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Pure functions of metadata, with the recipe's config bound to them.

    `make_requests` takes a group, and `sampling` in place of the recipe's. `make_batch` takes
    groups, the trainer's version and the oldest version it may learn from; `make_record` takes a
    group, one of its row ids and its outcome.
    """

    make_requests: Callable[..., list[Request]]
    filter_group: Callable[[Group], Verdict]
    make_batch: Callable[[Sequence[Group], int, int], Batch]
    make_record: Callable[[Group, int, Outcome], dict[str, Any]] = make_record


@dataclass(kw_only=True)
class Engines:
    """Gives a loop its verbs over the executors. `version` is the trainer's, or the one that
    generators got from a source of the caller's own. Belongs to one event loop.

    A verb raises ExecutorLost or NoGenerator once an executor that it needs is lost.
    """

    rules: Rules
    gate: Gate
    dispatch: Dispatch
    rollouts: Rollouts
    trainer: Trainer | None
    publisher: Publisher | None
    observer: RunObserver
    version: int
    _trained: list[tuple[Sequence[Group], int]] = field(default_factory=list)
    """The groups that the step under way has accumulated, and the oldest version that it learns
    from."""
    _used: dict[int, tuple[Group, tuple[int, int, int]]] = field(default_factory=dict)
    """The groups that steps learnt from and that are not retired, by group id, with the version at
    the last use, the oldest version learnt from then, and the number of uses."""

    async def connect(self) -> None:
        """Connect the generators to the trainer; raises if a route does not fit."""
        assert self.publisher is not None
        await self.publisher.connect()

    async def close(self) -> None:
        """Stop all requests and publishes."""
        await self.dispatch.close()
        if self.publisher is not None:
            await self.publisher.close()

    async def serve(self) -> None:
        """Run the background work that the other verbs rely on; raises its first error."""
        await self.rollouts.serve()

    async def roll_out(self, group: Group) -> None:
        """Have the group written and scored, each rollout as soon as it is written."""
        await self.rollouts.roll_out(group, self.rules.make_requests(group))

    async def settle(self, group: Group) -> str | None:
        """Set the advantages of a scored group by the recipe's algorithm, and leave out the
        rollouts that its stages dropped. Returns None, or the reason to drop the whole group."""
        verdict = self.rules.filter_group(group)
        self.observer.log_group(group, verdict)
        if isinstance(verdict, Dropped):
            return verdict.reason
        for row_id, reason in group.dropped.items():
            await self._record([group], {"outcome": "dropped", "reason": reason}, {row_id})
        await self.rollouts.leave_out(group)
        group.advantages = verdict.advantages
        group.own_advantages = {**verdict.own_advantages}
        return None

    async def forward_backward(self, groups: Sequence[Group], oldest_version: int = 0) -> None:
        """Add the gradients of settled groups to the step under way. Tokens of a version below
        `oldest_version` get no weight."""
        assert self.trainer is not None
        await self.trainer.accumulate(self._make_batch(groups, oldest_version))
        self._trained.append((groups, oldest_version))

    async def look_ahead(self, groups: Sequence[Group]) -> None:
        """Store the trainer's present log-probs of settled groups; later steps of their batch take
        the ratio to them."""
        assert self.trainer is not None
        await self.trainer.store_proximal(self._make_batch(groups, 0))

    def _make_batch(self, groups: Sequence[Group], oldest_version: int) -> Batch:
        batch = self.rules.make_batch(groups, self.version, oldest_version)
        return replace(batch, first_version=self.gate.steps.first_of_batch(self.version))

    async def optim_step(
        self,
        keep: Sequence[Group] = (),
        found: Mapping[str, float] | None = None,
        made: Callable[[], None] = lambda: None,
    ) -> StepStats:
        """Make the next version from the gradients, log it with what else was `found`, and retire
        the groups that it was trained on. Not retired are the groups in `keep`, which a later step
        needs, those that a later pass uses, and those that the gate's sampler has not consumed.
        `made` is called as soon as the trainer may go on."""
        assert self.trainer is not None
        trained, self._trained = self._trained, []
        spared = {group.group_id for group in (*keep, *self.gate.kept)}
        stats = await self.trainer.step()  # publishes under way go on from a snapshot
        before, self.version = self.version, stats.version
        made()
        for groups, oldest in trained:
            for each in groups:
                num_uses = self._used[each.group_id][1][2] if each.group_id in self._used else 0
                self._used[each.group_id] = each, (before, oldest, num_uses + 1)
        all_groups = [group for groups, _ in trained for group in groups]
        oldest = min((oldest for _, oldest in trained), default=0)
        metrics = {**(found or {}), **self.gate.prompts.take_metrics()}
        await self.observer.log_step(stats, all_groups, oldest, metrics)
        used = dict.fromkeys(group.group_id for group in all_groups)
        await self.retire_used([each for each in used if each not in spared])
        return stats

    async def retire_used(self, group_ids: Sequence[int] | None = None) -> None:
        """Retire these groups, which steps learnt from. By default retire all of them, even those
        kept for later steps: none will follow."""
        alike: dict[tuple[int, int, int], list[Group]] = {}
        chosen = [*self._used] if group_ids is None else group_ids
        for group, use in [self._used.pop(group_id) for group_id in chosen]:
            alike.setdefault(use, []).append(group)
        for (version, oldest, num_uses), groups in alike.items():
            again = {"num_uses": num_uses} if num_uses > 1 else {}
            await self.retire(groups, "trained", version=version, oldest_version=oldest, **again)

    async def retire(
        self, groups: Sequence[Group], outcome: str, **details: str | int | float
    ) -> None:
        """Free the groups' arrays; the archive says what became of them."""
        for group in groups:
            self._used.pop(group.group_id, None)
        row_ids = [row_id for group in groups for row_id in group.row_ids]
        await self._record(groups, {"outcome": outcome, **details}, {*row_ids})
        await self.rollouts.retire(row_ids, {"outcome": outcome, **details})

    async def _record(self, groups: Sequence[Group], outcome: Outcome, row_ids: set[int]) -> None:
        """Store for the archive what the controller knows of those of these rollouts that can be
        read after the run."""
        recorded = [group for group in groups if group.prompt.is_recorded]
        records = {
            row.row_id: self.rules.make_record(group, row.row_id, outcome)
            for group in recorded
            for row_id in row_ids.intersection(group.rollouts)
            for row in group.rollouts[row_id].sequences
            if row.num_tokens or _has_failed(row)
        }
        if records:
            await self.rollouts.record(records)

    async def retire_rest(self) -> None:
        """Free everything that was never retired: groups that a step learnt from count as trained,
        even if later steps were to use them again, and the rest as unused."""
        await self.retire_used()
        await self.rollouts.retire(self.rollouts.rows(*Purpose), {"outcome": "unused"})

    async def abort(self) -> None:
        """Stop writing all rollouts that belong to no evaluation."""
        await self.rollouts.abort(self.rollouts.rows(Purpose.TRAIN, Purpose.CHECK))

    @property
    def published(self) -> int:
        """The version that generators got last, -1 before the first."""
        return -1 if self.publisher is None else self.publisher.version

    async def compare_logprobs(self, row_ids: list[int]) -> list[float]:
        """Return, for each row, the largest difference between the trainer's and the generator's
        log-probs over the tokens that the model wrote."""
        assert self.trainer is not None
        return await self.trainer.infer(row_ids)

    async def sync_weights(self, *, version: int | None = None) -> PublishStats:
        """Bring the trainer's version, or an earlier one that it still holds, to the generators:
        verified, while they decode."""
        assert self.publisher is not None
        is_first = self.published < 0
        stats = await self.publisher.publish(self.version if version is None else version)
        if not is_first:
            self.observer.log_publish(stats.seconds)
        return stats

    @contextmanager
    def hold(self, version: int, at_most: int | None) -> Iterator[None]:
        """Let replicas keep `version` while the block runs: `at_most` of them, or all with None."""
        if self.publisher is not None:
            with self.publisher.hold(version, at_most):
                yield
            return
        self.dispatch.hold(set(self.dispatch.replicas))
        try:
            yield
        finally:
            self.dispatch.hold(set())


def _has_failed(rollout: RolloutInfo) -> bool:
    """Return whether its episode has failed, perhaps before the model wrote anything."""
    return rollout.episode is not None and rollout.episode.status is not StageStatus.OK
