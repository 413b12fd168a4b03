"""What it costs to connect the replicas of a large run, without its processes.

    python tools/bench_routes.py [--json FILE] [--recipe recipes/llama31_405b_math]

The layouts are those of the recipe, as its running ranks report them (`publish/shards.py`).
A real publisher connects all replicas; its executors do nothing but receive and send what real ones
would: pickled layouts come, pickled routes go. The trainer is taken to feed each replica, as it
does where every replica has a host of its own.

    route_bytes    the longest message that brings one route to a rank: rank 0's, which has the
                   parts of all ranks, and passes theirs on
    route_cpu_s    from that message to a rank's messages, for the slowest rank of either side
    connect_cpu_s  all of the controller's work until every replica is connected

`copies` counts the single copies of one route, `records` the repeated ones that carry them.
"""

from __future__ import annotations

import asyncio
import gc
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from harness import ROOT, Bench

from llamarl.core.config import Config, WeightsConfig
from llamarl.generator.memory import generator_layouts
from llamarl.metrics.span import Spans
from llamarl.model.architecture import read_architecture
from llamarl.publish.layout import Format, RankLayout, Route, formats_of
from llamarl.publish.publisher import Publisher
from llamarl.publish.reshard import SplitRoute, WeightKind
from llamarl.publish.shards import ShardScales
from llamarl.publish.source import Writer
from llamarl.publish.transports.messages import TransportSender, messages_by
from llamarl.publish.transports.routes import TRANSPORTS, End, Transport
from llamarl.recipe.composition import compose, to_config
from llamarl.trainer.memory import trainer_layouts

GOALS = {"route_bytes": "<= 1000000", "route_cpu_s": "<= 0.2", "connect_cpu_s": "<= 60"}


NOWHERE = "nowhere"


class NowhereSender(TransportSender):
    """Builds its messages as `collective` does, and sends none."""

    def __init__(self, route: Route, end: End) -> None:
        self._messages = messages_by("target_rank", route)


class Remote:
    """An executor that is a name for what travels: its pickled layouts, and the routes it gets."""

    def __init__(self, layouts: bytes) -> None:
        self._layouts = layouts
        self.targets: dict[int, bytes] = {}
        self.source = b""

    async def all(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        found: list[Any] = await getattr(self, method.__name__)(*args)
        return found

    async def source_layout(self) -> list[RankLayout]:
        return pickle.loads(self._layouts)

    target_layout = source_layout

    async def connect_target(self, replica: int, route: SplitRoute | None) -> list[None]:
        self.targets[replica] = pickle.dumps(route)
        return []

    async def connect_source(self, route: SplitRoute) -> list[None]:
        self.source = pickle.dumps(route)
        return []


def cpu_s(run: Callable[[], object]) -> float:
    """CPU time of one call of this process."""
    start_s = time.process_time()
    run()
    return time.process_time() - start_s


def connect(config: Config, trainer: Remote, replicas: dict[int, Any]) -> float:
    """Connect all replicas; the controller's CPU time."""

    async def main() -> None:
        publisher = Publisher(
            trainer,  # type: ignore[arg-type]
            replicas,
            Spans("controller", None),
            WeightsConfig(transport=NOWHERE),
            rendezvous_folder="",
            kind_of=lambda replica: WeightKind(device="cuda"),
        )
        await publisher.connect()
        await publisher.close()

    return cpu_s(lambda: asyncio.run(main()))


def send_route(message: bytes, layout: RankLayout, formats: tuple[Format, ...]) -> float:
    """A source rank gets its route: it checks the copies and makes its messages. CPU seconds."""
    scales = ShardScales(layout.parameters, formats, torch.device("cpu"))
    place = layout.rank, layout.host, {}, layout.parameters
    writer = Writer(*place, scales=scales)

    def run() -> None:
        writer.connect(0, pickle.loads(message).for_rank(layout.rank))

    return cpu_s(run)


def receive_route(message: bytes, rank: int) -> float:
    """A target rank gets its route and makes its messages. CPU seconds."""
    return cpu_s(lambda: messages_by("source_rank", pickle.loads(message).for_rank(rank)))


def main() -> None:
    bench = Bench(__doc__, GOALS)
    bench.option("--recipe", type=Path, default=ROOT / "recipes" / "llama31_405b_math")
    arguments = bench.parse()
    TRANSPORTS[NOWHERE] = Transport(
        sender=f"{__name__}:NowhereSender", receiver="nobody:receives", crosses_hosts=True
    )
    config = to_config(compose(arguments.recipe, []))
    architecture = read_architecture(str(arguments.recipe / "architecture"))
    source = trainer_layouts(config, architecture)
    target = generator_layouts(config, architecture)
    trainer, replicas = Remote(pickle.dumps(source)), {}
    for replica in range(config.generator.num_replicas):
        host = [replace(layout, host=f"generator-host-{replica}") for layout in target]
        replicas[replica] = Remote(pickle.dumps(host))
    gc.freeze()  # the layouts above are no part of a controller
    connect_cpu_s = connect(config, trainer, replicas)
    sent, received = trainer.targets[0], replicas[0].source
    routes = [pickle.loads(received).for_rank(layout.rank) for layout in target]
    copies = [copy for route in routes for copy in route.copies]
    bench.add_all(
        {
            "trainer_ranks": len(source),
            "replicas": len(replicas),
            "ranks_per_replica": len(target),
            "copies": sum(copy.num_layers for copy in copies),
            "records": len(copies),
            "layouts_bytes": len(pickle.dumps(source)),
        },
        "one route",
    )
    formats = formats_of(config.generator, architecture)
    sending = max(send_route(sent, layout, formats) for layout in source)
    receiving = max(receive_route(received, layout.rank) for layout in target)
    bench.add("route_bytes", len(sent), "trainer rank")
    bench.add("route_cpu_s", sending, "trainer rank")
    bench.add("route_bytes", len(received), "generator rank")
    bench.add("route_cpu_s", receiving, "generator rank")
    bench.add("route_bytes", max(len(sent), len(received)))
    bench.add("route_cpu_s", max(sending, receiving))
    bench.add("connect_cpu_s", connect_cpu_s)
    bench.write()


if __name__ == "__main__":
    main()
