"""A generator: one rank of one replica, over any engine.

Owns: the memory that a publish writes, passing it on to siblings, and writing finished rollouts to
storage. Does not own: the engine's maths, or who asks for rollouts. Invariant: a row comes out of
`collect` only after its columns are in storage, and weights change only between two decode steps.

What a publish does before its commit (offering, writing to siblings, fingerprints, preparing) runs
on side threads beside decoding. What changes the engine runs on the compute thread between two
steps, with several ranks between the same two on all of them (`lockstep.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from llamarl.data.tokenizer import load_tokenizer
from llamarl.executors.compute import ComputeThread
from llamarl.executors.decoding import TAGS, Decoding
from llamarl.executors.engines import make_engine
from llamarl.executors.lockstep import Lockstep
from llamarl.executors.offload import Offloader
from llamarl.executors.rollout_columns import read_written, row_of, write_finished
from llamarl.executors.specs import GeneratorSpec
from llamarl.generation.protocol import RequestOutput
from llamarl.generation.scheduler import OpenGroups
from llamarl.metrics.span import Spans
from llamarl.models.process_group import compute_device, use_device
from llamarl.types import Request, RolloutInfo
from llamarl.weights.layout.boxes import BUFFER, RankLayout, Route, StagingHandle
from llamarl.weights.sync.weight_buffer import WeightBuffer
from llamarl.weights.sync.writer import Writer
from llamarl.weights.transports.shared_memory import this_host

T = TypeVar("T")

GATHER_S = 0.05  # several decode steps: a fraction of the messages, and nobody waits for one row


class GeneratorExecutor:
    """One rank of one generator replica.

    After an error of the engine every call raises it.
    """

    def __init__(self, spec: GeneratorSpec, *, rank: int, num_ranks: int, spans: Spans) -> None:
        if num_ranks != spec.config.num_ranks:
            raise ValueError(
                f"generator.num_ranks must be {num_ranks}, got {spec.config.num_ranks}"
            )
        self._spec = spec
        self._rank, self._num_ranks = rank, num_ranks
        self._spans = spans
        self._lock = threading.Lock()
        self._finished: list[RequestOutput] = []  # guarded by _lock, as are _open and _error
        self._open = OpenGroups()
        self._error: BaseException | None = None
        self._compute: ComputeThread | None = None
        self._decoding: Decoding | None = None
        self._processed: tuple[Tensor, Any] | None = None  # of the part that is open
        self._opening: object = None  # another one at every offer
        self._decode_text: Callable[..., str] | None = None
        self._exit = contextlib.ExitStack()

    async def start(self) -> None:
        """Make engine and memory, load the weights; ValueError if the checkpoint is bad."""
        self._loop = asyncio.get_running_loop()
        self._has_news = asyncio.Event()
        self._has_weights, self._is_unpublished = asyncio.Event(), asyncio.Event()
        self._has_weights.set()
        self._is_unpublished.set()
        name = f"generator-{self._spec.replica}-{self._rank}"
        if self._num_ranks == 1:
            self._compute = ComputeThread(name, self._work, self._fail)
        else:
            rank, num_ranks = self._rank, self._num_ranks
            self._compute = Lockstep(name, self._work, self._fail, rank=rank, num_ranks=num_ranks)
        await self._compute.run(self._build)

    async def close(self) -> None:
        """Stop the engine and free all memory. With several ranks all must be closed."""
        if self._compute is not None:
            last = functools.partial(contextvars.copy_context().run, self._exit.close)
            await asyncio.to_thread(self._compute.close, last)  # Monarch's RDMA knows the actor so

    # Generator

    async def submit(self, requests: list[Request]) -> None:
        """Queue rollouts; resumed ones are read back from storage first."""
        decoding = self._alive()
        if self._rank == 0:
            with self._lock:
                self._open.add(requests)
        if any(request.sampling.stop_strings for request in requests):
            await self._load_tokenizer()
        resumed = [request for request in requests if request.resume]
        written = await read_written(self._spec.storage, resumed) if resumed else {}
        key = ("submit", [(request.row_id, request.resume) for request in requests])
        await self._ordered(functools.partial(decoding.submit, requests, written), key)

    async def collect(self) -> list[RolloutInfo]:
        """Rows that stopped, their columns stored; after `heartbeat_s` whatever there is.

        Waits until all rollouts of some prefix group have stopped, or one was cut, and then a
        little for more: nobody needs less than a group, and every stage behind works on what comes
        out together. An exception of the engine comes out here, with its own traceback. Ranks other
        than 0 have nothing to tell.
        """
        self._alive()
        if self._rank > 0:
            return []
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._has_news.wait(), self._spec.config.heartbeat_s)
            await asyncio.sleep(GATHER_S)
        self._alive()
        with self._lock:
            finished, self._finished = self._finished, []
            self._has_news.clear()
        if finished:
            await write_finished(self._spec.storage, finished)
        return [row_of(item, self._spec.replica) for item in finished]

    async def abort_requests(self, row_ids: list[int]) -> None:
        """Stop these rollouts; each comes out of `collect`, marked ABORTED."""
        engine = self._alive().engine
        await self._ordered(
            functools.partial(engine.abort_requests, row_ids), ("abort_requests", row_ids)
        )

    # Receiver

    async def target_layout(self) -> RankLayout:
        """Where this rank wants every parameter, and in which parts."""
        self._alive()
        return self._weight_buffer.layout()

    async def connect_source(self, route: Route) -> None:
        """Receive over `route` from now on; waits for its other ranks."""
        self._alive()
        await asyncio.to_thread(self._weight_buffer.connect, route)

    async def prepare(self, version: int, bucket: int) -> StagingHandle:
        """Open the staging memory for one part of `version`; waits while the weights are away."""
        self._alive()
        await self._has_weights.wait()
        was_unpublished = self._is_unpublished.is_set()
        self._is_unpublished.clear()
        self._opening, self._processed = object(), None
        try:
            return await asyncio.to_thread(self._weight_buffer.prepare, version, bucket)
        except BaseException:
            if was_unpublished:
                self._is_unpublished.set()
            raise

    async def verify(self, version: int, bucket: int) -> dict[str, int]:
        """Fingerprints of the part in the staging memory, by parameter, once it has arrived."""
        self._alive()
        opening = self._opening
        with self._spans.span("verify", "publish", version=version):
            prints = await asyncio.to_thread(self._weight_buffer.verify, version, bucket)
        if self._spec.weights.staging != "bucket":
            with self._spans.span("process_weights", "publish", version=version):
                processed = await asyncio.to_thread(self._process_weights)
            if self._opening is opening:  # else what it was made of has been overwritten
                self._processed = processed
        return prints

    async def commit(self, version: int, bucket: int) -> int:
        """Take over the part between two decode steps; returns the number of running rollouts."""
        commit = functools.partial(self._commit, version, bucket)
        self._alive()
        return await self._ordered(commit, ("commit", version, bucket))

    async def abort(self, version: int) -> None:
        """Forget the staging buffer; the live weights stay. RuntimeError, for good, after a part's
        commit."""
        self._alive()
        try:
            await asyncio.to_thread(self._weight_buffer.abort, version)
        except RuntimeError as error:
            if not self._alive().is_mixed:
                raise
            self._fail(error)
            raise
        self._opening = self._processed = None
        self._is_unpublished.set()

    # Sender

    async def source_layout(self) -> RankLayout:
        """Where this rank's live memory has its boxes."""
        self._alive()
        return self._writer.layout()

    async def connect_target(self, replica: int, route: Route | None) -> None:
        """Remember the route to a sibling, or forget it; waits for the route's other ranks."""
        self._alive()
        await asyncio.to_thread(self._writer.connect, replica, route)

    async def write(self, version: int, handles: list[StagingHandle]) -> dict[str, int]:
        """Pass one part of `version` on to a sibling. StaleVersion, TargetLost."""
        self._alive()
        with self._spans.span("write", "publish", version=version):
            return await asyncio.to_thread(self._writer.write, version, handles)

    # Offloadable

    async def offload(self, tags: list[str]) -> None:
        """Stop decoding and move these kinds off the device; waits for a publish to end."""
        for tag in _known(tags):
            if tag == "weights":
                await self._is_unpublished.wait()
                self._has_weights.clear()
            await self._ordered(functools.partial(self._offload, tag), ("offload", tag))

    async def prefetch(self, tags: list[str]) -> None:
        """Start reading these kinds; returns at once."""
        decoding = self._alive()
        for tag in _known(tags):
            decoding.prefetch(tag)

    async def onload(self, tags: list[str]) -> None:
        """Bring these kinds back; with all of them decoding goes on."""
        for tag in _known(tags):
            await self._ordered(functools.partial(self._onload, tag), ("onload", tag))
            if tag == "weights":
                self._has_weights.set()

    # On the compute thread

    def _build(self) -> None:
        device = compute_device(self._spec.config.device, "generator.device")
        use_device(device)
        engine = make_engine(
            self._spec.config,
            self._spec.checkpoint,
            rank=self._rank,
            num_ranks=self._num_ranks,
            rendezvous=self._meeting("engine"),
            run_id=self._spec.run_id,
        )
        self._exit.callback(engine.close)
        self._weight_buffer = WeightBuffer(
            parameters=engine.memory.parameters,
            num_elements=engine.memory.num_elements,
            dtype=engine.memory.dtype,
            is_staged=engine.memory.is_staged,
            replica=self._spec.replica,
            rank=self._rank,
            run_id=self._spec.run_id,
            staging=self._spec.weights.staging,
            bucket_bytes=self._spec.weights.bucket_bytes,
            device=device,
            rdma=self._spec.rdma,
            timeout_s=self._spec.weights.timeout_s,
            is_offloaded=self._spec.placement.colocated and self._spec.placement.offload != "none",
        )
        self._exit.callback(self._weight_buffer.close)
        tensors = {BUFFER: self._weight_buffer.active}
        self._writer = Writer(
            self._rank,
            this_host(),
            tensors,
            engine.memory.parameters,
            timeout_s=self._spec.weights.timeout_s,
            rdma=self._spec.rdma,
        )
        self._exit.callback(self._writer.close)
        self._weight_buffer.before_overwrite = self._writer.tensors.invalidate
        folder = self._spec.placement.offload_folder or self._spec.run_dir
        mode = self._spec.placement.offload if self._spec.placement.colocated else "none"
        offload = Offloader(mode, folder, f"generator-{self._spec.replica}-{self._rank}")
        self._exit.callback(offload.close)
        decoding = Decoding(engine, self._weight_buffer, offload, self._spans, self._finish)
        self._exit.callback(decoding.end_idle)
        if self._spec.load_weights:
            engine.load(self._weight_buffer.active, self._spec.checkpoint)
            self._weight_buffer.version = 0
            engine.commit(engine.process_weights(self._weight_buffer.active), 0)
            self._writer.tensors.label(0)
        if isinstance(self._compute, Lockstep):
            self._compute.join(self._meeting("commands"))
        self._decoding = decoding

    def _meeting(self, purpose: str) -> str:
        """A file that the ranks of this replica, and nobody else, meet at."""
        spec = self._spec
        return f"{spec.run_dir}/.rendezvous-generator-{spec.replica}-{spec.run_id}-{purpose}"

    def _work(self) -> bool:
        return self._decoding is not None and self._decoding.work()

    def _commit(self, version: int, bucket: int) -> int:
        decoding = self._alive()
        try:
            num_running = decoding.commit(version, bucket, self._processed)
        except BaseException as error:
            if decoding.is_mixed:  # memory has changed, the engine has not followed
                self._fail(error)
            raise
        finally:
            self._processed = None  # the engine holds what it needs: never three sets of weights
        if self._weight_buffer.version == version:
            self._writer.tensors.label(version, {BUFFER: self._weight_buffer.active})
            self._loop.call_soon_threadsafe(self._is_unpublished.set)
        return num_running

    def _offload(self, tag: str) -> None:
        if tag == "weights":  # until they are back, nothing is there to be read
            self._writer.tensors.release()
            self._writer.tensors.invalidate(self._weight_buffer.version)
        self._alive().offload(tag)

    def _onload(self, tag: str) -> None:
        self._alive().onload(tag)
        if tag == "weights" and self._weight_buffer.version >= 0:
            self._writer.tensors.label(self._weight_buffer.version)

    def _finish(self, finished: list[RequestOutput]) -> None:
        if self._rank > 0:
            return
        with self._lock:
            self._finished += finished
            is_news = [self._open.stop(item.request, item.reason) for item in finished]
        if any(is_news):
            self._loop.call_soon_threadsafe(self._has_news.set)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
        self._loop.call_soon_threadsafe(self._has_news.set)

    # Beside decoding

    def _process_weights(self) -> tuple[Tensor, Any]:
        staging = self._weight_buffer.staging
        return staging, self._alive().engine.process_weights(staging)

    async def _load_tokenizer(self) -> None:
        if self._decode_text is None:
            tokenizer = await asyncio.to_thread(load_tokenizer, self._spec.tokenizer)
            self._decode_text = self._alive().engine.decode_text = tokenizer.decode

    async def _ordered(self, call: Callable[[], T], key: tuple[object, ...]) -> T:
        self._alive()
        assert self._compute is not None
        return await self._compute.run(call, repr(key) if self._num_ranks > 1 else "")

    def _alive(self) -> Decoding:
        """What decodes; raises the engine's error if it has failed."""
        with self._lock:
            if self._error is not None:
                raise self._error
        if self._decoding is None:
            raise RuntimeError(f"generator {self._spec.replica} must be started first")
        return self._decoding


def _known(tags: list[str]) -> list[str]:
    """`kinds`; ValueError if one is unknown."""
    for tag in tags:
        if tag not in TAGS:
            raise ValueError(f"kinds must be among {', '.join(TAGS)}, got {tag!r}")
    return tags
