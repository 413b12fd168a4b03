"""One tensor-parallel rank of vLLM in its own process, which takes commands over a pipe."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.cluster.test_processes import listening_addresses
from tests.vllm.engines import as_vllm_loads, drain, make_engine, step

LIMIT_S = 120


class Rank:
    """The engine of this process; methods are called by name."""

    def __init__(self, checkpoint: str, rendezvous: Path, rank: int, num_ranks: int, changes):
        self.engine = make_engine(checkpoint, rendezvous, rank, num_ranks, **changes)

    def memory(self):
        return self.engine.memory

    def commit(self, flat: torch.Tensor, version: int):
        return self.engine.commit(self.engine.process_weights(flat), version)

    def submit(self, requests):
        for request in requests:
            self.engine.submit(request)

    def step(self, num_steps: int):
        return step(self.engine, num_steps)

    def drain(self):
        return drain(self.engine)

    def load(self, folder: str):
        flat = torch.zeros(self.engine.memory.num_elements, dtype=self.engine.memory.dtype)
        self.engine.load(flat, folder)
        return flat

    def load_base(self, folder: str):
        return self.engine.load_base(folder)

    def differs_from_own_loader(self, folder: str) -> list[str]:
        """Parameters that vLLM's own loader would fill otherwise."""
        held = {n: t.data.clone() for n, t in self.engine._model.named_parameters()}
        own = as_vllm_loads(self.engine, load_file(Path(folder, "model.safetensors")))
        return [n for n in own if not torch.equal(own[n].float(), held[n].float())]

    def listening(self):
        return list(listening_addresses([os.getpid()]))

    def close(self):
        self.engine.close()


def serve(pipe: Connection, arguments: tuple) -> None:
    """Answer calls until the pipe closes."""
    torch.set_num_threads(1)
    try:
        rank = Rank(*arguments)
        pipe.send(None)
        while True:
            name, values = pipe.recv()
            pipe.send(getattr(rank, name)(*values))
    except EOFError:
        return
    except BaseException:
        pipe.send(RuntimeError(traceback.format_exc()))
        raise


class Replica:
    """Calls every rank, and waits for all answers."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    def call(self, name: str, *values):
        return self.call_each(name, [values] * len(self._pipes))

    def call_each(self, name: str, values: list[tuple]):
        for pipe, mine in zip(self._pipes, values, strict=True):
            pipe.send((name, mine))
        return self.answers()

    def answers(self):
        answers = []
        for pipe in self._pipes:
            assert pipe.poll(LIMIT_S), "a rank is silent"
            answers.append(pipe.recv())
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers


@contextmanager
def replicas(checkpoint: str, rendezvous: list[Path], num_ranks: int = 2, **changes):
    """One replica per rendezvous, started together."""
    context = multiprocessing.get_context("spawn")
    processes, started = [], []
    for path in rendezvous:
        pipes = []
        for rank in range(num_ranks):
            mine, theirs = context.Pipe()
            arguments = (checkpoint, path, rank, num_ranks, changes)
            process = context.Process(target=serve, args=(theirs, arguments), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(mine)
        started.append(Replica(pipes))
    try:
        for replica in started:
            replica.answers()
        yield started
        for replica in started:
            replica.call("close")
    finally:
        for process in processes:
            process.kill()
            process.join()
