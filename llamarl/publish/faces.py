"""What a publish asks of its two ends, seen from the side of the caller: one entry per rank in
every answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from llamarl.publish.layout import RankLayout, StagingHandle
    from llamarl.publish.reshard import SplitRoute


class WeightSource(Protocol):
    """The source of a publish; every method returns one result per rank."""

    async def source_layout(self) -> list[RankLayout]:
        """Where each rank keeps its boxes of the parameters."""

    async def connect_target(self, replica: int, route: SplitRoute | None) -> list[None]:
        """Keep the route to `replica`: each rank its own part. None forgets the replica and unmaps
        its memory."""

    async def write(self, version: int, handles: list[StagingHandle]) -> list[dict[str, int]]:
        """Write `version` into the staging memory of one replica (a handle per rank).

        Returns the fingerprints of what was written, by parameter, for all the replica's ranks
        together: an element that several of them hold counts once for each. StaleVersion if
        `version` can no longer be read, TargetLost if the replica cannot be reached.
        """


class WeightTarget(Protocol):
    """A generator replica's side of a publish; every method returns one result per rank."""

    async def target_layout(self) -> list[RankLayout]:
        """Where each rank wants its boxes of the parameters."""

    async def connect_source(self, route: SplitRoute) -> list[None]:
        """Keep the route that leads here, each rank its own part; it replaces the one before."""

    async def prepare(self, version: int) -> list[StagingHandle]:
        """Open the staging memory for `version` and say where it is."""

    async def verify(self, version: int) -> list[dict[str, int]]:
        """Fingerprints of the parameters in the staging memory: all that the rank holds.

        Waits until what the source wrote has arrived.
        """

    async def commit(self, version: int) -> list[int]:
        """Make it active between two decode steps; returns the number of running rollouts."""

    async def abort(self, version: int) -> list[None]:
        """Forget what was prepared; the active weights stay."""
