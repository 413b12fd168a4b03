"""A process of the reward pool: `python -m llamarl.rewards.worker <pid of the pool>`.

Owns: the loop that answers requests, one line of JSON per completion, in order. Does not own: the
time limit (the pool's) or the weighted sum. Invariant: it never outlives its parent: it asks the
kernel to be killed with it, and ends when its input ends.

First line in: {"config": {...}, "task_source": str | null}; out: {} once it can work, else
{"error": str}. Then lines {"prompts": [{...}], "completions": [[index of prompt, text, finished],
...]}, each answered by one line {"parts": {function: float}} or {"status": str, "error": str} per
completion. What user code prints goes to standard error. SIGUSR1 writes the current stack there.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import math
import numbers
import os
import signal
import sys
import traceback
from typing import Any

from llamarl.config import RewardConfig
from llamarl.rewards.functions import Reward, load_functions
from llamarl.types import Prompt, ScoreStatus

PR_SET_PDEATHSIG = 1
MAX_TRACEBACK_CHARS = 8000


def main() -> None:
    """Serve until the input ends."""
    _die_with(int(sys.argv[1]))
    # User code must neither read requests nor write among the answers.
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    faulthandler.register(signal.SIGUSR1, all_threads=False)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value).encode() + b"\n")
        answers.flush()

    setup = json.loads(requests.readline())
    config = RewardConfig(**setup["config"])
    try:
        functions = load_functions(config, setup["task_source"])
    except BaseException as error:  # noqa: BLE001 - running the user's task.py
        answer({"error": _where(error)})
        os._exit(1)
    answer({})
    for line in requests:
        message = json.loads(line)
        prompts = [
            Prompt(**{**fields, "token_ids": tuple(fields["token_ids"])})
            for fields in message["prompts"]
        ]
        for index, completion, finished in message["completions"]:
            answer(judge(functions, prompts[index], completion, finished, config))
        sys.stdout.flush()
    os._exit(0)  # whatever threads user code has left running


def judge(
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


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call above
            os._exit(1)


def _traceback(error: BaseException) -> str:
    own = error.__traceback__.tb_next if error.__traceback__ is not None else None
    text = "".join(traceback.format_exception(type(error), error, own))
    return text if len(text) <= MAX_TRACEBACK_CHARS else "..." + text[-MAX_TRACEBACK_CHARS:]


def _where(error: BaseException) -> str:
    """The error on one line, with the line of task.py it came from."""
    text = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == "task.py"]
    return f"{text} (task.py, line {lines[-1]})" if lines else text


if __name__ == "__main__":
    main()
