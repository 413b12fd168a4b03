"""The embedded generator as an executor.

Owns: the compute thread that runs the engine, the weights' arena, and writing finished rollouts to
storage. Does not own: the engine's maths or who asks for rollouts. Invariant: a row comes out of
`collect` only after its columns are in storage, and weights flip only between two decode steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time

import numpy as np

from llamarl.config import GeneratorConfig
from llamarl.data.tokenizer import load_tokenizer
from llamarl.executors.compute import ComputeThread
from llamarl.generation.engine import Engine, Finished
from llamarl.generation.parameters import DTYPES, load_checkpoint
from llamarl.generation.scheduler import Written
from llamarl.metrics.span import Spans
from llamarl.models.architecture import read_architecture
from llamarl.protocols import Storage
from llamarl.types import (
    FINISH_CODES,
    GENERATOR_LOGPROBS,
    PROMPT_IDS,
    RESPONSE_IDS,
    SAMPLING,
    TOKEN_VERSIONS,
    Columns,
    FinishReason,
    Request,
    Row,
    VersionSpan,
)
from llamarl.weights.arena import Arena
from llamarl.weights.layout import Offer, RankLayout
from llamarl.weights.shared_memory import this_host

GATHER_S = 0.05  # several decode steps: a fraction of the messages, and nobody waits for one row


class GeneratorExecutor:
    """One rank of one generator replica (this engine has exactly one rank).

    `checkpoint` is the folder whose config.json gives the architecture. With `load_weights` its
    weights are version 0; without, no rollout starts before the first flip. `tokenizer` is loaded
    when the first request with stop strings comes.
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
        storage: Storage,
        tokenizer: str,
        run_id: str,
    ) -> None:
        if num_ranks != 1:
            raise ValueError(f"ranks of an embedded generator replica must be 1, got {num_ranks}")
        self._rank, self._replica = rank, replica
        self._spans, self._storage, self._config = spans, storage, config
        self._checkpoint, self._load_weights = checkpoint, load_weights
        self._tokenizer, self._run_id = tokenizer, run_id
        self._lock = threading.Lock()
        self._finished: list[Finished] = []  # guarded by _lock, as is _error
        self._error: BaseException | None = None
        self._idle_since_ns: int | None = None
        self._is_built = False
        self._exit = contextlib.ExitStack()

    async def start(self) -> None:
        """Allocate arena and KV cache, load the weights; ValueError if the checkpoint is bad."""
        self._loop = asyncio.get_running_loop()
        self._has_news = asyncio.Event()
        self._compute = ComputeThread(f"generator-{self._replica}", self._work, self._fail)
        self._exit.callback(self._compute.close)
        await self._compute.run(self._build)

    async def close(self) -> None:
        """Stop the engine and free the arena."""
        self._exit.close()
        self._end_idle()

    # Generator

    async def submit(self, requests: list[Request]) -> None:
        """Queue rollouts; resumed ones are read back from storage first."""
        if any(request.sampling.stop_strings for request in requests):
            await self._compute.run(self._load_tokenizer)
        resumed = [request for request in requests if request.resume]
        written = await self._read_written(resumed) if resumed else {}

        def queue() -> None:
            for request in requests:
                self._engine.submit(request, written.get(request.row_id))

        await self._compute.run(queue)

    async def collect(self) -> list[Row]:
        """Rows that stopped, their columns stored; empty after `heartbeat_s` without any.

        Waits a little for more once there is one: every stage behind works on what comes out
        together. An exception of the engine comes out here, with its own traceback.
        """
        try:
            await asyncio.wait_for(self._has_news.wait(), self._config.heartbeat_s)
        except TimeoutError:
            return []
        await asyncio.sleep(GATHER_S)
        with self._lock:
            if self._error is not None:
                raise self._error
            finished, self._finished = self._finished, []
            self._has_news.clear()
        if finished:
            await self._storage.write(
                [item.request.row_id for item in finished], columns_of(finished)
            )
        return [self._row(item) for item in finished]

    async def abort(self, row_ids: list[int]) -> None:
        """Stop these rollouts; each comes out of `collect`, marked ABORTED."""
        await self._compute.run(functools.partial(self._engine.abort, row_ids))

    # Receiver

    async def target_layout(self) -> RankLayout:
        """Where this rank wants every parameter in its arena."""
        return RankLayout(
            rank=self._rank, host=this_host(), parameters=self._engine.layout.parameters
        )

    async def offer(self, version: int) -> Offer:
        """Open the shadow arena for `version`."""
        return await self._compute.run(functools.partial(self._arena.offer, version))

    async def fingerprint(self, version: int) -> dict[str, int]:
        """Fingerprints of the shadow arena, by parameter."""
        return await self._compute.run(functools.partial(self._arena.fingerprint, version))

    async def flip(self, version: int) -> int:
        """Make the shadow live between two decode steps; returns the number of running rollouts."""

        def swap() -> int:
            self._end_idle()
            with self._spans.span("flip", version=version):
                return self._engine.flip(self._arena.flip(version), version)

        return await self._compute.run(swap)

    async def discard(self, version: int) -> None:
        """Forget the shadow; the live weights stay."""
        await self._compute.run(functools.partial(self._arena.discard, version))

    # On the compute thread

    def _build(self) -> None:
        architecture = read_architecture(self._checkpoint)
        self._engine = Engine(architecture, self._config)
        layout = self._engine.layout
        self._arena = Arena(
            parameters=layout.parameters,
            num_elements=layout.num_elements,
            dtype=DTYPES[layout.dtype],
            replica=self._replica,
            rank=self._rank,
            run_id=self._run_id,
        )
        # Closed before the thread ends: tensors handed out stay valid.
        self._exit.callback(self._arena.close)
        if self._load_weights:
            load_checkpoint(layout, self._arena.live, self._checkpoint)
            self._arena.version = 0
            self._engine.flip(self._arena.live, 0)
        self._is_built = True

    def _load_tokenizer(self) -> None:
        if self._engine.decode_text is None:
            self._engine.decode_text = load_tokenizer(self._tokenizer).decode

    def _work(self) -> bool:
        """One engine step; False lets the thread sleep until the next command."""
        engine = self._engine if self._is_built else None
        if engine is None or not engine.has_work:
            if self._idle_since_ns is None:
                self._idle_since_ns = time.monotonic_ns()
            return False
        self._end_idle()
        start_ns = time.monotonic_ns()
        num_prefilled = engine.admit()
        prefilled_ns = time.monotonic_ns()
        if num_prefilled:
            self._spans.record(
                "prefill", start_ns, prefilled_ns, tokens=num_prefilled, version=engine.version
            )
            start_ns = prefilled_ns
        num_tokens = engine.num_running
        finished = engine.decode()
        if num_tokens:
            self._spans.record(
                "decode", start_ns, time.monotonic_ns(), tokens=num_tokens, version=engine.version
            )
        if finished:
            with self._lock:
                self._finished += finished
            self._loop.call_soon_threadsafe(self._has_news.set)
        return True

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = error
        self._loop.call_soon_threadsafe(self._has_news.set)

    def _end_idle(self) -> None:
        if self._idle_since_ns is not None:
            self._spans.record("requests", self._idle_since_ns, time.monotonic_ns(), "wait")
            self._idle_since_ns = None

    # Between storage and engine

    async def _read_written(self, requests: list[Request]) -> dict[int, Written]:
        row_ids = [request.row_id for request in requests]
        names = [RESPONSE_IDS, GENERATOR_LOGPROBS, TOKEN_VERSIONS]
        columns = await self._storage.read(row_ids, names)
        return {
            row_id: Written(ids=ids, logprobs=logprobs, versions=versions)
            for row_id, ids, logprobs, versions in zip(
                row_ids, *(columns[name] for name in names), strict=True
            )
        }

    def _row(self, finished: Finished) -> Row:
        return Row(
            row_id=finished.request.row_id,
            num_prompt_tokens=len(finished.request.prompt_ids),
            num_tokens=len(finished.written.ids),
            spans=version_spans(finished.written.versions),
            finish_reason=finished.reason,
            replica=self._replica,
        )


def version_spans(versions: np.ndarray) -> tuple[VersionSpan, ...]:
    """Runs of equal versions in `versions` int [T]."""
    if not len(versions):
        return ()
    starts = np.flatnonzero(np.diff(versions, prepend=versions[0] - 1))
    sizes = np.diff(starts, append=len(versions))
    return tuple(
        VersionSpan(version=int(versions[start]), num_tokens=int(size))
        for start, size in zip(starts, sizes, strict=True)
    )


def columns_of(finished: list[Finished]) -> Columns:
    """The columns that a generator writes, one array per rollout."""
    return {
        PROMPT_IDS: [np.array(item.request.prompt_ids, np.int32) for item in finished],
        RESPONSE_IDS: [item.written.ids for item in finished],
        GENERATOR_LOGPROBS: [item.written.logprobs for item in finished],
        TOKEN_VERSIONS: [item.written.versions for item in finished],
        SAMPLING: [_sampling_row(item.request, item.reason) for item in finished],
    }


def _sampling_row(request: Request, reason: FinishReason) -> np.ndarray:
    sampling = request.sampling
    values = [sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens]
    return np.array([*values, request.seed, FINISH_CODES[reason]], np.float64)
