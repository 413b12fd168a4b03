"""Which step uses which groups, where several optimizer steps follow from one batch.

Owns: the arithmetic of steps, mini-batches and passes. Does not own: the groups, or the bound that
follows from their last use (`gate.py`). Invariant: pure, and the last use never falls from one
group to the next.

With two mini-batches a and b and two passes the steps of a batch use a b a b: the groups of a are
used up once the third step has made its version, those of b after the fourth.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatches:
    """Batches of `number` mini-batches, trained `num_passes` times; the first one begins with the
    step that `first_version` takes. `looks_ahead`: that step also takes the groups of the batch's
    others. Groups are numbered in the order in which they come into batches, from 0."""

    groups_per_step: int
    number: int = 1
    num_passes: int = 1
    looks_ahead: bool = False
    first_version: int = 0

    @property
    def groups_per_batch(self) -> int:
        """Groups of a batch."""
        return self.number * self.groups_per_step

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps from a batch."""
        return self.number * self.num_passes

    def first_of_batch(self, version: int) -> int:
        """The trainer's version before the first step of the batch that the step of `version`
        belongs to."""
        return version - (version - self.first_version) % self.steps_per_batch

    def first_group(self, version: int) -> int:
        """Where in its batch the mini-batch of this step begins."""
        step = version - self.first_of_batch(version)
        return step % self.number * self.groups_per_step

    def is_last_pass(self, version: int) -> bool:
        """Whether this step uses its mini-batch for the last time."""
        step = version - self.first_of_batch(version)
        return step >= self.steps_per_batch - self.number

    def num_used_up(self, version: int) -> int:
        """F: how many groups are used for the last time by the steps below `version`."""
        num_batches, step = divmod(version - self.first_version, self.steps_per_batch)
        in_last_pass = max(0, step - (self.steps_per_batch - self.number))
        return num_batches * self.groups_per_batch + in_last_pass * self.groups_per_step

    def num_used(self, first: int, version: int) -> int:
        """How many groups of the batch that began at version `first` are used by its steps below
        `version`, for the last time or not."""
        return min(version - first, self.number) * self.groups_per_step

    def last_use(self, group: int) -> int:
        """U: the version whose step uses group number `group` for the last time, so that
        F(U) <= group < F(U + 1)."""
        batch, place = divmod(group, self.groups_per_batch)
        step = self.steps_per_batch - self.number + place // self.groups_per_step
        return self.first_version + batch * self.steps_per_batch + step

    def num_steps(self, num_groups: int) -> int:
        """The steps that so many groups are enough for, from the beginning of a batch on."""
        num_batches, rest = divmod(num_groups, self.groups_per_batch)
        more = 0 if self.looks_ahead else rest // self.groups_per_step
        return num_batches * self.steps_per_batch + more

    def num_ahead(self, version: int) -> int:
        """Groups that this step takes for later ones."""
        is_first = self.first_of_batch(version) == version
        return self.groups_per_batch - self.groups_per_step if self.looks_ahead and is_first else 0

    def num_needed(self, version: int) -> int:
        """Groups that must be open for this step, with those of its batch that are not used up."""
        first, num = self.first_of_batch(version), self.groups_per_batch
        if version < first + self.number and not self.looks_ahead:
            num = self.first_group(version) + self.groups_per_step
        return num - (self.num_used_up(version) - self.num_used_up(first))
