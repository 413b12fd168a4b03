"""The entry point of an executor process: `python -m llamarl.cluster.bootstrap` ends with the
process that started it, from its first moment. Monarch sees to that only once it runs."""

import ctypes
import os
import runpy
import signal
import sys

PARENT = "LLAMARL_PARENT"  # environment variable: pid of the controller, if it starts the process
PR_SET_PDEATHSIG = 1


def tie_to_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = os.environ.get(PARENT)
    if parent is not None and os.getppid() != int(parent):  # it ended before the call above
        os._exit(1)


if __name__ == "__main__":
    tie_to_parent()
    runpy.run_module("monarch._src.actor.bootstrap_main", run_name="__main__")
