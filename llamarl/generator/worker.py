"""The generator's worker: one rank of one replica, over any engine, and the rollouts that it
writes."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

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
    PROMPT_IDS,
    RESPONSE_IDS,
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
from llamarl.generator.weight_target import TargetPart
from llamarl.metrics.span import Spans
from llamarl.model.architecture import read_architecture
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


class RolloutPart(GeneratorReplica):
    """The rollouts of one rank; ranks other than 0 report none."""

    def __init__(
        self, spec: GeneratorSpec, decoding: Decoding, output: EngineOutput, spans: Spans
    ) -> None:
        self._spec, self._decoding, self._output = spec, decoding, output
        self._spans = spans
        self._storage = RecordingStore(spec.storage, spans)
        self.background = Background()  # what has to do with storage
        self._loading = asyncio.Lock()  # of the tokenizer
        self._kept = KeptRows[RolloutInfo]()
        self._taking = asyncio.Lock()  # a question whose asker is lost may still wait

    async def submit(self, requests: list[Request]) -> None:
        """Queue rollouts; resumed ones are read back from storage first."""
        engine, session = self._decoding.engine, self._output.session
        self._decoding.check()
        self._output.expect(requests)
        if any(request.sampling.stop_strings for request in requests):
            async with self._loading:
                if engine.decode_text is None:
                    tokenizer = await asyncio.to_thread(load_tokenizer, self._spec.tokenizer)
                    engine.decode_text = tokenizer.decode
        resumed = [request for request in requests if request.resume]
        written: dict[int, PartialOutput] = {}
        if resumed:
            written = await self.background.wait_for(read_written(self._storage, resumed))
        key = ("submit", [(request.row_id, request.resume) for request in requests])
        submit = partial(self._decoding.submit, requests, written, session)
        await self._decoding.run(submit, key)

    async def collect(self, received: int) -> Report:
        """See `faces.GeneratorReplica`; after `heartbeat_s` it returns whatever there is.

        The trainer needs whole groups, so this waits for one, and a little longer for more.
        Rollouts that stop meanwhile are stored every `STORE_S`, so that no more is lost with the
        process. An exception of the engine is raised here, with its own traceback."""
        return await self.background.wait_for(self._collect(received))

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
                await write_finished(storage, finished)
                self._kept.add(rollout_info(item, self._spec.replica) for item in finished)

    async def drained(self, limit_s: float) -> None:
        """Wait until all calls have ended, then forget what they reported. Raises RuntimeError if
        that takes longer than `limit_s`."""
        await self._decoding.episodes.stop_asking()
        await self.background.drained(limit_s)
        self._kept = KeptRows[RolloutInfo]()

    def use(self, storage: ColumnStore, environments: Environments | None) -> None:
        """Write to this storage, and take turns with these environments, from now on."""
        self._storage = RecordingStore(storage, self._spans)
        self._decoding.episodes.use(environments)

    async def renew_environment(self, name: str, calls: Environment) -> None:
        """See `faces.GeneratorReplica`."""
        self._decoding.episodes.environments.renew(name, calls)

    async def abort_requests(self, row_ids: list[int]) -> None:
        """Stop these rollouts; each comes out of `collect`, marked ABORTED."""
        abort = partial(self._decoding.abort, row_ids)
        await self._decoding.run(abort, ("abort_requests", row_ids))
        await self._decoding.episodes.forget(row_ids)

    async def close(self) -> None:
        """Cancel the questions to environments, and disconnect from them."""
        await self._decoding.episodes.close()


async def read_written(storage: ColumnStore, requests: list[Request]) -> dict[int, PartialOutput]:
    """Return the tokens that these resumed rollouts have so far, by row id."""
    row_ids = [request.row_id for request in requests]
    names = [RESPONSE_IDS, GENERATOR_LOGPROBS, TOKEN_VERSIONS]
    columns = await storage.read(row_ids, names)
    return {
        row_id: PartialOutput(ids=ids, logprobs=logprobs, versions=versions)
        for row_id, ids, logprobs, versions in zip(
            row_ids, *(columns[name] for name in names), strict=True
        )
    }


async def write_finished(
    storage: ColumnStore, finished: list[RequestOutput], writer: str = ""
) -> None:
    """Store the columns of these rollouts, except of those that begin again."""
    kept = [item for item in finished if item.episode is None or not item.episode.is_lost]
    alike: dict[tuple[str, ...], list[RequestOutput]] = {}
    for item in kept:
        alike.setdefault(tuple(_rewards(item)), []).append(item)
    for some in alike.values():
        await _write(storage, some, writer)


def _rewards(item: RequestOutput) -> dict[str, np.ndarray]:
    """Return the columns with an episode's rewards at its end."""
    if (episode := item.episode) is None:
        return {}
    cells = {} if episode.reward is None else {EPISODE_REWARD: np.array([episode.reward])}
    return cells | ({EPISODE_REWARDS: np.array(episode.rewards)} if episode.rewards else {})


async def _write(storage: ColumnStore, finished: list[RequestOutput], writer: str) -> None:
    """Store rollouts with the same columns."""
    columns = {
        PROMPT_IDS: [np.array(item.request.prompt_ids, np.int32) for item in finished],
        RESPONSE_IDS: [item.written.ids for item in finished],
        GENERATOR_LOGPROBS: [item.written.logprobs for item in finished],
        TOKEN_VERSIONS: [item.written.versions for item in finished],
        SAMPLING: [_sampling_row(item.request, item.reason) for item in finished],
    }
    rewards = [*map(_rewards, finished)]
    columns |= {name: [cells[name] for cells in rewards] for name in rewards[0]}
    await storage.write([item.request.row_id for item in finished], columns, writer)


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
    )


def _sampling_row(request: Request, reason: FinishReason) -> np.ndarray:
    sampling = request.sampling
    values = [sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens]
    return np.array([*values, request.seed, FINISH_CODES[reason]], np.float64)


@dataclass(frozen=True)
class Parts:
    """The parts of a started generator rank, whose methods call theirs."""

    rollouts: RolloutPart
    source: SourcePart
    target: TargetPart
    offload: OffloadPart


class GeneratorWorker(
    Worker, GeneratorReplica, Resettable, WeightSource, WeightTarget, Offloadable
):
    """One rank of one generator replica. After an error of the engine every call raises it."""

    def __init__(self, spec: GeneratorSpec, *, rank: int, num_ranks: int, spans: Spans) -> None:
        if num_ranks != spec.config.num_ranks:
            raise ValueError(
                f"generator.num_ranks must be {num_ranks}, got {spec.config.num_ranks}"
            )
        self._spec, self._spans = spec, spans
        self._rank, self._num_ranks = rank, num_ranks
        self._name = f"generator-{spec.replica}-{rank}"
        self._thread: ComputeThread | None = None
        self._parts: Parts | None = None
        self._exit = contextlib.ExitStack()

    @property
    def parts(self) -> Parts:
        """The parts of the rank. Raises RuntimeError before `start`."""
        if self._parts is None:
            raise RuntimeError(f"generator {self._spec.replica} must be started first")
        return self._parts

    async def start(self) -> None:
        """Make engine and memory, and load the weights. Raises ValueError if the checkpoint is
        bad."""
        loop, rank, num_ranks = asyncio.get_running_loop(), self._rank, self._num_ranks
        output = EngineOutput(loop, is_kept=rank == 0)
        if num_ranks == 1:
            thread = ComputeThread(self._name, on_error=output.fail)
        else:
            thread = Lockstep(self._name, on_error=output.fail, rank=rank, num_ranks=num_ranks)
        self._thread = thread
        await thread.run(lambda: self._build(thread, output, loop))

    async def reset(self) -> None:
        limit_s = self._spec.weights.timeout_s
        await self.parts.target.reset(limit_s)
        await self.parts.rollouts.drained(limit_s)

    async def use(self, storage: ColumnStore, environments: Environments | None) -> None:
        self.parts.rollouts.use(storage, environments)

    async def close(self) -> None:
        """Stop the engine and free all memory. With several ranks all must be closed."""
        if self._parts is not None:
            await self._parts.rollouts.close()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.close, self._exit.close)

    # GeneratorReplica

    async def submit(self, requests: list[Request]) -> None:
        await self.parts.rollouts.submit(requests)

    async def collect(self, received: int) -> Report:
        return await self.parts.rollouts.collect(received)

    async def abort_requests(self, row_ids: list[int]) -> None:
        await self.parts.rollouts.abort_requests(row_ids)

    async def renew_environment(self, name: str, calls: Environment) -> None:
        await self.parts.rollouts.renew_environment(name, calls)

    # WeightSource

    async def source_layout(self) -> RankLayout:
        return await self.parts.source.source_layout()

    async def connect_target(self, replica: int, route: Route | None) -> None:
        await self.parts.source.connect_target(replica, route)

    async def write(self, version: int, handles: list[StagingHandle]) -> Fingerprints:
        return await self.parts.source.write(version, handles)

    # WeightTarget

    async def target_layout(self) -> RankLayout:
        return await self.parts.target.target_layout()

    async def connect_source(self, route: Route) -> None:
        await self.parts.target.connect_source(route)

    async def prepare(self, version: int) -> StagingHandle:
        return await self.parts.target.prepare(version)

    async def verify(self, version: int) -> Fingerprints:
        return await self.parts.target.verify(version)

    async def commit(self, version: int) -> int:
        return await self.parts.target.commit(version)

    async def abort(self, version: int) -> None:
        await self.parts.target.abort(version)

    # Offloadable

    async def offload(self, tags: list[str]) -> None:
        await self.parts.offload.offload(tags)

    async def prefetch(self, tags: list[str]) -> None:
        await self.parts.offload.prefetch(tags)

    async def onload(self, tags: list[str]) -> None:
        await self.parts.offload.onload(tags)

    def _build(
        self, thread: ComputeThread, output: EngineOutput, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Make the parts, on the compute thread."""
        spec, spans = self._spec, self._spans
        device = compute_device(spec.config.device, "generator.device")
        use_device(device)
        engine = self._engine()
        self._exit.callback(engine.close)
        frozen = {}
        if spec.lora.is_used:
            frozen = engine.load_base(spec.checkpoint, spec.base_dtype)
        buffer = self._weight_buffer(engine, device)
        self._exit.callback(buffer.close)
        source = SourcePart(
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
        decoding = Decoding(engine, buffer, mover, spans, output, thread, loop, **place)
        self._exit.callback(decoding.end_idle)
        if spec.load_weights:
            folder = spec.adapter if spec.lora.is_used else spec.checkpoint
            if folder is not None:
                engine.load(buffer.active, folder)
            buffer.version = 0
            engine.commit(engine.process_weights(buffer.active), 0)
            source.label(0)
        target = TargetPart(buffer, decoding, source, spans, loop, frozen=frozen)
        if isinstance(thread, Lockstep):
            thread.join(self._meeting("commands"))
        thread.begin(decoding.work)
        rollouts = RolloutPart(spec, decoding, output, spans)
        offload = OffloadPart(decoding, decoding.run, spans, source, target)
        self._parts = Parts(rollouts, source, target, offload)

    def _engine(self) -> Engine:
        """Make the engine of this rank. Raises ValueError if it cannot run the checkpoint or config
        here."""
        spec, config = self._spec, self._spec.config
        place: dict[str, Any] = {"rank": self._rank, "num_ranks": self._num_ranks}
        place |= {"rendezvous": self._meeting("engine"), "lora": spec.lora}
        if isinstance(config, VllmConfig):
            from llamarl.generator.vllm.engine import VllmEngine  # here, for it imports vLLM

            return VllmEngine(spec.checkpoint, config, run_id=spec.run_id, **place)
        assert isinstance(config, EmbeddedConfig)
        return EmbeddedEngine(read_architecture(spec.checkpoint), config, **place)

    def _weight_buffer(self, engine: Engine, device: torch.device) -> WeightBuffer:
        spec = self._spec
        return WeightBuffer(
            engine.memory,
            spec.weights,
            replica=spec.replica,
            rank=self._rank,
            run_id=spec.run_id,
            device=device,
            is_offloaded=spec.placement.colocated and spec.placement.offload != "none",
        )

    def _meeting(self, purpose: str) -> str:
        """Return the path of the file at which the ranks of this replica meet."""
        spec = self._spec
        return f"{spec.run_dir}/.rendezvous-generator-{spec.replica}-{spec.run_id}-{purpose}"
