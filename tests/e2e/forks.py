"""`llamarl` commands and tools as processes of their own, forked off one that has done the imports.

Those take most of the time of a short run; one such process serves all tests of a session (the
fixture `forks`). What a command does is the same: the arguments go to
`main`, output to pipes of its own, and the exit code comes back.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import get_args

from llamarl.controller.starter import Spec

LIMIT_S = 300
IMPORTS = ("llamarl.cli.main", "torch._dynamo", "transformers")


class Forks:
    """Starts the process that commands are forked off; `close` ends it and what is left of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server = self._start()

    def _start(self) -> subprocess.Popen[str]:
        # Output that goes to a file has the default width, whatever the terminal of the tests.
        environment = {name: text for name, text in os.environ.items() if name != "COLUMNS"}
        return subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.forks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**environment, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
        )

    def run(self, *arguments: str, where: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run `llamarl` with these arguments, in the folder `where` or here, to its end; or the
        first argument, if that is the path of a program, with the others."""
        if self._server.poll() is not None:  # a command before took too long
            self._server = self._start()
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        out, err = self._folder / "out", self._folder / "err"
        watch = threading.Timer(LIMIT_S, self.close)
        watch.start()
        try:
            self._server.stdin.write(
                json.dumps([str(where or "."), str(out), str(err), arguments]) + "\n"
            )
            self._server.stdin.flush()
            answer = self._server.stdout.readline()
        finally:
            watch.cancel()
        assert answer, f"llamarl {' '.join(arguments)}: not done after {LIMIT_S} s"
        code = int(answer)
        return subprocess.CompletedProcess(arguments, code, out.read_text(), err.read_text())

    def close(self) -> None:
        """Kill the process and all that it started."""
        if self._server.poll() is None:
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()


def serve() -> list[str]:
    """Fork once per line of stdin. In the fork, returns the arguments; else never."""
    for name in (*IMPORTS, *(spec.executor.split(":")[0] for spec in get_args(Spec))):
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"
    gc.freeze()
    for line in sys.stdin:
        where, out, err, arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.chdir(where)
            for fd, path in ((0, os.devnull), (1, out), (2, err)):
                os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), fd)
            return list(arguments)
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()
    os._exit(0)


def command(arguments: list[str]) -> int:
    """What `llamarl` with these arguments exits with; or the program that the first one names."""
    from hydra._internal.hydra import Hydra

    from llamarl.cli.main import main

    Hydra.get_mode = lambda *_, **__: None  # tests/conftest.py says why
    sys.argv = ["llamarl", *arguments]
    try:
        if arguments[0].endswith(".py"):
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).parent))
            runpy.run_path(arguments[0], run_name="__main__")
            return 0
        main()
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
            return 1
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    code = command(serve())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # an orderly end would touch, and so copy, every page of the imports: a second
