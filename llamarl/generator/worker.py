"""The generator's worker: one rank of one replica, over any engine, and the rollouts that it
writes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from llamarl.core.compute import Background, ComputeThread
from llamarl.core.config import EmbeddedConfig, VllmConfig
from llamarl.core.device.devices import compute_device, use_device
from llamarl.core.faces import (
    ColumnStore,
    Environment,
    GeneratorReplica,
    Offloadable,
    Report,
    Worker,
)
from llamarl.core.groups import version_spans
from llamarl.core.records import (
    EPISODE_REWARD,
    EPISODE_REWARDS,
    FINISH_CODES,
    GENERATOR_LOGPROBS,
    KEPT_IDS,
    PROMPT_IDS,
    RESPONSE_IDS,
    ROUTED_EXPERTS,
    SAMPLING,
    TOKEN_VERSIONS,
    FinishReason,
    Request,
    RolloutInfo,
)
from llamarl.generator.decoding import Decoding, EngineOutput, KeptRows, Lockstep
from llamarl.generator.engine.engine import EmbeddedEngine
from llamarl.generator.protocol import Engine, PartialOutput, RequestOutput
from llamarl.generator.specs import GeneratorSpec, Resettable
from llamarl.metrics.span import Spans
from llamarl.model.architecture import Architecture, read_architecture
from llamarl.model.experts import as_cell, read_cell
from llamarl.model.tokenizer import load_tokenizer
from llamarl.publish.comparison import Fingerprints
from llamarl.publish.layout import BUFFER, RankLayout, Route, StagingHandle
from llamarl.publish.offload import MemoryMover, OffloadPart
from llamarl.publish.replica import WeightSource, WeightTarget
from llamarl.publish.source import SourcePart
from llamarl.publish.target import WeightBuffer
from llamarl.scoring.environment import Environments
from llamarl.storage.client import RecordingStore

STORE_S = 1.0


async def read_written(
    storage: ColumnStore,
    requests: list[Request],
    recorded: Architecture | None = None,
    num_kept_ids: int = 0,
) -> dict[int, tuple[Request, PartialOutput]]:
    """Return, by row id, these resumed rollouts, with the prompts that their environments gave
    them, and the tokens that they have so far, with the record of their experts by the model of
    this architecture."""
    row_ids = [request.row_id for request in requests]
    names = [RESPONSE_IDS, GENERATOR_LOGPROBS, TOKEN_VERSIONS, PROMPT_IDS]
    more = [ROUTED_EXPERTS] * (recorded is not None) + [KEPT_IDS] * (num_kept_ids > 0)
    columns = await storage.read(row_ids, [*names, *more])
    found = {
        request.row_id: (
            replace(request, prompt_ids=tuple(prompt_ids.tolist())),
            PartialOutput(ids=ids, logprobs=logprobs, versions=versions),
        )
        for request, ids, logprobs, versions, prompt_ids in zip(
            requests, *(columns[name] for name in names), strict=True
        )
    }
    if recorded is not None:
        for (_, written), cell in zip(found.values(), columns[ROUTED_EXPERTS], strict=True):
            written.experts = read_cell(cell, None, recorded)
    if num_kept_ids:
        for (_, written), cell in zip(found.values(), columns[KEPT_IDS], strict=True):
            written.kept = cell.reshape(-1, num_kept_ids)
    return found


async def write_finished(
    storage: ColumnStore,
    finished: list[RequestOutput],
    writer: str = "",
    *,
    has_experts: bool = False,
    has_kept: bool = False,
) -> None:
    """Store the columns of these rollouts and of their further conversations, except of those that
    begin again; the record of their experts if `has_experts`."""
    whole = [item for item in finished if item.episode is None or not item.episode.is_lost]
    kept = [each for item in whole for each in (item, *item.conversations)]
    alike: dict[tuple[str, ...], list[RequestOutput]] = {}
    for item in kept:
        alike.setdefault(tuple(_rewards(item)), []).append(item)
    for some in alike.values():
        columns = {
            PROMPT_IDS: [np.array(item.request.prompt_ids, np.int32) for item in some],
            RESPONSE_IDS: [item.written.ids for item in some],
            GENERATOR_LOGPROBS: [item.written.logprobs for item in some],
            TOKEN_VERSIONS: [item.written.versions for item in some],
            SAMPLING: [_sampling_row(item.request, item.reason) for item in some],
        }
        if has_experts:
            columns[ROUTED_EXPERTS] = [as_cell(item.written.experts) for item in some]
        if has_kept:
            columns[KEPT_IDS] = [item.written.kept.ravel() for item in some]
        rewards = [*map(_rewards, some)]
        columns |= {name: [cells[name] for cells in rewards] for name in rewards[0]}
        await storage.write([item.request.row_id for item in some], columns, writer)


def _rewards(item: RequestOutput) -> dict[str, np.ndarray]:
    """Return the columns with an episode's rewards at its end."""
    if (episode := item.episode) is None:
        return {}
    cells = {} if episode.reward is None else {EPISODE_REWARD: np.array([episode.reward])}
    return cells | ({EPISODE_REWARDS: np.array(episode.rewards)} if episode.rewards else {})


def rollout_info(finished: RequestOutput, replica: int) -> RolloutInfo:
    """Return the controller's record of a rollout."""
    return RolloutInfo(
        row_id=finished.request.row_id,
        num_prompt_tokens=len(finished.request.prompt_ids),
        num_tokens=len(finished.written.ids),
        spans=version_spans(finished.written.versions),
        finish_reason=finished.reason,
        replica=replica,
        logprob=float(finished.written.logprobs.sum(dtype=np.float64)),
        episode=finished.episode,
        conversations=tuple(rollout_info(each, replica) for each in finished.conversations),
    )


def _sampling_row(request: Request, reason: FinishReason) -> np.ndarray:
    sampling = request.sampling
    values = [sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens]
    return np.array([*values, request.seed, FINISH_CODES[reason]], np.float64)


class GeneratorWorker(
    Worker, GeneratorReplica, Resettable, WeightSource, WeightTarget, Offloadable
):
    """One rank of one generator replica; ranks other than 0 report no rollouts. After an error of
    the engine every call raises it.

    All work of a publish before its commit runs on threads beside decoding, the commit between two
    decode steps."""

    # Made by `start`, on the compute thread.
    _decoding: Decoding
    _buffer: WeightBuffer
    _source: SourcePart
    _offloading: OffloadPart
    _frozen: Mapping[str, Fingerprints]  # the sums of weights that no publish moves, by kind

    def __init__(self, spec: GeneratorSpec, *, rank: int, num_ranks: int, spans: Spans) -> None:
        if num_ranks != spec.config.num_ranks:
            raise ValueError(
                f"generator.num_ranks must be {num_ranks}, got {spec.config.num_ranks}"
            )
        self._spec, self._spans = spec, spans
        self._rank, self._num_ranks = rank, num_ranks
        self._name = f"generator-{spec.replica}-{rank}"
        self._thread: ComputeThread | None = None
        self._is_started = False
        self._exit = contextlib.ExitStack()
        self._storage = RecordingStore(spec.storage, spans)
        self._storing, self._receiving = Background(), Background()
        self._loading = asyncio.Lock()  # of the tokenizer
        self._recorded: Architecture | None = None  # the model whose experts are recorded
        self._kept = KeptRows[RolloutInfo]()
        self._taking = asyncio.Lock()  # a question whose asker is lost may still wait
        self._processed: tuple[Tensor, Any] | None = None  # memory, what the engine made of it
        self._opening: object = None  # a new object at each `prepare`
        self._has_memory, self._is_closed = asyncio.Event(), asyncio.Event()
        self._has_memory.set()
        self._is_closed.set()  # no version is open

    async def start(self) -> None:
        """Make engine and memory, and load the weights. Raises ValueError if the checkpoint is
        bad."""
        rank, num_ranks = self._rank, self._num_ranks
        if self._spec.records_experts:
            self._recorded = read_architecture(self._spec.checkpoint)
        self._output = output = EngineOutput(asyncio.get_running_loop(), is_kept=rank == 0)
        if num_ranks == 1:
            thread = ComputeThread(self._name, on_error=output.fail)
        else:
            thread = Lockstep(self._name, on_error=output.fail, rank=rank, num_ranks=num_ranks)
        self._thread = thread
        await thread.run(lambda: self._build(thread))
        self._is_started = True

    async def close(self) -> None:
        """Stop the engine and free all memory. With several ranks all must be closed."""
        if self._is_started:
            await self._decoding.episodes.close()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.close, self._exit.close)

    async def reset(self) -> None:
        self._output.check()
        limit_s = self._spec.weights.timeout_s
        await self._receiving.drained(limit_s)
        await self._source.background.drained(limit_s)

        def reset() -> None:
            self._decoding.reset()
            self._source.reset()

        await self._decoding.run(reset, ("reset", self._output.session))
        self._opening = self._processed = None
        self._has_memory.set()
        self._is_closed.set()
        await self._decoding.episodes.stop_asking()
        await self._storing.drained(limit_s)
        self._kept = KeptRows[RolloutInfo]()

    async def use(self, storage: ColumnStore, environments: Environments | None) -> None:
        self._storage = RecordingStore(storage, self._spans)
        self._decoding.episodes.use(environments)

    # GeneratorReplica

    async def submit(self, requests: list[Request]) -> None:
        """Queue rollouts; resumed ones are read back from storage first."""
        engine, session = self._decoding.engine, self._output.session
        self._output.check()
        self._output.expect(requests)
        # An environment may ask for strings that end a single turn.
        if any(request.sampling.stop_strings or request.has_turns for request in requests):
            async with self._loading:
                if engine.decode_text is None:
                    tokenizer = await asyncio.to_thread(load_tokenizer, self._spec.tokenizer)
                    engine.decode_text = tokenizer.decode
        resumed = [request for request in requests if request.resume]
        written: dict[int, PartialOutput] = {}
        if resumed:
            own = self._recorded, self._spec.num_kept_ids
            reading = read_written(self._storage, resumed, *own)
            found = await self._storing.wait_for(reading)
            written = {row_id: before for row_id, (_, before) in found.items()}
            requests = [found[r.row_id][0] if r.row_id in found else r for r in requests]
        key = ("submit", [(request.row_id, request.resume) for request in requests])
        await self._decoding.run(partial(self._decoding.submit, requests, written, session), key)

    async def collect(self, received: int) -> Report:
        """See `faces.GeneratorReplica`; after `heartbeat_s` it returns whatever there is.

        The trainer needs whole groups, so this waits for one, and a little longer for more.
        Rollouts that stop meanwhile are stored every `STORE_S`, so that no more is lost with the
        process. An exception of the engine is raised here, with its own traceback."""
        return await self._storing.wait_for(self._collect(received))

    async def _collect(self, received: int) -> Report:
        self._kept.forget(received)
        async with self._taking:
            if not self._kept:
                await self._take()
        return self._kept.report()

    async def _take(self) -> None:
        """Store rollouts that stop, and keep their rows."""
        clock = asyncio.get_running_loop().time
        end_s, is_ready = clock() + self._spec.heartbeat_s, False
        storage = self._storage
        while not is_ready and (left_s := end_s - clock()) > 0:
            finished, is_ready = await self._output.take(min(left_s, STORE_S))
            if finished:
                has_experts, has_kept = self._recorded is not None, self._spec.num_kept_ids > 0
                await write_finished(storage, finished, has_experts=has_experts, has_kept=has_kept)
                self._kept.add(rollout_info(item, self._spec.replica) for item in finished)

    async def abort_requests(self, row_ids: list[int]) -> None:
        abort = partial(self._decoding.abort, row_ids)
        await self._decoding.run(abort, ("abort_requests", row_ids))
        await self._decoding.episodes.forget(row_ids)

    async def renew_environment(self, name: str, calls: Environment) -> None:
        self._decoding.episodes.environments.renew(name, calls)

    # WeightSource

    async def source_layout(self) -> RankLayout:
        return await self._source.source_layout()

    async def connect_target(self, replica: int, route: Route | None) -> None:
        await self._source.connect_target(replica, route)

    async def write(self, version: int, handles: list[StagingHandle]) -> Fingerprints:
        return await self._source.write(version, handles)

    # WeightTarget

    async def target_layout(self) -> RankLayout:
        self._output.check()
        return replace(self._buffer.layout(), frozen=self._frozen)

    async def connect_source(self, route: Route) -> None:
        self._output.check()
        await self._receiving.run(self._buffer.connect, route)

    async def prepare(self, version: int) -> StagingHandle:
        """Open the staging memory for `version`, after waiting until the weights are on the
        device."""
        self._output.check()
        session = self._output.session
        await self._has_memory.wait()
        if session != self._output.session:
            raise RuntimeError(f"version {version} is of a session that has ended")
        was_closed = self._is_closed.is_set()
        self._is_closed.clear()
        self._opening, self._processed = object(), None
        try:
            return await self._receiving.run(self._buffer.prepare, version)
        except BaseException:
            if was_closed:
                self._is_closed.set()
            raise

    async def verify(self, version: int) -> Fingerprints:
        """Return the fingerprints of the staging memory once the version has arrived there. The
        engine prepares its commit meanwhile (`process_weights`)."""
        self._output.check()
        opening = self._opening
        with self._spans.span("verify", "publish", version=version):
            prints = await self._receiving.run(self._buffer.verify, version)
        staging = self._buffer.staging
        with self._spans.span("process_weights", "publish", version=version):
            weights = await self._receiving.run(self._decoding.engine.process_weights, staging)
        if self._opening is opening:  # else the staging memory was overwritten meanwhile
            self._processed = staging, weights
        return prints

    async def commit(self, version: int) -> int:
        return await self._decoding.run(partial(self._commit, version), ("commit", version))

    def _commit(self, version: int) -> int:
        """Commit the version and label the source with it, on the compute thread."""
        try:
            num_running = self._decoding.commit(version, self._processed)
        finally:
            self._processed = None  # the engine holds what it needs: never three sets of weights
        self._source.label(version, {BUFFER: self._buffer.active})
        self._output.loop.call_soon_threadsafe(self._is_closed.set)
        return num_running

    async def abort(self, version: int) -> None:
        self._output.check()
        await self._receiving.run(self._buffer.abort, version)
        self._opening = self._processed = None
        self._is_closed.set()

    # Offloadable

    async def offload(self, tags: list[str]) -> None:
        for tag in tags:
            if tag == "weights":  # an open version is closed before, and none is opened meanwhile
                await self._is_closed.wait()
                self._has_memory.clear()
            await self._offloading.offload([tag])

    async def prefetch(self, tags: list[str]) -> None:
        await self._offloading.prefetch(tags)

    async def onload(self, tags: list[str]) -> None:
        for tag in tags:
            await self._offloading.onload([tag])
            if tag == "weights":
                self._has_memory.set()

    def _build(self, thread: ComputeThread) -> None:
        """Make engine, memory and their ways to others, on the compute thread."""
        spec, spans, output = self._spec, self._spans, self._output
        device = compute_device(spec.config.device, "generator.device")
        use_device(device)
        engine = self._engine()
        self._exit.callback(engine.close)
        self._frozen = {}
        if spec.lora.is_used:
            self._frozen = engine.load_base(spec.checkpoint, spec.base_dtype)
        self._buffer = buffer = WeightBuffer(
            engine.memory,
            spec.weights,
            replica=spec.replica,
            rank=self._rank,
            run_id=spec.run_id,
            device=device,
            is_offloaded=spec.placement.colocated and spec.placement.offload != "none",
        )
        self._exit.callback(buffer.close)
        self._source = source = SourcePart(
            self._rank,
            {BUFFER: buffer.active},
            engine.memory.parameters,
            config=spec.weights,
            spans=spans,
            check=output.check,
        )
        self._exit.callback(source.close)
        buffer.before_overwrite = source.tensors.invalidate
        mover = MemoryMover.placed(spec.placement, spec.run_dir, self._name)
        self._exit.callback(mover.close)
        place: dict[str, Any] = {"rank": self._rank, "environments": spec.environments}
        self._decoding = Decoding(engine, buffer, mover, spans, output, thread, **place)
        self._exit.callback(self._decoding.standstill.end)
        self._offloading = OffloadPart(self._decoding, self._decoding.run, spans, source)
        if spec.load_weights:
            folder = spec.adapter if spec.lora.is_used else spec.checkpoint
            if folder is not None:
                engine.load(buffer.active, folder)
            buffer.version = 0
            engine.commit(engine.process_weights(buffer.active), 0)
            source.label(0)
        if isinstance(thread, Lockstep):
            thread.join(self._meeting("commands"))
        thread.begin(self._decoding.work)

    def _engine(self) -> Engine:
        """Make the engine of this rank. Raises ValueError if it cannot run the checkpoint or config
        here."""
        spec, config = self._spec, self._spec.config
        place: dict[str, Any] = {"rank": self._rank, "num_ranks": self._num_ranks}
        place |= {"rendezvous": self._meeting("engine"), "lora": spec.lora}
        place["num_kept_ids"] = spec.num_kept_ids
        if isinstance(config, VllmConfig):
            from llamarl.generator.vllm.engine import VllmEngine  # here, for it imports vLLM

            place |= {"records_experts": spec.records_experts}
            return VllmEngine(spec.checkpoint, config, run_id=spec.run_id, **place)
        assert isinstance(config, EmbeddedConfig)
        return EmbeddedEngine(read_architecture(spec.checkpoint), config, **place)

    def _meeting(self, purpose: str) -> str:
        """Return the path of the file at which the ranks of this replica meet."""
        spec = self._spec
        return f"{spec.run_dir}/.rendezvous-generator-{spec.replica}-{spec.run_id}-{purpose}"
