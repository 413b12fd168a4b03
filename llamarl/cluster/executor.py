"""A cluster and an executor of it, as code outside `cluster/` sees them.

Owns: the protocols that every backend satisfies, calls by attribute access, how processes are
named, and how late a loss is noticed. Does not own: processes. Invariant: code above `cluster/`
needs nothing but these.
"""

import pkgutil
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from llamarl.config.rank_assignment import Device

LOSS_GRACE_S = 2.0  # for a loss to be noticed after the errors that it causes

Factory = type | str
"""An executor class, or "module:Class": the caller then need not load what the module imports."""

Call = tuple[str, tuple[Any, ...], dict[str, Any]]
"""(method, args, kwargs)"""


def resolve(factory: Factory) -> type:
    """The class that a factory names."""
    found: type = pkgutil.resolve_name(factory) if isinstance(factory, str) else factory
    return found


@runtime_checkable
class MergeableResult(Protocol):
    """A result that ranks merge on its way to the caller, who gets one for all ranks."""

    def merge(self, other: Any) -> None:
        """Add another rank's result."""


class SplitArgument(Protocol):
    """An argument of a call to all ranks of which each gets a part of its own, and no other."""

    def for_rank(self, rank: int) -> Any:
        """What this rank is called with."""

    def for_ranks(self, ranks: range) -> Any:
        """An argument for these ranks alone, on its way to them."""


class Calls:
    """Turns attribute access into calls on all ranks; `is_first`: returns rank 0's result only."""

    def __init__(self, run: Callable[[Call], Awaitable[list[Any]]], is_first: bool) -> None:
        self._run = run
        self._is_first = is_first

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)

        async def call(*args: Any, **kwargs: Any) -> Any:
            results = await self._run((method, args, kwargs))
            return results[0] if self._is_first else results

        return call


class Executor(Protocol):
    """The ranks of one executor.

    `call_one` and `call_all` have the methods of the executor and of its `components` (objects that
    it consists of). Calling one runs it on all ranks at once; `await executor.call_one.method(...)`
    returns rank 0's result, `await executor.call_all.method(...)` the list by rank (of a
    MergeableResult one for all). Both can be passed to other executors in `spawn`'s spec or in any
    call; those then call peer to peer. Calls run concurrently; cancelling one does not cancel the
    remote work.

    An exception of any rank is raised here as soon as it arrives: with its own type where that
    survives pickling, else as RemoteError; a note holds the remote traceback. A lost process
    raises ExecutorLost in every pending and later call.
    """

    name: str
    call_one: Any
    call_all: Any
    writer: str
    """How what the processes write into storage is signed; set by what starts them."""

    async def watch(self) -> None:
        """Wait until it is lost and raise ExecutorLost; return once it was stopped."""

    async def stop(self) -> None:
        """Close the executors and end their processes; never raises, may be repeated."""


class Cluster(Protocol):
    """All executor processes of one run."""

    async def spawn(
        self,
        name: str,
        factory: Factory,
        spec: Any,
        num_ranks: int = 1,
        devices: Sequence[Device] | None = None,
    ) -> Executor:
        """Start `num_ranks` processes; construct `factory(spec, rank=, num_ranks=, spans=)`.

        Rank i sits on `devices[i]`; without devices all are on the first host and have no GPU. The
        first spawn attaches the hosts and checks them: ValueError for what is wrong with one.

        `spans` records under `process_name(name, rank, num_ranks)`. Run several spawns with
        `asyncio.gather`: they overlap. ValueError if `name` was used before; also raises what a
        constructor raises.
        """

    async def add_host(self, address: str) -> int:
        """Attach the host of one more worker daemon, which the run did not have when it began; its
        index in `Device`. ValueError for what is wrong with it."""

    async def stop(self) -> None:
        """Stop all executors at once; afterwards none of their processes, nor any process that
        those started, is alive. Never hangs, never raises, may be repeated."""


def process_name(name: str, rank: int, num_ranks: int) -> str:
    """`trainer-1` for rank 1 of `trainer`; a single rank of `generator-0` is `generator-0`."""
    return name if num_ranks == 1 and name[-1:].isdigit() else f"{name}-{rank}"
