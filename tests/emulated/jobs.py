"""What runs on the emulated accelerator, and on the CPU beside it, in one process."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llamarl.core.config import (
    EmbeddedConfig,
    LoraConfig,
    PlacementConfig,
    SamplingConfig,
    TrainerConfig,
    WeightsConfig,
)
from llamarl.core.device.devices import platform_of
from llamarl.core.records import REF_LOGPROBS
from llamarl.generator.engine.engine import EmbeddedEngine
from llamarl.metrics.span import Spans
from llamarl.model.architecture import read_architecture
from llamarl.publish.layout import Route, kinds_of
from llamarl.publish.offload import MemoryMover
from llamarl.publish.reshard import plan
from llamarl.publish.target import WeightBuffer
from llamarl.storage.client import Store
from llamarl.trainer.losses import algorithms
from llamarl.trainer.policy import SavedShards, is_state
from llamarl.trainer.specs import TrainerSpec
from llamarl.trainer.worker import PolicyStep
from tests.emulated.accelerator import KIND, counts, emulated
from tests.emulated.platform import EmulatedPlatform, install
from tests.fakes import WatchedStorage
from tests.generator.engine_models import flat_weights, make_request, random_prompts
from tests.tiny_checkpoints import LLAMA, make_model
from tests.trainer.rollouts import TEMPERATURE, add_reference, make_batch, make_rollouts

CPU = "cpu"


@dataclass
class Seen:
    """Results by name; what was asked of the device, (kind, line) -> how often, in twelve decode
    steps or three micro-batches; and `asked` by kind, in those decode steps or at a step's end."""

    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[tuple[str, str], int] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)

    def per_micro_batch(self) -> dict[str, float]:
        """How often each kind of copy was asked for in the mean of the three."""
        found: Counter[str] = Counter()
        for (kind, _), number in self.lines.items():
            found[kind] += number
        return {kind: n / 3 for kind, n in found.items() if not kind.startswith("wait")}


@contextmanager
def on(device: str) -> Iterator[None]:
    """Tensors may be made on `device` in the block."""
    if device == CPU:
        yield
        return
    install()
    with emulated():
        yield


def host(tensor: torch.Tensor) -> np.ndarray:
    """Values of a tensor of either device, without a trace in the counts."""
    backing = getattr(tensor, "backing", tensor)
    return backing.detach().float().numpy().copy()


def placed(config: Any, device: str) -> Any:
    """The config for `device`, which no recipe may name."""
    config.device = device
    if hasattr(config, "enforce_eager"):
        config.enforce_eager = device == CPU
    return config


async def decode(rank: int, num_ranks: int, device: str, fields: dict[str, Any]) -> Seen:
    """Twice as many rollouts as slots, some of equal prompts and some that are resumed, over two
    commits, an offload and an abort."""
    prompts = random_prompts(6) + [tuple(range(30))] * 8
    kinds = [{}, {"temperature": 0.0}, {"top_p": 0.9}, {"temperature": 0.7, "top_k": 20}]
    with on(device):
        config = EmbeddedConfig(max_num_seqs=7, max_model_len=160, **fields)
        engine = EmbeddedEngine(LLAMA, placed(config, device), is_padded=True)
        flats = [flat_weights(engine, make_model(LLAMA, seed)) for seed in (1, 2)]
        live = torch.zeros(flats[0].shape, dtype=engine.memory.dtype, device=device)
        live.copy_(flats[0])
        engine.commit(live, 0)
        for row, prompt in enumerate(prompts):
            segment = 7 if row % 3 == 0 else 0
            sampling = kinds[row % 4]
            engine.submit(
                make_request(row, prompt, 3 + 9 * min(row, 6), segment_tokens=segment, **sampling)
            )
        mover = MemoryMover("pinned" if device == KIND else "none", "", "engine")
        lines, asked, done = Counter(), Counter(), {}
        for step in range(1000):
            if step in (12, 40):
                live.copy_(flats[step == 12])
                engine.commit(live, step)
            if step == 20:
                engine.abort_requests([3])
            if step == 50:
                mover.offload("kv", engine.movable("kv"))
                mover.onload("kv")
            counts.clear()
            finished = engine.step()
            if step < 12:  # nothing else happens in these
                lines += counts.lines
                asked += counts.total
            for item in finished:
                if item.reason.value == "segment":
                    engine.submit(item.request, item.written)
                    continue
                done[item.request.row_id] = item.written
            if not engine.has_work:
                break
        engine.close()
    values = {
        name: {row: getattr(written, name).tolist() for row, written in done.items()}
        for name in ("ids", "logprobs", "versions")
    }
    return Seen(values, lines, asked)


def make_policy_step(
    device: str,
    checkpoint: str,
    algorithm: str,
    trainer: dict[str, Any],
    resources: ExitStack,
    generator: EmbeddedConfig | None = None,
) -> PolicyStep:
    """A trainer of one rank, for this generator."""
    penalties = {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}
    spec = TrainerSpec(
        checkpoint=checkpoint,
        rendezvous=f"{checkpoint}-{uuid.uuid4()}",
        config=placed(TrainerConfig(lr=0.01, eps=1e-4, **trainer), device),
        algorithm=algorithms()[algorithm](
            **(penalties if algorithm != "aipo" else {}),
            **({"teacher": "folder"} if algorithm == "distill" else {}),
        ),
        sampling=SamplingConfig(temperature=TEMPERATURE, max_tokens=64),
        weights=WeightsConfig(),
        placement=PlacementConfig(),
        run_dir=str(Path(checkpoint).parent),
        num_steps=10,
        seed=0,
        storage=Store([WatchedStorage()]),
        kinds=() if generator is None else kinds_of(generator, read_architecture(checkpoint)),
    )
    return PolicyStep(spec, 0, 1, Spans("trainer-0", None), resources)


async def train(
    rank: int, num_ranks: int, device: str, checkpoint: str, algorithm: str, trainer: dict[str, Any]
) -> Seen:
    """Two steps of three micro-batches each; then the log-prob check, a snapshot and an offload."""
    cells, rows = make_rollouts(oldest_version=1)
    add_reference(cells)
    seen = Seen()
    with on(device), ExitStack() as resources:
        policy_step = make_policy_step(device, checkpoint, algorithm, trainer, resources)
        columns = {name: [cells[row.row_id][name] for row in rows] for name in cells[0]}
        if algorithm == "aipo":
            del columns[REF_LOGPROBS]
        micro_batches = [range(5), range(5, 10), range(10, 13)]
        for version in range(2):
            batch = make_batch(rows, 1, 160, version)
            counts.clear()
            found = policy_step.accumulate(batch, rows, columns, micro_batches)
            seen.lines = dict(counts.lines)
            parameters = policy_step.policy.parameters
            seen.values[f"gradients {version}"] = {
                name: host(p.grad.to_local()) for name, p in parameters.items()
            }
            seen.values[f"found {version}"] = found
            counts.clear()
            stats = policy_step.step()
            seen.asked = dict(counts.total)
            seen.values[f"scalars {version}"] = stats.scalars
        seen.values["check"] = policy_step.infer(columns)
        mover = MemoryMover("pinned" if device == KIND else "none", "", "trainer")
        for tag in policy_step.tags:
            mover.offload(tag, policy_step.policy.movable(tag))
        for tag in policy_step.tags:
            mover.onload(tag)
        policy = policy_step.policy
        assert policy.snapshot.take(policy.state(2))
        copies = policy.snapshot._copies
        seen.values["snapshot"] = {
            name: host(getattr(tensor, "_local_tensor", tensor)) for name, tensor in copies.items()
        }
        seen.values["weights"] = {
            name: host(p.to_local()) for name, p in policy_step.policy.parameters.items()
        }
    return seen


async def resume_with_dropout(
    rank: int, num_ranks: int, device: str, checkpoint: str, folder: str
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], list[str]]:
    """Adapters after a step, the same after the checkpoint before it was restored and the step
    taken again, and the random states that the checkpoint has."""
    cells, rows = make_rollouts(4, oldest_version=1)
    with on(device), ExitStack() as resources:
        lora = LoraConfig(rank=4, dropout=0.3)
        policy_step = make_policy_step(device, checkpoint, "aipo", {"lora": lora}, resources)
        columns = {name: [cells[row.row_id][name] for row in rows] for name in cells[0]}
        seen = []
        for version in (0, 1, 1):
            policy_step.accumulate(make_batch(rows, 1, 160, version), rows, columns, [range(4)])
            policy_step.step()
            parameters = policy_step.policy.parameters.items()
            seen.append({name: host(each.to_local()) for name, each in parameters})
            if version == 0:
                policy_step.save(folder)
            else:
                policy_step.restore(folder)
        states = [name for name in SavedShards(folder).shapes() if is_state(name)]
    return seen[1], seen[2], states


async def race(rank: int, num_ranks: int) -> dict[str, str]:
    """What is said of two streams that use one memory."""
    found = {}
    with on(KIND):
        device = torch.device(KIND, 0)
        platform = platform_of(device)
        stream, here = platform.side_stream(device), torch.zeros(4, device=device)

        def attempt(name: str, work: Callable[[], object]) -> None:
            try:
                work()
                found[name] = ""
            except RuntimeError as error:
                found[name] = str(error)

        def read() -> torch.Tensor:
            with stream.running():
                return here + 1

        here.add_(1)
        attempt("reads too early", read)
        await_sum = platform.mark(device)
        with stream.running():
            await_sum()
        attempt("after a mark", read)
        attempt("overwrites too early", lambda: here.mul_(2))
        with stream.running():
            float(here.sum())
        attempt("after the host waited", lambda: here.mul_(2))
    return found


def scale(policy_step: PolicyStep, factor: float) -> None:
    """What stands for an optimizer step."""
    with torch.no_grad():
        for parameter in policy_step.policy.parameters.values():
            parameter.to_local().mul_(factor)


async def publish(
    rank: int, num_ranks: int, device: str, checkpoint: str, staging: str, fields: dict[str, Any]
) -> Seen:
    """A trainer's version goes into a generator's staging memory, is verified, committed and
    decoded with; then another one."""
    seen = Seen()
    with on(device), ExitStack() as resources:
        config = placed(EmbeddedConfig(max_num_seqs=4, max_model_len=80, **fields), device)
        policy_step = make_policy_step(device, checkpoint, "aipo", {}, resources, config)
        writer = policy_step.source._writer
        engine = EmbeddedEngine(read_architecture(checkpoint), config, is_padded=True)
        weight_buffer = WeightBuffer(
            engine.memory,
            WeightsConfig(staging=staging),
            replica=0,
            rank=0,
            run_id=uuid.uuid4().hex,
            device=device,
        )
        resources.callback(weight_buffer.close)
        transport = "shared_memory" if device == CPU or staging == "host" else "cuda_ipc"
        target = weight_buffer.layout()
        route = Route(
            source="trainer",
            replica=0,
            transport=transport,
            copies=tuple(plan([writer.layout()], [target])),
            sources=(0,),
            targets=(0,),
        )
        writer.connect(0, route)
        resources.callback(writer.close)
        tensors = policy_step.source.tensors
        for version in range(3):
            # Waits for the device, which nothing between a step and its writes does.
            handle = weight_buffer.prepare(version)
            tensors.begin_step()
            scale(policy_step, 1.0 + version / 8)
            policy_step.source.label(version)
            if version == 2:  # the next step begins before anything was written
                tensors.announce()
                tensors.begin_step()
                scale(policy_step, 0.5)
            sent = writer.write(version, [handle])
            assert weight_buffer.verify(version) == sent
            seen.values.setdefault("fingerprints", []).append(dict(sent))
            flat = weight_buffer.commit(version)
            engine.commit(engine.process_weights(flat), version)
            engine.submit(make_request(version, (1, 2, 3), 12))
            while engine.has_work:
                for item in engine.step():
                    written = item.written
                    seen.values[f"decoded {version}"] = written.ids.tolist()
                    seen.values[f"logprobs {version}"] = written.logprobs.tolist()
        engine.close()
    return seen


async def offload_in_turns(
    rank: int, num_ranks: int, num_turns: int
) -> tuple[dict[str, int], list[tuple[int, int]]]:
    """Two sets of tensors leave and come back, then one of twice the size in place of the first.

    Returns the bytes of each set, and after the turns, the growth and the end: how often host
    memory was pinned, and the bytes that are.
    """
    install()
    platform = platform_of(KIND)
    assert isinstance(platform, EmulatedPlatform)
    platform.pinned_bytes.clear()  # those of earlier jobs, whose movers are gone
    num_before = platform.num_pinned
    sets = {"weights": [torch.arange(300.0), torch.arange(7.0)], "kv": [torch.arange(1000.0)]}
    mover, seen = MemoryMover("pinned", "", "engine"), []

    def pinned() -> tuple[int, int]:
        return platform.num_pinned - num_before, sum(platform.pinned_bytes.values())

    with emulated():
        held = {name: [each.to(KIND) for each in some] for name, some in sets.items()}
        for _ in range(num_turns):
            for name, tensors in held.items():
                mover.offload(name, tensors)
            for name, tensors in held.items():
                mover.onload(name)
                for tensor, want in zip(tensors, sets[name], strict=True):
                    assert torch.equal(tensor.cpu(), want)
        seen.append(pinned())
        mover.offload("weights", [torch.cat(sets["weights"] * 2).to(KIND)])
        seen.append(pinned())
        mover.close()
        seen.append(pinned())
    return {name: sum(each.nbytes for each in some) for name, some in sets.items()}, seen
