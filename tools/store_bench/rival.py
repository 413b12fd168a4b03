"""TransferQueue (`transferqueue.py`) in the environment of `make rivals`, asked over pipes."""

from __future__ import annotations

import dataclasses
import json
import subprocess

from rivals import PYTHON, environment

from store_bench.rows import Work

END_S = 60.0


class TransferQueueRival:
    """TransferQueue with `num_units` storage units and as many consumers as any work has."""

    def __init__(self, num_units: int, num_consumers: int) -> None:
        module = "store_bench.transferqueue"
        self._child = subprocess.Popen(
            [str(PYTHON), "-m", module, str(num_units), str(num_consumers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        self._read()

    def run(self, work: Work, is_checked: bool = False) -> float:
        """Move all rows once; seconds (`rows.flow_s`)."""
        assert self._child.stdin is not None
        request = {"work": dataclasses.asdict(work), "is_checked": is_checked}
        self._child.stdin.write(json.dumps(request) + "\n")
        self._child.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the child and all that it started."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(END_S)
        except subprocess.TimeoutExpired:
            self._child.kill()

    def _read(self) -> float:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError("TransferQueue has ended; what it said is above")
        return float(json.loads(line))
