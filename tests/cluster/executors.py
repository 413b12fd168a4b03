"""Executors for tests of the cluster: each method provokes one thing."""

from __future__ import annotations

import asyncio
import atexit
import errno
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from llamarl.core.faces import Worker


class UnpicklableError(Exception):
    """Cannot be rebuilt from its `args`."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} ({code})")
        self.lock = threading.Lock()


class ChangedError(Exception):
    """Arrives as something else."""

    def __reduce__(self):
        return ValueError, ("something else",)


class Unreadable:
    """Pickles, and fails where it is read again."""

    def __reduce__(self):
        return int, ("not a number",)


class Probe(Worker):
    """Reports where it runs, and fails on request."""

    def __init__(self, spec, *, rank, num_ranks, spans) -> None:
        if spec.get("fails"):
            raise ValueError("trainer.lr must be at least 0, got -1")
        self.rank = rank
        self.num_ranks = num_ranks
        self.spans = spans
        self.peer = spec.get("peer")
        self.folder = spec.get("folder")
        self.meeting = asyncio.Event()

    async def place(self) -> tuple[int, int, str, int]:
        return self.rank, self.num_ranks, self.spans.process, os.getpid()

    async def echo(self, value: Any, *, twice: bool = False) -> Any:
        return [value, value] if twice else value

    async def double(self, array: np.ndarray) -> np.ndarray:
        return array * 2

    async def fail(self, rank: int | None = None) -> None:
        """Raise KeyError on `rank` (None: on all); the other ranks never answer."""
        if rank is not None and rank != self.rank:
            await asyncio.Event().wait()
        raise KeyError(f"row 7 has no column reward on rank {self.rank}")

    async def raise_unpicklable(self) -> None:
        raise UnpicklableError(3, "holds a lock")

    async def raise_changed(self) -> None:
        raise ChangedError("the real reason")

    async def raise_exit(self) -> None:
        sys.exit(3)

    async def raise_stop(self) -> None:
        raise StopAsyncIteration

    async def return_unpicklable(self) -> Any:
        return threading.Lock()

    async def return_unreadable(self) -> Any:
        return Unreadable()

    async def block_for(self, seconds: float) -> None:
        time.sleep(seconds)  # the event loop answers nothing meanwhile

    async def meet(self) -> str:
        """Returns once `arrive` was called: only overlapping calls can end."""
        await self.meeting.wait()
        return "met"

    async def arrive(self) -> None:
        self.meeting.set()

    async def ask_peer(self, method: str, *args: Any) -> Any:
        return await getattr(self.peer, method)(*args)

    async def ask(self, proxy: Any, method: str, *args: Any) -> Any:
        return await getattr(proxy, method)(*args)

    async def forever(self) -> None:
        await asyncio.Event().wait()

    async def block_the_loop(self) -> None:
        time.sleep(1000)

    async def modules(self, names: list[str]) -> list[str]:
        return [name for name in names if name in sys.modules]

    async def environment(self) -> dict[str, str]:
        return dict(os.environ)

    async def start_child(self) -> int:
        """A process that ends neither with its parent nor by itself, in a session of its own."""
        return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid

    async def talk(self) -> None:
        os.write(1, b"a library prints\n")
        os.write(2, b"a crash writes\n")
        logging.getLogger("probe").info("an info line")
        logging.getLogger("probe").warning("a warning line")
        warnings.warn("a python warning", stacklevel=1)

    async def listen_everywhere(self) -> int:
        """What no executor may do: listen on every interface."""
        self.socket = socket.create_server(("0.0.0.0", 0))
        return self.socket.getsockname()[1]

    async def record(self, num_spans: int) -> None:
        for _ in range(num_spans):
            with self.spans.span("decode"):
                pass

    async def close(self) -> None:
        if self.folder is not None:
            path = Path(self.folder) / f"closed-{self.rank}"
            path.write_text(path.read_text() + "x" if path.exists() else "x")


class AtExit(Probe):
    """Has what a library does at the end of the interpreter."""

    def __init__(self, spec, **others) -> None:
        super().__init__(spec, **others)
        atexit.register(Path(self.folder, "exited").touch)


class StuckInClose(Probe):
    """Does not end when asked."""

    async def close(self) -> None:
        time.sleep(1000)


class CancelledInClose(Probe):
    """What its clean-up waits for is cancelled."""

    async def close(self) -> None:
        raise asyncio.CancelledError


class FullDisk(Probe):
    """Has something to write when it is closed."""

    async def close(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/full/archive.jsonl")


class Gathering(Probe):
    """Ranks of one gloo group that meet through a file."""

    async def join(self, file: str) -> float:
        return await asyncio.to_thread(self._join, file)

    async def num_threads(self) -> int:
        import torch

        return torch.get_num_threads()

    def _join(self, file: str) -> float:
        import torch
        from torch import distributed

        store = distributed.FileStore(file, self.num_ranks)
        distributed.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.num_ranks
        )
        tensor = torch.ones(1)
        distributed.all_reduce(tensor)
        return tensor.item()
