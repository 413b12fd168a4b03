"""A publish to generators that decode in eight bits, against one in bfloat16.

The same two trainer ranks of float32 feed replicas of two tensor-parallel ranks over shared memory,
one for each form; each rank's layout is the embedded engine's.
"""

from __future__ import annotations

import statistics
import time

import torch
from harness import Values, turns

from llamarl.config import EmbeddedConfig, VllmConfig, WeightsConfig
from llamarl.generation.parameters import BufferLayout
from llamarl.weights.layout.formats import Format, format_of
from llamarl.weights.quantization.rounding import quantize
from llamarl.weights.quantization.shard_scales import ShardScales
from llamarl.weights.sync.publisher import Publisher
from llamarl.weights.sync.weight_buffer import WeightBuffer
from llamarl.weights.sync.writer import Writer
from llamarl.weights.transports.shared_memory import this_host
from weights_bench.model import NUM_RANKS, Model, values
from weights_bench.processes import Remote, call_all
from weights_bench.publishing import Generator, make_publisher
from weights_bench.ranks import GeneratorRank, TrainerRank

FORMS = {
    "bfloat16": EmbeddedConfig(dtype="bfloat16"),
    "int8": EmbeddedConfig(dtype="bfloat16", quantization="int8"),
    "fp8_per_channel": VllmConfig(dtype="bfloat16", quantization="fp8_per_channel"),
}


def form_of(name: str, model: Model) -> Format | None:
    """The format of this name, if it is one."""
    return format_of(FORMS[name], model.architecture)


class QuantizingRank(TrainerRank):
    """A trainer rank that sends its matrices in all these forms."""

    def fill(self) -> None:
        super().fill()
        formats = [form for name in FORMS if (form := form_of(name, self._model))]
        self._scales = ShardScales(self._layouts, formats, torch.device("cpu"))
        self._writer = Writer(
            self._rank, this_host(), self._shards, self._layouts, scales=self._scales
        )

    def derive(self) -> float:
        """Make the scales of all forms; returns seconds."""
        start_s = time.perf_counter()
        self._scales.derive(self._shards)
        return time.perf_counter() - start_s


class QuantizedRank(GeneratorRank):
    """A generator rank with a weight buffer for each form, by replica number."""

    def reserve_forms(self) -> list[int]:
        """Make the buffers; returns the bytes of each."""
        found = []
        self._forms: dict[int, BufferLayout] = {}
        for replica, name in enumerate(FORMS):
            form = form_of(name, self._model)
            layout = BufferLayout(self._model.architecture, "bfloat16", self._rank, NUM_RANKS, form)
            buffer = WeightBuffer(
                layout.memory, WeightsConfig(), replica=replica, rank=self._rank, run_id="bench"
            )
            buffer.active.fill_(1)
            self._weight_buffers[replica], self._forms[replica] = buffer, layout
            found.append(buffer.active.nbytes)
        return found

    def check_form(self, replica: int) -> None:
        """RuntimeError unless matrices are what their format makes of the trainer's, with the
        scales that arrived."""
        layout, flat = self._forms[replica], self._weight_buffers[replica].active
        for name, parameter in layout.parameters.items():
            base, _, rest = name.partition("@")
            if rest.endswith(".scale"):
                continue
            (box,) = parameter.boxes
            expected = values(base, box, torch.bfloat16)
            if rest:
                assert layout.format is not None
                expected = quantize(
                    expected, layout.parameter(flat, f"{name}.scale"), layout.format
                )
            if not torch.equal(layout.parameter(flat, name).float(), expected.float()):
                raise RuntimeError(f"{name} did not arrive as it was sent")


async def bench_formats(model: Model, repeats: int, folder: str) -> dict[str, list[Values]]:
    """By form, what each round gave."""
    trainers = [Remote(QuantizingRank, model, rank) for rank in range(NUM_RANKS)]
    generators = [Remote(QuantizedRank, model, rank) for rank in range(NUM_RANKS)]
    publishers: dict[str, Publisher] = {}
    rounds: dict[str, list[Values]] = {name: [] for name in FORMS}
    try:
        await call_all(trainers, "fill")
        sizes = await call_all(generators, "reserve_forms")
        await call_all(trainers, "derive")
        await call_all(trainers, "label", 0)
        for replica, name in enumerate(FORMS):
            receiver = Generator(generators, replica)
            publisher = make_publisher(trainers, receiver, replica, WeightsConfig(), folder)
            await publisher.connect()
            await publisher.publish(0)
            await call_all(generators, "check_form", replica)
            publishers[name] = publisher
        for number, name in turns(FORMS, repeats):
            derive_s = max(await call_all(trainers, "derive"))
            await call_all(trainers, "label", number + 1)
            start_s = time.perf_counter()
            stats = await publishers[name].publish(number + 1)
            assert not stats.lost, stats.lost
            taken_s = time.perf_counter() - start_s
            place = [*FORMS].index(name)
            found: Values = {"way_s": taken_s, "received_bytes": sum(s[place] for s in sizes)}
            if name != "bfloat16":
                found["scales_s"] = derive_s
            rounds[name].append(found)
    finally:
        for remote in trainers + generators:
            remote.close()
    return rounds


def shares_of_bfloat16(rounds: dict[str, list[Values]]) -> dict[str, Values]:
    """By form: its bytes and seconds over those of bfloat16."""
    plain = rounds["bfloat16"]
    return {
        name: {
            figure: statistics.median(
                own[key] / other[key] for own, other in zip(found, plain, strict=True)
            )
            for figure, key in (("bytes_share", "received_bytes"), ("seconds_share", "way_s"))
        }
        for name, found in rounds.items()
        if name != "bfloat16"
    }
