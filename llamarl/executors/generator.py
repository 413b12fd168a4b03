"""A generator: one rank of one replica, over any engine.

Owns: the memory that a publish writes, passing it on to siblings, and writing finished rollouts to
storage. Does not own: the engine's maths, or who asks for rollouts. Invariant: a row comes out of
`collect` only after its columns are in storage, and weights change only between two decode steps.

What a publish does before its flip (offering, writing to siblings, fingerprints, preparing) runs on
side threads beside decoding. What changes the engine runs on the compute thread between two steps,
with several ranks between the same two on all of them (`lockstep.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from llamarl.config import GeneratorConfig, PlacementConfig, WeightsConfig
from llamarl.data.tokenizer import load_tokenizer
from llamarl.executors.compute import ComputeThread
from llamarl.executors.decoding import KINDS, Decoding
from llamarl.executors.engines import make_engine
from llamarl.executors.lockstep import Lockstep
from llamarl.executors.offload import Offload
from llamarl.executors.rows import read_written, row_of, write_finished
from llamarl.generation.protocol import Finished
from llamarl.metrics.span import Spans
from llamarl.models.process_group import compute_device, use_device
from llamarl.protocols import Storage
from llamarl.types import FinishReason, Request, Row
from llamarl.weights.arena import Arena
from llamarl.weights.layout import Offer, RankLayout, Route
from llamarl.weights.parts import BUFFER
from llamarl.weights.shared_memory import this_host
from llamarl.weights.transport import Rdma
from llamarl.weights.writer import Writer

T = TypeVar("T")

GATHER_S = 0.05  # several decode steps: a fraction of the messages, and nobody waits for one row


class GeneratorExecutor:
    """One rank of one generator replica.

    `checkpoint` is the folder whose config.json gives the architecture. With `load_weights` its
    weights are version 0; without, no rollout starts before the first flip. `tokenizer` is loaded
    when the first request with stop strings comes. `run_dir` holds the ranks' meeting place and,
    unless `placement` says otherwise, what is offloaded. After an error of the engine every call
    raises it.
    """

    def __init__(
        self,
        *,
        rank: int,
        num_ranks: int,
        spans: Spans,
        replica: int,
        checkpoint: str,
        load_weights: bool,
        config: GeneratorConfig,
        weights: WeightsConfig,
        placement: PlacementConfig,
        storage: Storage,
        tokenizer: str,
        run_id: str,
        run_dir: str,
        rdma: Rdma | None = None,
    ) -> None:
        if num_ranks != config.num_ranks:
            raise ValueError(f"generator.num_ranks must be {num_ranks}, got {config.num_ranks}")
        self._rank, self._num_ranks, self._replica = rank, num_ranks, replica
        self._spans, self._storage, self._config = spans, storage, config
        self._weights, self._placement, self._rdma = weights, placement, rdma
        self._checkpoint, self._load_weights = checkpoint, load_weights
        self._tokenizer, self._run_id, self._run_dir = tokenizer, run_id, run_dir
        self._lock = threading.Lock()
        self._finished: list[Finished] = []  # guarded by _lock, as are _open and _error
        self._open: Counter[object] = Counter()  # cohort -> rollouts that have not stopped
        self._error: BaseException | None = None
        self._compute: ComputeThread | None = None
        self._decoding: Decoding | None = None
        self._prepared: tuple[Tensor, Any] | None = None  # of the part that is open
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
        name = f"generator-{self._replica}-{self._rank}"
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
                self._open.update(request.cohort for request in requests)
        if any(request.sampling.stop_strings for request in requests):
            await self._load_tokenizer()
        resumed = [request for request in requests if request.resume]
        written = await read_written(self._storage, resumed) if resumed else {}
        key = ("submit", [(request.row_id, request.resume) for request in requests])
        await self._ordered(functools.partial(decoding.submit, requests, written), key)

    async def collect(self) -> list[Row]:
        """Rows that stopped, their columns stored; after `heartbeat_s` whatever there is.

        Waits until all rollouts of some cohort have stopped, or one was cut, and then a little for
        more: nobody needs less than a group, and every stage behind works on what comes out
        together. An exception of the engine comes out here, with its own traceback. Ranks other
        than 0 have nothing to tell.
        """
        self._alive()
        if self._rank > 0:
            return []
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._has_news.wait(), self._config.heartbeat_s)
            await asyncio.sleep(GATHER_S)
        self._alive()
        with self._lock:
            finished, self._finished = self._finished, []
            self._has_news.clear()
        if finished:
            await write_finished(self._storage, finished)
        return [row_of(item, self._replica) for item in finished]

    async def abort(self, row_ids: list[int]) -> None:
        """Stop these rollouts; each comes out of `collect`, marked ABORTED."""
        engine = self._alive().engine
        await self._ordered(functools.partial(engine.abort, row_ids), ("abort", row_ids))

    # Receiver

    async def target_layout(self) -> RankLayout:
        """Where this rank wants every parameter, and in which parts."""
        self._alive()
        return self._arena.layout()

    async def connect_source(self, route: Route) -> None:
        """Receive over `route` from now on; waits for its other ranks."""
        self._alive()
        await asyncio.to_thread(self._arena.connect, route)

    async def offer(self, version: int, part: int) -> Offer:
        """Open the shadow memory for one part of `version`; waits while the weights are away."""
        self._alive()
        await self._has_weights.wait()
        was_unpublished = self._is_unpublished.is_set()
        self._is_unpublished.clear()
        self._opening, self._prepared = object(), None
        try:
            return await asyncio.to_thread(self._arena.offer, version, part)
        except BaseException:
            if was_unpublished:
                self._is_unpublished.set()
            raise

    async def fingerprint(self, version: int, part: int) -> dict[str, int]:
        """Fingerprints of the part in the shadow memory, by parameter, once it has arrived."""
        self._alive()
        opening = self._opening
        with self._spans.span("fingerprint", "publish", version=version):
            prints = await asyncio.to_thread(self._arena.fingerprint, version, part)
        if self._weights.shadow != "bucket":
            with self._spans.span("prepare", "publish", version=version):
                prepared = await asyncio.to_thread(self._prepare)
            if self._opening is opening:  # else what it was made of has been overwritten
                self._prepared = prepared
        return prints

    async def flip(self, version: int, part: int) -> int:
        """Take over the part between two decode steps; returns the number of running rollouts."""
        flip = functools.partial(self._flip, version, part)
        self._alive()
        return await self._ordered(flip, ("flip", version, part))

    async def discard(self, version: int) -> None:
        """Forget the shadow; the live weights stay. RuntimeError, for good, after a part's flip."""
        self._alive()
        try:
            await asyncio.to_thread(self._arena.discard, version)
        except RuntimeError as error:
            if not self._alive().is_torn:
                raise
            self._fail(error)
            raise
        self._opening = self._prepared = None
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

    async def write(self, version: int, offers: list[Offer]) -> dict[str, int]:
        """Pass one part of `version` on to a sibling. StaleVersion, TargetLost."""
        self._alive()
        with self._spans.span("write", "publish", version=version):
            return await asyncio.to_thread(self._writer.write, version, offers)

    # Tenant

    async def leave(self, kinds: list[str]) -> None:
        """Stop decoding and move these kinds off the device; waits for a publish to end."""
        for kind in _known(kinds):
            if kind == "weights":
                await self._is_unpublished.wait()
                self._has_weights.clear()
            await self._ordered(functools.partial(self._leave, kind), ("leave", kind))

    async def prefetch(self, kinds: list[str]) -> None:
        """Start reading these kinds; returns at once."""
        decoding = self._alive()
        for kind in _known(kinds):
            decoding.prefetch(kind)

    async def enter(self, kinds: list[str]) -> None:
        """Bring these kinds back; with all of them decoding goes on."""
        for kind in _known(kinds):
            await self._ordered(functools.partial(self._enter, kind), ("enter", kind))
            if kind == "weights":
                self._has_weights.set()

    # On the compute thread

    def _build(self) -> None:
        device = compute_device(self._config.device, "generator.device")
        use_device(device)
        engine = make_engine(
            self._config,
            self._checkpoint,
            rank=self._rank,
            num_ranks=self._num_ranks,
            rendezvous=self._meeting("engine"),
            run_id=self._run_id,
        )
        self._exit.callback(engine.close)
        self._arena = Arena(
            parameters=engine.memory.parameters,
            num_elements=engine.memory.num_elements,
            dtype=engine.memory.dtype,
            is_staged=engine.memory.is_staged,
            replica=self._replica,
            rank=self._rank,
            run_id=self._run_id,
            shadow=self._weights.shadow,
            bucket_bytes=self._weights.bucket_bytes,
            device=device,
            rdma=self._rdma,
            timeout_s=self._weights.timeout_s,
            is_offloaded=self._placement.colocated and self._placement.offload != "none",
        )
        self._exit.callback(self._arena.close)
        tensors = {BUFFER: self._arena.live}
        self._writer = Writer(
            self._rank,
            this_host(),
            tensors,
            engine.memory.parameters,
            timeout_s=self._weights.timeout_s,
            rdma=self._rdma,
        )
        self._exit.callback(self._writer.close)
        self._arena.before_overwrite = self._writer.retire
        folder = self._placement.offload_folder or self._run_dir
        kind = self._placement.offload if self._placement.colocated else "none"
        offload = Offload(kind, folder, f"generator-{self._replica}-{self._rank}")
        self._exit.callback(offload.close)
        decoding = Decoding(engine, self._arena, offload, self._spans, self._finish)
        self._exit.callback(decoding.end_idle)
        if self._load_weights:
            engine.load(self._arena.live, self._checkpoint)
            self._arena.version = 0
            engine.flip(engine.prepare(self._arena.live), 0)
            self._writer.present(0)
        if isinstance(self._compute, Lockstep):
            self._compute.join(self._meeting("commands"))
        self._decoding = decoding

    def _meeting(self, purpose: str) -> str:
        """A file that the ranks of this replica, and nobody else, meet at."""
        return f"{self._run_dir}/.rendezvous-generator-{self._replica}-{self._run_id}-{purpose}"

    def _work(self) -> bool:
        return self._decoding is not None and self._decoding.work()

    def _flip(self, version: int, part: int) -> int:
        decoding = self._alive()
        try:
            num_running = decoding.flip(version, part, self._prepared)
        except BaseException as error:
            if decoding.is_torn:  # memory has changed, the engine has not followed
                self._fail(error)
            raise
        finally:
            self._prepared = None  # the engine holds what it needs: never three sets of weights
        if self._arena.version == version:
            self._writer.present(version, {BUFFER: self._arena.live})
            self._loop.call_soon_threadsafe(self._is_unpublished.set)
        return num_running

    def _leave(self, kind: str) -> None:
        if kind == "weights":  # until they are back, nothing is there to be read
            self._writer.release()
            self._writer.retire(self._arena.version)
        self._alive().leave(kind)

    def _enter(self, kind: str) -> None:
        self._alive().enter(kind)
        if kind == "weights" and self._arena.version >= 0:
            self._writer.present(self._arena.version)

    def _finish(self, finished: list[Finished]) -> None:
        if self._rank > 0:
            return
        with self._lock:
            self._finished += finished
            self._open.subtract(item.request.cohort for item in finished)
            whole = [item for item in finished if not self._open[item.request.cohort]]
            for item in whole:
                self._open.pop(item.request.cohort, None)
        if whole or any(item.reason is FinishReason.SEGMENT for item in finished):
            self._loop.call_soon_threadsafe(self._has_news.set)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
        self._loop.call_soon_threadsafe(self._has_news.set)

    # Beside decoding

    def _prepare(self) -> tuple[Tensor, Any]:
        shadow = self._arena.shadow
        return shadow, self._alive().engine.prepare(shadow)

    async def _load_tokenizer(self) -> None:
        if self._decode_text is None:
            tokenizer = await asyncio.to_thread(load_tokenizer, self._tokenizer)
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
            raise RuntimeError(f"generator {self._replica} must be started first")
        return self._decoding


def _known(kinds: list[str]) -> list[str]:
    """`kinds`; ValueError if one is unknown."""
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"kinds must be among {', '.join(KINDS)}, got {kind!r}")
    return kinds
