"""How long a checkpoint keeps a trainer from training.

    python tools/bench_checkpoints.py [--json FILE] [--megabytes 1000] [--ranks 2] [--repeats 5]
                                      [--step-size 1024] [--folder DIR]

Ranks hold a Llama's parameters and two moments (float32, sharded by rows), and compute steps of
matrix products of a fixed size, each ended by a barrier as a real one is. By turns within a repeat
they save this state in three ways:

    waiting   `Snapshot.write`: training waits until the shards are written and hashed
    beside    `Snapshot.take`, then `Snapshot.write_copy` on a thread while steps go on
    torch     torch.distributed.checkpoint.async_save, the library's own way to do this

"blocked" is the time in which no step can run; "written" the time until all is on the file system
(no flush; without hashes in torch's case); "step" the median time of a step meanwhile, over that of
a step without a save beside it. Medians over repeats, rank 0's clock.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as processes
from harness import Bench, Values
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from weights_bench.model import model_of

from llamarl.core.process_group import join, leave
from llamarl.trainer.policy import Snapshot

TENSORS_PER_PARAMETER = 3  # itself and two moments
FOUND = "found.json"
Writing = threading.Thread | Future[Any]


class Ways:
    """The ways to save one state; each returns what goes on writing, or None."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self._state = state
        self._snapshot = Snapshot(torch.device("cpu"))
        self._group = dist.new_group(backend="gloo")

    def waiting(self, folder: str) -> Writing | None:
        """Write while nothing else happens."""
        self._snapshot.write(folder, self._state)
        return None

    def beside(self, folder: str) -> Writing:
        """Copy, and write the copy on a thread."""
        assert self._snapshot.take(self._state)
        thread = threading.Thread(target=self._snapshot.write_copy, args=(folder,))
        thread.start()
        return thread

    def torch(self, folder: str) -> Writing:
        """The library's way."""
        future = dcp.async_save(self._state, checkpoint_id=folder, process_group=self._group)
        assert isinstance(future, Future)
        return future


def make_state(megabytes: float, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """This rank's shards of a state of about so many megabytes."""
    state: dict[str, torch.Tensor] = {}
    for name, shape in model_of(megabytes / TENSORS_PER_PARAMETER, "float32").shapes.items():
        rows = shape[0] // mesh.size()
        for kind in range(TENSORS_PER_PARAMETER):
            local = torch.randn(rows, *shape[1:])
            state[f"{kind}.{name}"] = DTensor.from_local(local, mesh, [Shard(0)])
    return state


def is_writing(writing: Writing | None) -> bool:
    """Whether any rank still writes; all ranks get the same answer."""
    if isinstance(writing, threading.Thread):
        is_busy = writing.is_alive()
    else:
        is_busy = writing is not None and not writing.done()
    number = torch.tensor(int(is_busy))
    dist.all_reduce(number)
    return bool(number)


def step(matrix: torch.Tensor) -> float:
    """Seconds of a step."""
    start = time.perf_counter()
    for _ in range(4):
        matrix @ matrix
    dist.barrier()
    return time.perf_counter() - start


def bench_way(save: Callable[[str], Writing | None], folder: Path, matrix: torch.Tensor) -> Values:
    """Seconds of one save, and the share by which steps beside it are slower."""
    alone_s = statistics.median(step(matrix) for _ in range(9))
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    start, steps_s = time.perf_counter(), []
    writing = save(str(folder))
    dist.barrier()
    blocked_s = time.perf_counter() - start
    while is_writing(writing):
        steps_s.append(step(matrix))
    written_s = time.perf_counter() - start
    if isinstance(writing, Future):
        writing.result()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    beside_s = statistics.median(steps_s) if steps_s else alone_s
    return {"blocked_s": blocked_s, "written_s": written_s, "step": beside_s / alone_s}


def bench_rank(
    rank: int, num_ranks: int, megabytes: float, step_size: int, repeats: int, folder: str
) -> None:
    """One rank; rank 0 writes {way: figures by repeat} and the bytes of the state into FOUND."""
    torch.set_num_threads(1)
    join(f"{folder}/rendezvous", rank, num_ranks, torch.device("cpu"))
    state = make_state(megabytes, init_device_mesh("cpu", (num_ranks,)))
    ways = Ways(state)
    matrix = torch.randn(step_size, step_size)
    found: dict[str, list[Values]] = {"waiting": [], "beside": [], "torch": []}
    for repeat in range(repeats + 1):  # the first one allocates
        for name, figures in found.items():
            path = Path(folder, f"{name}-{repeat}")
            figures.append(bench_way(getattr(ways, name), path, matrix))
    if rank == 0:
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        Path(folder, FOUND).write_text(json.dumps([found, num_bytes]))
    leave()


def main() -> None:
    """Measure and print."""
    bench = Bench(__doc__)
    bench.option("--megabytes", type=float, default=1000.0, help="of all ranks' state")
    bench.option("--ranks", type=int, default=2)
    bench.option("--step-size", type=int, default=1024, help="of a step's matrices")
    bench.option("--repeats", type=int, default=5)
    bench.option("--folder", help="where checkpoints go; default: a temporary folder")
    arguments = bench.parse()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        sizes = (arguments.megabytes, arguments.step_size, arguments.repeats)
        others = (arguments.ranks, *sizes, folder)
        processes.spawn(bench_rank, others, nprocs=arguments.ranks)
        found, num_bytes = json.loads(Path(folder, FOUND).read_text())
    bench.add_all({"megabytes": num_bytes / 1e6, "ranks": arguments.ranks})
    bench.add_medians({name: later for name, (_, *later) in found.items()})
    for name, (first, *_) in found.items():
        bench.add("first_blocked_s", first["blocked_s"], name)
    bench.write(found)


if __name__ == "__main__":
    main()
