"""A generator: one rank of one replica, over any engine.

Owns: its components and the memory that they share. Does not own: the engine's maths, or who asks
for rollouts. Invariant: a rollout comes out of `collect` only after its columns are in storage, and
weights change only between two decode steps.

What changes the engine runs on the compute thread between two steps, with several ranks between
the same two on all of them (`lockstep.py`); all else runs beside decoding.
"""

import asyncio
import contextlib
import contextvars
import functools
from typing import Any

import torch

from llamarl.config import EmbeddedConfig, VllmConfig
from llamarl.device.devices import compute_device, use_device
from llamarl.executors.compute import ComputeThread
from llamarl.executors.decoding import Decoding
from llamarl.executors.engine_output import EngineOutput
from llamarl.executors.environment_link import Environments
from llamarl.executors.lockstep import Lockstep
from llamarl.executors.memory_mover import MemoryMover
from llamarl.executors.offloadable import OffloadPart
from llamarl.executors.rollout_part import RolloutPart
from llamarl.executors.specs import GeneratorSpec
from llamarl.executors.weight_source import SourcePart
from llamarl.executors.weight_target import TargetPart
from llamarl.generation.engine import EmbeddedEngine
from llamarl.generation.protocol import Engine
from llamarl.metrics.span import Spans
from llamarl.models.architecture import read_architecture
from llamarl.protocols import ColumnStore
from llamarl.weights.layout.boxes import BUFFER
from llamarl.weights.sync.weight_buffer import WeightBuffer


class GeneratorExecutor:
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
        self._components: tuple[RolloutPart, SourcePart, TargetPart, OffloadPart] | None = None
        self._exit = contextlib.ExitStack()

    @property
    def components(self) -> tuple[RolloutPart, SourcePart, TargetPart, OffloadPart]:
        """Their methods are the executor's: GeneratorReplica, WeightSource, WeightTarget,
        Offloadable. RuntimeError before `start`."""
        if self._components is None:
            raise RuntimeError(f"generator {self._spec.replica} must be started first")
        return self._components

    async def start(self) -> None:
        """Make engine and memory, load the weights; ValueError if the checkpoint is bad."""
        loop, rank, num_ranks = asyncio.get_running_loop(), self._rank, self._num_ranks
        output = EngineOutput(loop, is_kept=rank == 0)
        if num_ranks == 1:
            thread = ComputeThread(self._name, on_error=output.fail)
        else:
            thread = Lockstep(self._name, on_error=output.fail, rank=rank, num_ranks=num_ranks)
        self._thread = thread
        await thread.run(lambda: self._build(thread, output, loop))

    async def reset(self) -> None:
        """See `protocols.Resettable`."""
        rollouts, _, target, _ = self.components
        limit_s = self._spec.weights.timeout_s
        await target.reset(limit_s)
        await rollouts.drained(limit_s)

    async def use(self, storage: ColumnStore, environments: Environments | None) -> None:
        """See `protocols.Resettable`."""
        self.components[0].use(storage, environments)

    async def close(self) -> None:
        """Stop the engine and free all memory. With several ranks all must be closed."""
        if self._components is not None:
            await self._components[0].close()
        if self._thread is not None:
            last = functools.partial(contextvars.copy_context().run, self._exit.close)
            await asyncio.to_thread(self._thread.close, last)  # Monarch's RDMA knows the actor so

    def _build(
        self, thread: ComputeThread, output: EngineOutput, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Make the components, on the compute thread."""
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
            rdma=spec.rdma,
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
        target = TargetPart(
            buffer,
            decoding,
            source,
            spans,
            loop,
            is_processed_early=spec.weights.staging != "bucket",
            frozen=frozen,
        )
        if isinstance(thread, Lockstep):
            thread.join(self._meeting("commands"))
        thread.begin(decoding.work)
        rollouts = RolloutPart(spec, decoding, output, spans)
        offload = OffloadPart(decoding, decoding.run, spans, source, target)
        self._components = rollouts, source, target, offload

    def _engine(self) -> Engine:
        """The engine of this rank. ValueError if it cannot run the checkpoint or config here."""
        spec, config = self._spec, self._spec.config
        place: dict[str, Any] = {"rank": self._rank, "num_ranks": self._num_ranks}
        place |= {"rendezvous": self._meeting("engine"), "lora": spec.lora}
        if isinstance(config, VllmConfig):
            from llamarl.generation.vllm.vllm_engine import VllmEngine  # here, for it imports vLLM

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
            rdma=spec.rdma,
            is_offloaded=spec.placement.colocated and spec.placement.offload != "none",
        )

    def _meeting(self, purpose: str) -> str:
        """The file at which the ranks of this replica meet."""
        spec = self._spec
        return f"{spec.run_dir}/.rendezvous-generator-{spec.replica}-{spec.run_id}-{purpose}"
