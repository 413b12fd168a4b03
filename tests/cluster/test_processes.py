"""Executor processes: how they die, what they leave behind, where they listen and write."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path

import pytest

from llamarl.cluster import Cluster, Executor, ExecutorLost, RemoteError, make_cluster, meshes
from llamarl.cluster.os_process import MARK, is_alive, wait_first_exit
from llamarl.core.config import ClusterConfig
from llamarl.storage.worker import StorageSpec, StorageWorker
from tests.cluster.executors import Gathering, Probe, StuckInClose, Unreadable
from tests.signals import restore_ctrl_c

pytestmark = pytest.mark.full

LIMIT_S = 120.0
ROOT = str(Path(__file__).parents[2])


@asynccontextmanager
async def started(tmp_path: Path, **config):
    cluster = make_cluster(
        ClusterConfig(**config), spans_folder=None, logs_folder=str(tmp_path / "logs")
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            yield cluster
    finally:
        await cluster.stop()


def run(tmp_path: Path, scenario: Callable[[Cluster], Awaitable[None]], **config) -> None:
    async def main() -> None:
        async with started(tmp_path, **config) as cluster:
            await scenario(cluster)

    asyncio.run(main())


def processes_with_mark() -> set[int]:
    """Every process that some cluster started, directly or not."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"\0{MARK}=".encode() in b"\0" + (folder / "environ").read_bytes():
                found.add(int(folder.name))
    return found


async def gone(pids: list[int], limit_s: float) -> None:
    async with asyncio.timeout(limit_s):
        while any(is_alive(pid) for pid in pids):
            await asyncio.sleep(0.02)


def test_a_killed_rank_is_named_at_once_and_nothing_is_left(tmp_path: Path) -> None:
    pids: list[int] = []

    async def scenario(cluster: Cluster) -> None:
        trainer, other = await asyncio.gather(
            cluster.spawn("trainer", Probe, {}, 2), cluster.spawn("scorer", Probe, {})
        )
        pids.extend([*trainer.pids, *other.pids, *await trainer.all(Probe.start_child)])
        pids.append(await other.one(Probe).start_child())
        calls = [trainer.all(Probe.forever), trainer.watch()]
        pending = [asyncio.create_task(call) for call in calls]
        peer = asyncio.create_task(other.one(Probe).ask(trainer.one(Probe), "forever"))
        await asyncio.sleep(0.1)
        killed_s = time.monotonic()
        os.kill(trainer.pids[1], signal.SIGKILL)
        errors = await asyncio.gather(*pending, return_exceptions=True)
        assert time.monotonic() - killed_s < 2
        for error in errors:
            assert isinstance(error, ExecutorLost)
            assert (error.executor, error.rank) == ("trainer", 1)
        with pytest.raises(ExecutorLost, match="trainer") as caught:
            await peer
        assert time.monotonic() - killed_s < 4
        assert "raised in scorer-0" in caught.value.__notes__[0]
        with pytest.raises(ExecutorLost, match="rank 1"):
            await trainer.one(Probe).place()
        assert await other.one(Probe).echo(1) == 1  # the others live on

    run(tmp_path, scenario)
    assert not [pid for pid in pids if is_alive(pid)]


def test_a_call_reaches_many_ranks_through_one_and_the_first_failure_comes_back_alone(
    tmp_path: Path,
) -> None:
    async def scenario(cluster: Cluster) -> None:
        group = await cluster.spawn("trainer", Probe, {}, 7)  # 0 calls 1, 3, 5; these 2, 4, 6
        assert [place[0] for place in await group.all(Probe.place)] == list(range(7))
        assert (await group.one(Probe).place())[0] == 0
        assert await group.all(Probe.echo, None) == [None] * 7
        with pytest.raises(KeyError, match="on rank 6"):
            await group.all(Probe.fail, 6)  # the others never answer
        os.kill(group.pids[4], signal.SIGKILL)
        with pytest.raises(ExecutorLost) as caught:
            await group.all(Probe.place)
        assert (caught.value.executor, caught.value.rank) == ("trainer", 4)

    run(tmp_path, scenario)


def test_a_hung_process_is_lost_after_the_silence_limit(tmp_path: Path) -> None:
    pids: list[int] = []

    async def scenario(cluster: Cluster) -> None:
        group = await cluster.spawn("trainer", Probe, {}, 2)
        pids.extend(group.pids)
        await group.all(Probe.block_for, 1.5)  # its first answer: until then it starts
        call = asyncio.create_task(group.one(Probe).forever())
        await asyncio.sleep(1.5)  # longer than the limit: an endless call is no silence
        assert not call.done()
        os.kill(group.pids[1], signal.SIGSTOP)  # rank 0 looks after it
        stopped_s = time.monotonic()
        with pytest.raises(ExecutorLost, match="rank 1: silent for 1 s"):
            await call
        assert 0.4 < time.monotonic() - stopped_s < 2

    began_s = time.monotonic()
    run(tmp_path, scenario, liveness_timeout_s=1.0)
    assert time.monotonic() - began_s < 10
    assert not [pid for pid in pids if is_alive(pid)]


def test_stop_kills_what_does_not_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(meshes, "CLOSE_LIMIT_S", 0.3)
    pids: list[int] = []

    async def scenario(cluster: Cluster) -> None:
        groups = await asyncio.gather(
            cluster.spawn("stuck", StuckInClose, {}), cluster.spawn("blocked", Probe, {})
        )
        pids.extend([group.pids[0] for group in groups])
        asyncio.create_task(groups[1].one(Probe).block_the_loop())  # noqa: RUF006 - never ends
        await asyncio.sleep(0.1)
        began_s = time.monotonic()
        await cluster.stop()
        assert time.monotonic() - began_s < 3

    run(tmp_path, scenario)
    assert not [pid for pid in pids if is_alive(pid)]
    assert "closing stuck took over" in caplog.text


def test_a_result_that_does_not_pickle_is_an_error_of_the_call_and_a_stop_ends_pending_ones(
    tmp_path: Path,
) -> None:
    async def scenario(cluster: Cluster) -> None:
        group = await cluster.spawn("storage", Probe, {})
        with pytest.raises(RemoteError, match="cannot pickle"):
            await group.one(Probe).return_unpicklable()
        assert await group.one(Probe).echo(1) == 1
        call = asyncio.create_task(group.one(Probe).forever())
        await asyncio.sleep(0.1)
        await cluster.stop()
        with pytest.raises(ExecutorLost, match="stopped"):
            await call
        with pytest.raises(ExecutorLost, match="stopped"):
            await group.one(Probe).echo(1)
        with pytest.raises(RuntimeError, match="stopped"):
            await cluster.spawn("late", Probe, {})

    run(tmp_path, scenario)


def test_a_call_from_another_executor_fails_as_soon_as_the_process_that_it_asks_is_killed(
    tmp_path: Path,
) -> None:
    async def scenario(cluster: Cluster) -> None:
        group, other = await asyncio.gather(
            cluster.spawn("storage", Probe, {}, 2), cluster.spawn("scorer", Probe, {})
        )
        assert await other.one(Probe).ask(group.one(Probe), "echo", 1) == 1
        call = asyncio.create_task(other.one(Probe).ask(group.one(Probe), "forever"))
        await other.one(Probe).echo(1)  # the call before has arrived, too
        os.kill(group.pids[1], signal.SIGKILL)
        async with asyncio.timeout(5.0):  # Monarch itself looks every 10 s
            with pytest.raises(ExecutorLost, match="a process of it was lost"):
                await call
        with pytest.raises(ExecutorLost, match="storage rank 1: its process ended"):
            await group.watch()

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("ending", "how"),
    [
        ("os.kill(os.getpid(), 9)", " by SIGKILL"),
        ("os.kill(os.getpid(), 40)", " by signal 40"),  # it has no name
        ("os._exit(3)", " with exit code 3"),
    ],
)
def test_the_first_of_some_processes_to_end_is_told_with_how_it_ended(
    ending: str, how: str
) -> None:
    async def main() -> None:
        words = [sys.executable, "-c", f"import os; input(); {ending}"]
        processes = [subprocess.Popen(words, stdin=subprocess.PIPE) for _ in range(3)]
        first_exit = asyncio.create_task(wait_first_exit([each.pid for each in processes]))
        reaped = asyncio.create_task(asyncio.to_thread(processes[1].communicate, b"\n"))
        async with asyncio.timeout(LIMIT_S):
            assert await first_exit in [(1, how), (1, "")]
            await reaped
            assert await wait_first_exit([processes[1].pid]) == (0, ""), "it is gone already"
        for process in (processes[0], processes[2]):
            process.communicate(b"\n")

    asyncio.run(main())


def test_where_the_kernel_has_no_descriptors_of_processes_their_ends_are_seen_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    async def scenario(cluster: Cluster) -> None:
        group, other = await asyncio.gather(
            cluster.spawn("storage", Probe, {}), cluster.spawn("scorer", Probe, {})
        )
        os.kill(group.pids[0], signal.SIGKILL)
        with pytest.raises(ExecutorLost, match="storage rank 0: its process ended"):
            await group.watch()
        await other.stop()

    monkeypatch.setattr(os, "pidfd_open", refuse)
    run(tmp_path, scenario)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_what_cannot_be_read_again_is_an_error_of_its_call_alone(
    num_ranks: int, tmp_path: Path
) -> None:
    async def scenario(cluster: Cluster) -> None:
        group = await cluster.spawn("storage", Probe, {}, num_ranks)
        waiting = asyncio.create_task(group.all(Probe.meet))
        with pytest.raises(RemoteError, match=r"storage-0: .* do not pickle: ValueError: .*'not a"):
            await group.all(Probe.echo, Unreadable())
        with pytest.raises(RemoteError, match=r"cannot be read: ValueError: .*'not a number'"):
            await group.all(Probe.return_unreadable)
        await group.all(Probe.arrive)
        assert await waiting == ["met"] * num_ranks

    run(tmp_path, scenario)


def test_a_task_that_asyncio_cancels_at_its_end_may_still_make_calls(tmp_path: Path) -> None:
    answers, tasks = [], []

    async def clean_up(group: Executor, is_waiting: asyncio.Event) -> None:
        try:
            is_waiting.set()
            await asyncio.Event().wait()
        finally:
            answers.append(await group.one(Probe).echo("cleaned up"))
            await group.stop()

    async def main() -> None:
        cluster = make_cluster(ClusterConfig(), spans_folder=None, logs_folder=str(tmp_path))
        group = await cluster.spawn("storage", Probe, {})
        is_waiting = asyncio.Event()
        tasks.append(asyncio.create_task(clean_up(group, is_waiting)))
        await is_waiting.wait()

    asyncio.run(main())
    assert answers == ["cleaned up"]


def test_an_answer_finds_its_call_among_many_also_through_new_copies_of_an_executor(
    tmp_path: Path,
) -> None:
    async def scenario(cluster: Cluster) -> None:
        group, other = await asyncio.gather(
            cluster.spawn("storage", Probe, {}, 3), cluster.spawn("scorer", Probe, {})
        )
        waiting = asyncio.create_task(group.one(Probe).meet())  # answered after all others
        given_up = asyncio.create_task(group.one(Probe).forever())
        asked = [group.all(Probe.echo, number) for number in range(50)]
        asked += [other.one(Probe).ask(group.one(Probe), "echo", number) for number in range(50)]
        found = await asyncio.gather(*asked)
        assert found == [3 * [number] for number in range(50)] + [*range(50)]
        given_up.cancel()
        await group.one(Probe).arrive()
        assert await waiting == "met"

    run(tmp_path, scenario)


@pytest.mark.long
def test_calls_leave_nothing_in_the_memory_of_caller_and_executor(tmp_path: Path) -> None:
    """Of a call that Monarch answers it keeps 1.4 kB."""

    async def scenario(cluster: Cluster) -> None:
        group = await cluster.spawn("storage", Probe, {})
        pids = [os.getpid(), *group.pids]
        for _ in range(1000):
            await group.one(Probe).echo(1)
        before = [private_bytes(pid) for pid in pids]
        for _ in range(2000):
            await group.one(Probe).echo(1)
        grown = [private_bytes(pid) - held for pid, held in zip(pids, before, strict=True)]
        assert max(grown) < 2000 * 700, grown

    run(tmp_path, scenario)


def private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


def test_clusters_follow_one_another_in_one_process(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        group = await cluster.spawn("storage", Probe, {})
        assert await group.one(Probe).echo("again") == "again"

    before = len(os.listdir("/proc/self/fd"))
    for turn in range(3):
        run(tmp_path, scenario)
        if turn == 0:
            before = len(os.listdir("/proc/self/fd"))
    assert len(os.listdir("/proc/self/fd")) <= before + 2


class ImportingStorage(StorageWorker):
    """A storage unit that says which modules its process has loaded."""

    def __init__(self, spec, *, rank, num_ranks, spans) -> None:
        super().__init__(
            StorageSpec(
                unit=0,
                archive_folder=None,
            ),
            rank=rank,
            num_ranks=num_ranks,
            spans=spans,
        )

    modules = Probe.modules


def test_output_goes_to_log_files_and_warnings_to_the_console(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scenario(cluster: Cluster) -> None:
        group = await cluster.spawn("trainer", Probe, {}, 2)
        await group.all(Probe.talk)

    run(tmp_path, scenario)
    for rank in range(2):
        text = (tmp_path / "logs" / f"trainer-{rank}.log").read_text()
        said = ["a library prints", "a crash writes", "an info line", "a warning line"]
        assert [line for line in [*said, "a python warning"] if line not in text] == []
    out, err = capfd.readouterr()
    assert out == ""
    lines = [line for line in err.splitlines() if line.startswith("[trainer-")]
    assert "[trainer-1] WARNING a warning line" in lines
    assert not [line for line in err.splitlines() if "info line" in line or "crash" in line]


def test_the_last_words_of_a_dead_process_are_passed_on(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        group = await cluster.spawn("trainer", Probe, {})
        await group.one(Probe).talk()
        os.kill(group.pids[0], signal.SIGKILL)
        with pytest.raises(ExecutorLost, match="a crash writes"):
            await group.one(Probe).forever()

    run(tmp_path, scenario)


CONTROLLER = """
import asyncio, sys
from llamarl.cluster import exiting_process, make_cluster
from llamarl.core.config import ClusterConfig
from tests.cluster.executors import Probe
async def main():
    cluster = make_cluster(ClusterConfig(), spans_folder=None, logs_folder=sys.argv[1])
    try:
        groups = await asyncio.gather(
            cluster.spawn("trainer", Probe, {}, 2), cluster.spawn("scorer", Probe, {}))
        print(*(pid for group in groups for pid in group.pids), flush=True)
        if sys.argv[2] == "child":
            print(await groups[1].one(Probe).start_child(), flush=True)
        if sys.argv[2] != "end":
            await groups[0].one(Probe).forever()
    finally:
        await cluster.stop()
with exiting_process():
    asyncio.run(main())
"""


@asynccontextmanager
async def controller(tmp_path: Path, mode: str):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CONTROLLER, str(tmp_path / "logs"), mode),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": ROOT},
        preexec_fn=restore_ctrl_c,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(LIMIT_S):
            yield process, [int(pid) for pid in (await process.stdout.readline()).split()]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def test_executors_die_with_a_killed_controller(tmp_path: Path) -> None:
    async def main() -> None:
        async with controller(tmp_path, "run") as (process, pids):
            assert len(pids) == 3
            assert all(is_alive(pid) for pid in pids)
            process.kill()
            await process.wait()
            await gone(pids, limit_s=3)

    asyncio.run(main())


def test_an_interrupted_controller_leaves_no_process(tmp_path: Path) -> None:
    async def main() -> None:
        async with controller(tmp_path, "child") as (process, pids):
            pids.append(int(await process.stdout.readline()))
            assert all(is_alive(pid) for pid in pids)
            process.send_signal(signal.SIGINT)
            _, errors = await process.communicate()
            assert process.returncode != 0
            assert errors.decode().rstrip().endswith("KeyboardInterrupt")
            assert not [pid for pid in pids if is_alive(pid)]

    asyncio.run(main())


def test_a_good_run_leaves_the_console_clean_and_ends_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with controller(tmp_path, "end") as (process, pids):
            began_s = time.monotonic()
            assert await process.communicate() == (b"", b"")
            assert process.returncode == 0
            assert time.monotonic() - began_s < 5
            assert not [pid for pid in pids if is_alive(pid)]

    asyncio.run(main())


def listening_addresses(pids: list[int]) -> Iterator[tuple[int, str, int]]:
    """(pid, address, port) of every TCP socket on which one of these processes listens."""
    inodes: dict[str, int] = {}
    for pid in pids:
        descriptors: list[Path] = []
        with suppress(FileNotFoundError):  # a helper of a process that has ended since
            descriptors += Path(f"/proc/{pid}/fd").iterdir()
        for descriptor in descriptors:
            with suppress(OSError):
                inodes[os.readlink(descriptor).removeprefix("socket:[").removesuffix("]")] = pid
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:  # 0A: listening
                address, port = words[1].split(":")
                yield inodes[words[9]], decode_address(address), int(port, 16)


def decode_address(text: str) -> str:
    """/proc prints addresses as 32-bit words of the host's byte order."""
    words = [int(text[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(text), 8)]
    return str(ip_address(b"".join(words)))


def is_loopback(address: str) -> bool:
    parsed = ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    return (mapped or parsed).is_loopback


def test_executors_load_no_torch_unasked_get_their_threads_and_listen_on_loopback_only(
    tmp_path: Path,
) -> None:
    async def scenario(cluster: Cluster) -> None:
        trainer, storage, light = await asyncio.gather(
            cluster.spawn("trainer", Gathering, {}, 2),
            cluster.spawn("storage", Probe, {}),
            cluster.spawn("light", ImportingStorage, {}),
        )
        assert await light.one(Probe).modules(["torch", "numpy"]) == ["numpy"]
        variables = await storage.one(Probe).environment()
        assert variables["OMP_NUM_THREADS"] == "1"
        assert variables["GLOO_SOCKET_IFNAME"] == "lo"
        assert await trainer.all(Gathering.num_threads) == [1, 1]
        assert await trainer.all(Gathering.join, str(tmp_path / "meeting")) == [2.0, 2.0]
        pids = [os.getpid(), *processes_with_mark()]
        assert {*trainer.pids, *storage.pids} <= set(pids)
        found = list(listening_addresses(pids))
        assert {pid for pid, _, _ in found} >= set(trainer.pids)  # gloo's own sockets are seen
        assert [entry for entry in found if not is_loopback(entry[1])] == []
        # The check itself sees a socket that is open to everybody.
        port = await storage.one(Probe).listen_everywhere()
        assert (storage.pids[0], "0.0.0.0", port) in listening_addresses(pids)
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
            own = (os.getpid(), "::1", server.getsockname()[1])
            assert own in listening_addresses(pids)

    assert not is_loopback("0.0.0.0")
    assert is_loopback("::ffff:127.0.0.1")
    run(tmp_path, scenario)
