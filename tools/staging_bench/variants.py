"""`llamarl` with a publish of another form, for comparison: no setting has these.

    python tools/staging_bench/variants.py VARIANT[,VARIANT] train --config-dir=RECIPE ...

blocking: a replica decodes nothing from before it prepares a version until it has committed it.

together: the replicas commit when the last one has verified. As it is built, a replica commits once
its own version is verified and the one before it has committed, and then feeds the next one. Here
none may wait for a sibling's commit, so the trainer feeds every replica itself; and none may be
lost, because the others would wait for it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from llamarl.main import main
from llamarl.weights.layout.kinds import assign_sources
from llamarl.weights.sync import publisher, replicas
from llamarl.weights.sync.replica_sync import ReplicaSync
from llamarl.weights.sync.sync_calls import Stagger
from llamarl.weights.transports import routes

NUM_REPLICAS = 2


class Blocking(ReplicaSync):
    """A replica that stands still while it takes a version. Nothing of the KV cache moves: without
    colocation an offload only stops decoding."""

    async def update(self, version: int) -> int:
        """See `ReplicaSync.update`."""
        await self._generator.offload(["kv"])
        try:
            return await super().update(version)
        finally:
            await self._generator.onload(["kv"])


class Together(Stagger):
    """Lets the tasks of all replicas into their blocks at once, when the last one has come."""

    def __init__(self, limit_s: float, num_replicas: int = NUM_REPLICAS) -> None:
        super().__init__(limit_s)
        self._all_verified = asyncio.Barrier(num_replicas)

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Other tasks come in at the same time."""
        await self._all_verified.wait()
        yield


def install(variants: set[str]) -> None:
    """Put the named ones in the place of what is built."""
    # Else these names are no longer looked up where they are replaced, and nothing would change.
    assert replicas.ReplicaSync is ReplicaSync
    assert publisher.Stagger is Stagger
    assert routes.assign_sources is assign_sources
    if "blocking" in variants:
        replicas.ReplicaSync = Blocking
    if "together" in variants:
        publisher.Stagger = Together
        # None, the trainer, feeds each.
        routes.assign_sources = lambda layouts, far_sites, kind_of: dict.fromkeys(layouts)


if __name__ == "__main__":
    install(set(sys.argv.pop(1).split(",")))
    main()
