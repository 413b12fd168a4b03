"""A process that runs user code: `python -m llamarl.scoring.user_code.worker PID LABEL`, where PID
is the process id of its pool.

The first line in is {"token": str, "service": str, "setup": {...}, "timeout_s": float}; it is
answered by {"token", "pid", "coroutines": bool} when the worker is ready, else by {"token",
"error": str}. A service is a module whose `load(setup)` returns the function that is served; if it
raises, that is the error. Then follow lines {"prompts": [{...}], "calls": [[index of prompt or
null, arguments, token, most bytes of its answer], ...]}. Each call is answered by one line: the
token, and the dictionary that the function returns for the prompt and the arguments; or a failure,
if that is no JSON or has too many bytes. Half of a surrogate pair becomes U+FFFD. Calls of a
function are answered in order, those of a coroutine as they end; lines {"token", "alive": true}
between say that none of them holds up the others. User code prints to standard error. SIGUSR1
writes the current stack there.

Answers are protected from accidents: standard input and output are not the channel, programs that
user code starts do not inherit the channel, and if something is written into it without the token
of a present call, the pool detects that and replaces the worker. They are not protected from
intent: user code shares this process's memory, so it can read tokens or replace functions, just as
it may return any value. So task.py is trusted. Code that a model wrote is not: task.py must run it
in a program of its own (subprocess), never by exec or eval. A worker never outlives its pool."""

import asyncio
import faulthandler
import fcntl
import importlib
import inspect
import json
import os
import resource
import secrets
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from io import BufferedReader
from typing import Any

from llamarl.core.extensions import where
from llamarl.core.files import whole_letters
from llamarl.core.records import Prompt, StageStatus, read_json
from llamarl.scoring.user_code.watchdog import IT_WAS_AT, TICK_S, RunningCall, Watchdog, supervise

# First number and count of descriptors that a loop that closes low ones does not reach.
CHANNEL_DESCRIPTORS = (100, 200)
MAX_ANSWER_BYTES = 1_000_000  # where the caller expects no more
CANCEL_S = 1.0  # for a coroutine to end once it is cancelled

Answer = Callable[[str, int, dict[str, Any]], None]
"""A function that answers the call of this token, in at most so many bytes, with this
dictionary."""


def main() -> None:
    """Serve until the input ends, then exit at once, even if user code has left threads running."""
    supervise(int(sys.argv[1]))
    try:
        _serve()
    except BaseException:  # noqa: BLE001 - user code may have closed the channel, or patched json
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _serve() -> None:
    own_pid = os.getpid()
    requests = os.fdopen(_move(0, os.O_RDONLY), "rb")
    answers = os.fdopen(_move(1, os.O_WRONLY), "wb")
    os.dup2(2, 1)
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    to_json = json.JSONEncoder(ensure_ascii=False).encode

    def encode(value: dict[str, Any]) -> bytes:
        return whole_letters(to_json(value)).encode()

    def answer(token: str, max_bytes: int, value: dict[str, Any]) -> None:
        if os.getpid() != own_pid:  # user code has forked and returned twice
            os._exit(0)
        try:
            line = encode({"token": token, **value})
            why = f"take at most {max_bytes} bytes as JSON, got {len(line)}"
        except BaseException as error:  # noqa: BLE001 - user code may return anything
            line, why = b"", f"be JSON, got {type(error).__name__}: {error}"
        if not 0 < len(line) <= max_bytes:
            failure = {"status": StageStatus.INVALID, "error": f"what it returns must {why}"}
            line = encode({"token": token, **failure})
        answers.write(line + b"\n")
        answers.flush()

    first = json.loads(requests.readline())
    try:
        serve = importlib.import_module(first["service"]).load(first["setup"])
    except BaseException as error:  # noqa: BLE001 - running the user's task.py
        answer(first["token"], MAX_ANSWER_BYTES, {"error": where(error)})
        os._exit(1)
    is_coroutine = inspect.iscoroutinefunction(serve)
    answer(first["token"], MAX_ANSWER_BYTES, {"pid": own_pid, "coroutines": is_coroutine})
    if is_coroutine:
        _run(_serve_coroutines(serve, requests, answer, first["timeout_s"]))
        return
    for line in requests:
        for token, prompt, arguments, max_bytes in _calls(line):
            answer(token, max_bytes, serve(prompt, *arguments))
        sys.stdout.flush()


def _run(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end. SystemExit, KeyboardInterrupt, and the RuntimeError of a `stop`,
    from a task or callback of user code, leave the event loop; they concern that task alone, so the
    loop goes on."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    serving = loop.create_task(main)
    while not (serving.done() or loop.is_closed()):
        with suppress(SystemExit, KeyboardInterrupt, RuntimeError):
            loop.run_until_complete(serving)
    serving.result()


def _calls(line: bytes) -> Iterator[tuple[str, Prompt | None, list[Any], int]]:
    message = json.loads(line)
    prompts = [read_json(Prompt, values) for values in message["prompts"]]
    for place, arguments, token, max_bytes in message["calls"]:
        yield token, None if place is None else prompts[place], arguments, max_bytes


async def _serve_coroutines(
    serve: Callable[..., Coroutine[Any, Any, dict[str, Any]]],
    requests: BufferedReader,
    answer: Answer,
    timeout_s: float,
) -> None:
    """Run each call as soon as it arrives, beside the others."""
    lines = asyncio.StreamReader(limit=sys.maxsize)
    protocol = asyncio.StreamReaderProtocol(lines)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, requests)
    running: dict[str, RunningCall] = {}

    def sign() -> None:
        if token := next(iter(running), None):
            answer(token, MAX_ANSWER_BYTES, {"alive": True})

    watchdog = Watchdog(timeout_s, sign)
    watchdog.start()

    async def tell(call: RunningCall, max_bytes: int) -> None:
        """Answer a call. If its task goes on after being cancelled, the process exits."""
        found = await _outcome(call, watchdog, timeout_s)
        del running[call.token]
        answer(call.token, max_bytes, found)
        sys.stdout.flush()
        if not call.task.done():
            os._exit(1)

    async with asyncio.TaskGroup() as waiting:
        while line := await lines.readline():
            for token, prompt, arguments, max_bytes in _calls(line):
                call = running[token] = watchdog.call(token, serve(prompt, *arguments))
                waiting.create_task(tell(call, max_bytes))
        os._exit(0)  # whatever still runs


async def _outcome(call: RunningCall, watchdog: Watchdog, timeout_s: float) -> dict[str, Any]:
    """Return the result of a call. It is cancelled when its time is over, to which the time is
    added for which others have held it up; the error then says where it was."""
    left_s, late_s = timeout_s, watchdog.late_s
    while not call.task.done() and left_s >= TICK_S:
        await asyncio.wait({call.task}, timeout=left_s)
        left_s, late_s = watchdog.late_s - late_s, watchdog.late_s
    if call.task.done() and not (call.stack or call.task.cancelled()):
        return call.task.result()
    call.task.cancel()
    await asyncio.wait({call.task}, timeout=CANCEL_S)
    stack = call.stack
    if not call.task.done():
        stack = stack or "(it went on when cancelled)"
    elif not (stack or call.task.cancelled()):
        stack = call.task.result().get("error", "").rpartition(IT_WAS_AT)[2]
    elif not call.task.cancelled():
        call.task.exception()  # it has been seen
    return {"status": StageStatus.HUNG, "error": stack}


def _move(descriptor: int, mode: int) -> int:
    """Move one of the channel's two pipes to another descriptor; its own becomes /dev/null."""
    first, count = CHANNEL_DESCRIPTORS
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    first = min(first, most // 2)
    low = first + secrets.randbelow(min(count, most - first - 1))
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, low)
    nothing = os.open(os.devnull, mode)
    os.dup2(nothing, descriptor)
    os.close(nothing)
    return moved


if __name__ == "__main__":
    main()
