"""The interface of a cluster and its executors for code outside `cluster/`, and the results of
calls."""

from __future__ import annotations

import pickle
import pkgutil
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Protocol, TypeVar, cast, runtime_checkable

from llamarl.core.config.rank_assignment import Device
from llamarl.core.errors import RemoteError, UserCodeError
from llamarl.core.faces import AllRanks, P, PerRank, T, Worker

Face = TypeVar("Face")


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of a call on one rank. `error` is the pickled exception, if there was one."""

    rank: int
    value: Any = None
    error: bytes | None = None

    def result(self) -> Any:
        """Return the value, or raise the exception."""
        if self.error is None:
            return self.value
        raise pickle.loads(self.error)


def merged(results: list[CallResult]) -> list[CallResult]:
    """Return the results of several ranks; mergeable ones as a single result of the first rank."""
    first = results[0] if results else None
    if first is None or not isinstance(first.value, MergeableResult):
        return results
    for result in results[1:]:
        first.value.merge(result.value)
    return [first]


def narrowed(call: Call, ranks: range) -> Call:
    """Return the call as it is passed on to these ranks, with only their parts of split
    arguments."""
    method, args, kwargs = call
    parts = (each.for_ranks(ranks) if isinstance(each, PerRank) else each for each in args)
    return method, tuple(parts), kwargs


def parts_for(rank: int, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with which one rank is called."""
    return tuple(each.for_rank(rank) if isinstance(each, PerRank) else each for each in args)


async def attempt(worker: object, where: str, rank: int, call: Call) -> CallResult:
    """Run `call` on `worker`, with its part of split arguments; `where` names the process in
    notes."""
    method, args, kwargs = call
    try:
        own_args = parts_for(rank, args)
        return CallResult(rank, await getattr(worker, method)(*own_args, **kwargs))
    except BaseException as error:  # noqa: BLE001 - sent to the caller, whatever it is
        return failure(error, where, rank)


def failure(error: BaseException, where: str, rank: int) -> CallResult:
    """Return the result of a call that raised `error`, with its traceback as a note."""
    error.add_note(f"raised in {where}:\n{_traceback(error)}")
    try:
        data = pickle.dumps(error)
        copy = pickle.loads(data)
        travels = type(copy) is type(error) and str(copy) == str(error)
    except Exception:  # noqa: BLE001 - user exceptions fail to pickle in any way they like
        travels = False
    # StopIteration and exits would be changed or acted on by the caller's event loop.
    is_signal = isinstance(error, (StopIteration, StopAsyncIteration))
    if not travels or is_signal or not isinstance(error, Exception):
        remote = RemoteError(describe(error))
        for note in error.__notes__:
            remote.add_note(note)
        data = pickle.dumps(remote)
    return CallResult(rank, error=data)


def describe(error: BaseException) -> str:
    """Return the type and text of an error, whatever its `__str__` does."""
    return f"{type(error).__name__}: {_text(error)}".removesuffix(": ")


def _traceback(error: BaseException) -> str:
    if isinstance(error, UserCodeError):
        return _text(error)
    report = traceback.TracebackException.from_exception(error)
    report.__notes__ = None  # they travel separately
    return "".join(report.format()).rstrip()


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a user's __str__ may do anything
        return "(its text cannot be shown)"


LOSS_GRACE_S = 2.0  # for a loss to be noticed after the errors that it causes

Factory = type[Worker] | str
"""A worker's class, or "module:Class": the caller then need not load what the module imports."""

Call = tuple[str, tuple[Any, ...], dict[str, Any]]
"""The method's name, args and kwargs."""


def resolve(factory: Factory) -> Callable[..., Worker]:
    """Return the class that a factory names."""
    found: Callable[..., Worker] = (
        pkgutil.resolve_name(factory) if isinstance(factory, str) else factory
    )
    return found


@runtime_checkable
class MergeableResult(Protocol):
    """A result that ranks merge on its way to the caller, who gets one for all ranks."""

    def merge(self, other: Any) -> None:
        """Add another rank's result."""


Run = Callable[[Call, bool], Awaitable[list[Any]]]
"""Runs a call on all ranks; returns their results, or with True rank 0's alone."""


class Handle:
    """The methods of `face`, each of which is called on all ranks and returns rank 0's result."""

    def __init__(self, run: Run, face: type) -> None:
        self._run, self._face = run, face

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method.startswith("_"):  # asked by pickle, before there is a face
            raise AttributeError(method)
        if not hasattr(self._face, method):
            raise AttributeError(f"{self._face.__name__} has no method {method!r}")

        async def call(*args: Any, **kwargs: Any) -> Any:
            return (await self._run((method, args, kwargs), True))[0]

        return call


class RankCalls:
    """Gives an executor's methods by face and by rank, over `_run`."""

    _run: Run

    def one(self, face: type[Face]) -> Face:
        """Return the executor as the `face` that its workers have."""
        return cast(Face, Handle(self._run, face))

    async def all(
        self,
        method: Callable[Concatenate[Any, P], Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]:
        """Call this method of a face on all ranks at once; return the results, by rank."""
        return await self._run((method.__name__, args, kwargs), False)


class Executor(AllRanks, Protocol):
    """The ranks of one executor.

    `one` gives their methods of a face (`core/faces.py`); calling one runs it on all ranks at once
    and returns rank 0's result. It can be passed to other executors in `spawn`'s spec or in any
    call; those then call peer to peer. `all(Face.method, ...)` returns the results by rank
    (MergeableResults as one for all). Calls run concurrently; cancelling one does not cancel the
    remote work.

    An exception of any rank is raised here as soon as it arrives: with its own type where that
    survives pickling, else as RemoteError; a note holds the remote traceback. A lost process raises
    ExecutorLost in every pending and later call.
    """

    name: str
    writer: str
    """The name that signs what the processes write into storage; set by the code that starts
    them."""

    def one(self, face: type[Face]) -> Face:
        """Return the executor as the `face` that its workers have."""

    async def watch(self) -> None:
        """Wait until the executor is lost and raise ExecutorLost; return once it was stopped."""

    async def stop(self) -> None:
        """Close the executors and end their processes; never raises, may be repeated."""


class Cluster(Protocol):
    """The executor processes of one run."""

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
        first spawn attaches the hosts and checks them: ValueError says what is wrong with one.

        `spans` records under `process_name(name, rank, num_ranks)`. Run several spawns with
        `asyncio.gather`: they overlap. ValueError if `name` was used before; also raises what a
        constructor raises.
        """

    async def add_host(self, address: str) -> int:
        """Attach the host of one more worker daemon, which the run did not have when it began;
        return its index in `Device`. ValueError says what is wrong with it."""

    async def stop(self) -> None:
        """Stop all executors at once; afterwards none of their processes, nor any process that
        those started, is alive. Never hangs, never raises, may be repeated."""


def process_name(name: str, rank: int, num_ranks: int) -> str:
    """Return `trainer-1` for rank 1 of `trainer`; for a single rank of `generator-0`,
    `generator-0`."""
    return name if num_ranks == 1 and name[-1:].isdigit() else f"{name}-{rank}"
