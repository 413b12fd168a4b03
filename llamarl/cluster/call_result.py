"""How a call ends: with a value, or with an exception that travels.

Owns: running an executor's method, and its result as data. Does not own: transport. Invariant:
`attempt` never raises what the executor raised; it returns a CallResult that survives pickling,
because an exception that does not would kill the process that sends it.
"""

import pickle
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

from llamarl.cluster.executor import Call, MergeableResult, SplitArgument
from llamarl.errors import RemoteError, UserCodeError


@dataclass(frozen=True, slots=True)
class CallResult:
    """What one rank returned. `error` is the pickled exception, if there was one."""

    rank: int
    value: Any = None
    error: bytes | None = None

    def result(self) -> Any:
        """The value, or raise the exception."""
        if self.error is None:
            return self.value
        raise pickle.loads(self.error)


def merged(results: list[CallResult]) -> list[CallResult]:
    """The results of several ranks; mergeable ones as a single result of the first rank."""
    first = results[0] if results else None
    if first is None or not isinstance(first.value, MergeableResult):
        return results
    for result in results[1:]:
        first.value.merge(result.value)
    return [first]


def endpoint(executor: object, method: str) -> Callable[..., Awaitable[Any]]:
    """The executor's own method of this name, or that of the first of its `components` with one."""
    if not hasattr(executor, method):
        owners = [each for each in getattr(executor, "components", ()) if hasattr(each, method)]
        executor = owners[0] if owners else executor
    found: Callable[..., Awaitable[Any]] = getattr(executor, method)
    return found


def narrowed(call: Call, ranks: range) -> Call:
    """The call as it is passed on to these ranks: of split arguments only their parts."""
    method, args, kwargs = call
    parts = (each.for_ranks(ranks) if _is_split(each) else each for each in args)
    return method, tuple(parts), kwargs


def parts_for(rank: int, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with which one rank is called."""
    return tuple(each.for_rank(rank) if _is_split(each) else each for each in args)


def _is_split(argument: object) -> TypeGuard[SplitArgument]:
    """By its class: another executor's calls have every attribute that they are asked for."""
    return hasattr(type(argument), "for_ranks")


async def attempt(executor: object, where: str, rank: int, call: Call) -> CallResult:
    """Run `call` on `executor`, with its part of split arguments; `where` names the process in
    notes."""
    method, args, kwargs = call
    try:
        own_args = parts_for(rank, args)
        return CallResult(rank, await endpoint(executor, method)(*own_args, **kwargs))
    except BaseException as error:  # noqa: BLE001 - sent to the caller, whatever it is
        return failure(error, where, rank)


def failure(error: BaseException, where: str, rank: int) -> CallResult:
    """The result of a call that raised `error`, with its traceback as a note."""
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
    """Its type and text, whatever its `__str__` does."""
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
