"""A process of the reward pool: `python -m llamarl.environments.rewards.worker <pid of the pool>`.

Owns: the loop that answers requests, one line of JSON per completion, in order. Does not own: the
time limit (the pool's), the weighted sum, or the end of what user code starts (`supervisor.py`).
Invariant: it never outlives its pool; every answer repeats the token of what it answers.

First line in: {"token": str, "config": {...}, "task_source": str | null}; out: {"token", "pid"}
when it is ready, else {"token", "error": str}. Then lines {"prompts": [{...}], "completions":
[[index of prompt, text, finished, token], ...]}, each answered by one line {"token", "parts":
{function: float}} or {"token", "status": str, "error": str} per completion. What user code prints
goes to standard error. SIGUSR1 writes the current stack there.

Answers are protected from accidents: standard input and output are not the channel, programs that
user code starts do not inherit the channel, and if something is written into it without the token
of the present completion, the pool detects that and replaces the worker. They are not protected
from intent: user code shares this process's memory, so it can read tokens or replace functions,
just as it may return any reward. So task.py is trusted. Code that a model wrote is not: task.py
must run it in a program of its own (subprocess), never by exec or eval.
"""

import faulthandler
import fcntl
import json
import math
import numbers
import os
import secrets
import signal
import sys
import traceback
from typing import Any

from llamarl import task_file
from llamarl.config import RewardConfig
from llamarl.environments.rewards import functions as rewards
from llamarl.environments.rewards.functions import Reward, load_functions
from llamarl.environments.rewards.supervisor import supervise
from llamarl.task_file import where
from llamarl.types import Prompt, ScoreStatus

MAX_TRACEBACK_CHARS = 8000
OWN_FILES = {__file__, rewards.__file__, task_file.__file__}  # left out of tracebacks
# First number and count, above what a loop that closes low descriptors reaches.
CHANNEL_DESCRIPTORS = (100, 200)


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
    encode = json.JSONEncoder().encode

    def answer(token: str, value: dict[str, Any]) -> None:
        if os.getpid() != own_pid:  # user code has forked and returned twice
            os._exit(0)
        answers.write(encode({"token": token, **value}).encode() + b"\n")
        answers.flush()

    setup = json.loads(requests.readline())
    config = RewardConfig(**setup["config"])
    try:
        functions = load_functions(config, setup["task_source"])
    except BaseException as error:  # noqa: BLE001 - running the user's task.py
        answer(setup["token"], {"error": where(error)})
        os._exit(1)
    answer(setup["token"], {"pid": own_pid})
    for line in requests:
        message = json.loads(line)
        prompts = [
            Prompt(**{**fields, "token_ids": tuple(fields["token_ids"])})
            for fields in message["prompts"]
        ]
        for index, completion, finished, token in message["completions"]:
            answer(token, grade(functions, prompts[index], completion, finished, config))
        sys.stdout.flush()


def _move(descriptor: int, mode: int) -> int:
    """Move one of the channel's two pipes to another descriptor; its own becomes /dev/null."""
    first, count = CHANNEL_DESCRIPTORS
    low = first + secrets.randbelow(count)
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, low)
    nothing = os.open(os.devnull, mode)
    os.dup2(nothing, descriptor)
    os.close(nothing)
    return moved


def grade(
    functions: dict[str, Reward],
    prompt: Prompt,
    completion: str,
    finished: bool,
    config: RewardConfig,
) -> dict[str, Any]:
    """Run every function on one completion; the first failure is the whole answer."""
    parts = {}
    for name, function in functions.items():
        try:
            value = function(prompt, completion, finished, config)
            number = float(value) if isinstance(value, numbers.Real) else math.nan
            shown = repr(value)[:200]
        except BaseException as error:  # noqa: BLE001 - user reward code may raise anything
            return {"status": ScoreStatus.RAISED, "error": f"{name}: {_traceback(error)}"}
        if not math.isfinite(number):
            return {
                "status": ScoreStatus.INVALID,
                "error": f"{name}: a reward must be a finite number, got {shown}",
            }
        parts[name] = number
    return {"parts": parts}


def _traceback(error: BaseException) -> str:
    """The error with the frames of user code, and of libraries that it calls."""
    report = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = report
    while part is not None:
        frames = [frame for frame in part.stack if frame.filename not in OWN_FILES]
        part.stack = traceback.StackSummary.from_list(frames)
        part = part.__cause__ or part.__context__
    lines = report.format() if report.stack else report.format_exception_only()
    text = "".join(lines).rstrip()
    return text if len(text) <= MAX_TRACEBACK_CHARS else "..." + text[-MAX_TRACEBACK_CHARS:]


if __name__ == "__main__":
    main()
