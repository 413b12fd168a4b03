"""Pools of real processes, one per rank count, reused by all tests of a session."""

import asyncio
import multiprocessing
import os
import socket
import traceback
from multiprocessing.connection import wait

# One server does the imports, every process is a fork of it.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.core.imports"])


class Ranks:
    """`num_ranks` processes that run one coroutine function after another."""

    def __init__(self, num_ranks):
        self._pipes, self._processes = [], []
        for rank in range(num_ranks):
            here, there = FORKS.Pipe()
            process = FORKS.Process(target=_serve, args=(rank, num_ranks, there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    @property
    def is_alive(self):
        return all(process.is_alive() for process in self._processes)

    def run(self, job, *args):
        """`await job(rank, num_ranks, *args)` on every rank; the results by rank.

        RuntimeError with the traceback of the first rank that fails; the pool is dead then, for
        the other ranks may wait for the one that failed.
        """
        self.start(job, *args)
        answers = {}
        while len(answers) < len(self._pipes):
            for pipe in wait([pipe for pipe in self._pipes if pipe not in answers], timeout=120):
                is_good, answers[pipe] = pipe.recv()
                if not is_good:
                    self.close()
                    raise RuntimeError(answers[pipe])
        return [answers[pipe] for pipe in self._pipes]

    def start(self, job, *args):
        """Like `run`, but does not wait."""
        for pipe in self._pipes:
            pipe.send((job, args))

    def signal(self, number):
        for process in self._processes:
            os.kill(process.pid, number)

    def close(self):
        for process in self._processes:
            process.kill()
            process.join()


def _serve(rank, num_ranks, pipe):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Whatever the user's shell says, a run on one host must stay on loopback.
    os.environ["GLOO_SOCKET_IFNAME"] = socket.if_nameindex()[-1][1]
    import torch
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    torch.set_num_threads(1)
    while True:
        job, args = pipe.recv()
        try:
            pipe.send((True, asyncio.run(job(rank, num_ranks, *args))))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        _clear_sharding_prop_cache()  # torch remembers meshes of groups that are no more
