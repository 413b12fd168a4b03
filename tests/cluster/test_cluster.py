"""What every cluster backend answers alike."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from llamarl.cluster import Cluster, RemoteError, make_cluster, process_name
from llamarl.core.config import ClusterConfig
from llamarl.core.faces import PerRank
from llamarl.metrics.span import SpanReader
from tests.cluster.executors import FullDisk, Probe

LIMIT_S = 30.0
SPANS_BYTES = 200_000  # what 2000 spans take
Scenario = Callable[[Cluster], Awaitable[None]]


@pytest.fixture(params=["inline", pytest.param("monarch", marks=pytest.mark.full)])
def run(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Scenario], None]:
    """Runs a scenario on a fresh cluster and stops it."""
    if request.param == "monarch":  # no rank dies here, whose loss an error would have to wait for
        monkeypatch.setattr("llamarl.cluster.actors.LOSS_GRACE_S", 0.05)

    async def with_cluster(scenario: Scenario) -> None:
        cluster = make_cluster(
            ClusterConfig(backend=request.param),
            spans_folder=str(tmp_path / "spans"),
            logs_folder=str(tmp_path / "logs"),
            spans_bytes=SPANS_BYTES,
        )
        try:
            async with asyncio.timeout(LIMIT_S):
                await scenario(cluster)
        finally:
            await cluster.stop()

    return lambda scenario: asyncio.run(with_cluster(scenario))


def notes(error: BaseException) -> str:
    return "\n".join(error.__notes__)


def test_every_rank_gets_its_place(run) -> None:
    async def scenario(cluster: Cluster) -> None:
        group, single = await asyncio.gather(
            cluster.spawn("trainer", Probe, {}, 2), cluster.spawn("generator-1", Probe, {})
        )
        places = await group.all(Probe.place)
        assert [place[:3] for place in places] == [(0, 2, "trainer-0"), (1, 2, "trainer-1")]
        assert await group.one(Probe).place() == places[0]
        assert (await single.all(Probe.place))[0][:3] == (0, 1, "generator-1")

    run(scenario)


def test_arguments_and_results_travel_whole(run) -> None:
    async def scenario(cluster: Cluster) -> None:
        group = await cluster.spawn("storage", Probe, {})
        array = np.arange(262144, dtype=np.float32)  # 1 MiB
        np.testing.assert_array_equal(await group.one(Probe).double(array), array * 2)
        value = {"a": (1, 2.5, None), "b": [Path("x")]}
        assert await group.one(Probe).echo(value, twice=True) == [value, value]

    run(scenario)


class Parts(PerRank[tuple[str, int]]):
    """The text of each rank, and how many came with it."""

    def __init__(self, texts: dict[int, str]) -> None:
        self.texts = texts

    def for_rank(self, rank: int) -> tuple[str, int]:
        return self.texts[rank], len(self.texts)

    def for_ranks(self, ranks: range) -> Parts:
        return Parts({rank: self.texts[rank] for rank in ranks})


def test_each_rank_gets_its_own_part_of_a_split_argument(run) -> None:
    async def scenario(cluster: Cluster) -> None:
        group = await cluster.spawn("trainer", Probe, {}, 3)
        found = await group.all(Probe.echo, Parts({i: f"for {i}" for i in range(3)}))
        assert [text for text, _ in found] == ["for 0", "for 1", "for 2"]
        if os.getpid() != (await group.all(Probe.place))[0][3]:
            assert [num_parts for _, num_parts in found] == [3, 2, 2], "rank 0 keeps its own"

    run(scenario)


def test_an_exception_keeps_its_type_and_shows_where_it_was_raised(run) -> None:
    async def scenario(cluster: Cluster) -> None:
        group = await cluster.spawn("scorer", Probe, {}, 2)
        with pytest.raises(KeyError, match="row 7 has no column reward on rank 1") as caught:
            await group.one(Probe).fail(1)  # rank 0 never answers
        assert "raised in scorer-1" in notes(caught.value)
        assert "executors.py" in notes(caught.value)
        assert "in fail" in notes(caught.value)

    run(scenario)


def test_what_cannot_travel_becomes_a_remote_error(run) -> None:
    async def scenario(cluster: Cluster) -> None:
        group = await cluster.spawn("scorer", Probe, {})
        for method, text in (
            ("raise_unpicklable", r"UnpicklableError: holds a lock \(3\)"),
            ("raise_changed", "ChangedError: the real reason"),
            ("raise_exit", "SystemExit: 3"),
            ("raise_stop", "StopAsyncIteration"),
        ):
            with pytest.raises(RemoteError, match=text) as caught:
                await getattr(group.one(Probe), method)()
            assert f"in {method}" in notes(caught.value)
            assert await group.one(Probe).echo(1) == 1  # the executor lives on

    run(scenario)


def test_calls_overlap(run) -> None:
    async def scenario(cluster: Cluster) -> None:
        group = await cluster.spawn("generator-0", Probe, {})
        meetings = [asyncio.create_task(group.one(Probe).meet()) for _ in range(5)]
        await asyncio.sleep(0.05)
        await group.one(Probe).arrive()
        assert await asyncio.gather(*meetings) == ["met"] * 5

    run(scenario)


def test_executors_call_each_other(run) -> None:
    async def scenario(cluster: Cluster) -> None:
        storage = await cluster.spawn("storage", Probe, {}, 2)
        peers = {"peer": storage.one(Probe)}
        trainer = await cluster.spawn("trainer", Probe, peers, 2)
        assert await trainer.all(Probe.ask_peer, "echo", 5) == [5, 5]
        place = await trainer.one(Probe).ask(storage.one(Probe), "place")
        assert place == await storage.one(Probe).place()
        with pytest.raises(KeyError, match="row 7") as caught:
            await trainer.one(Probe).ask_peer("fail")
        assert "raised in storage-" in caught.value.__notes__[0]
        assert "raised in trainer-" in caught.value.__notes__[1]

    run(scenario)


def test_spawn_raises_what_the_constructor_raises(run) -> None:
    async def scenario(cluster: Cluster) -> None:
        good = await cluster.spawn("storage", Probe, {})
        with pytest.raises(ValueError, match=r"trainer.lr must be at least 0") as caught:
            await cluster.spawn("trainer", Probe, {"fails": True}, 2)
        assert "raised in trainer-" in notes(caught.value)
        assert await good.one(Probe).echo(1) == 1
        trainer = await cluster.spawn("trainer", Probe, {}, 2)
        assert await trainer.all(Probe.echo, 2) == [2, 2], "the next one may have its name"
        with pytest.raises(ValueError, match="must not be in use"):
            await cluster.spawn("storage", Probe, {})

    run(scenario)


def test_stop_closes_once_and_may_be_repeated(run, tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        group = await cluster.spawn("generator", Probe, {"folder": str(tmp_path)}, 2)
        await group.all(Probe.record, 5000)
        watch = asyncio.create_task(group.watch())
        await group.stop()
        await asyncio.gather(group.stop(), cluster.stop(), cluster.stop())
        assert await watch is None
        assert [(tmp_path / f"closed-{rank}").read_text() for rank in range(2)] == ["x", "x"]
        spans = list(SpanReader(tmp_path / "spans" / "generator-1.jsonl").read())
        assert sum(span.args.get("spans", 1) for span in spans if span.name == "decode") == 5000
        files = (tmp_path / "spans").glob("generator-1.jsonl*")
        assert sum(path.stat().st_size for path in files) <= SPANS_BYTES

    run(scenario)


def test_the_inline_backend_needs_neither_monarch_nor_torch() -> None:
    script = """
import asyncio, sys
sys.modules["monarch"] = None
from llamarl.cluster import make_cluster
from llamarl.core.config import ClusterConfig
from tests.cluster.executors import FullDisk, Probe
async def main():
    config = ClusterConfig(backend="inline")
    cluster = make_cluster(config, spans_folder=None, logs_folder="")
    group = await cluster.spawn("storage", Probe, {})
    print(await group.one(Probe).echo("answer"), "torch" in sys.modules)
asyncio.run(main())
"""
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
        check=False,
    )
    assert done.stdout == "answer False\n", done.stderr


def test_processes_are_named_after_executor_and_rank() -> None:
    assert process_name("trainer", 0, 1) == "trainer-0"
    assert process_name("trainer", 1, 2) == "trainer-1"
    assert process_name("generator-1", 0, 1) == "generator-1"
    assert process_name("generator-1", 1, 2) == "generator-1-1"


def test_an_executor_that_cannot_close_for_a_full_disk_is_one_line(run, caplog) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.spawn("storage", FullDisk, {})

    run(scenario)
    (line,) = [line for line in caplog.text.splitlines() if "closing" in line]
    assert line.endswith("[Errno 28] No space left on device: '/full/archive.jsonl'")
    assert len(caplog.text.splitlines()) == 1
