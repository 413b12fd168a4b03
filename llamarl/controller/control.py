"""The control socket of a run at work, for `llamarl status RUN` and `llamarl scale RUN
generators=N`.

A question is {"ask": "status"}, or {"ask": "scale", "generators": 3, "drains": true, "host": ""}.
Only processes of the run's own user get an answer, and the socket's file is gone once the run has
ended."""

import asyncio
import pwd
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from llamarl.cluster.sockets import Answer, Connection, LocalServer, Packet
from llamarl.controller.controller import Controller
from llamarl.controller.supervisor import Supervisor
from llamarl.core.config import Config
from llamarl.core.config.rank_assignment import Device, place_generator
from llamarl.core.device.names import is_gpu
from llamarl.publish.transports.routes import TRANSPORTS

SOCKET = ".rendezvous-control/socket"  # goes with all that begins so when the run ends
MAX_REPLICAS = 65536
COLUMNS = "executor", "state", "version", "rollouts", "tokens left", "restarts", "host", "pids"
USAGE = {
    "status": "usage: llamarl status RUN\n\nRUN is the folder of a run that is at work.\n",
    "scale": (
        "usage: llamarl scale RUN generators=N [host=ADDRESS] [--now]\n\nRUN is the folder of a "
        "run that is at work. Replicas that are added run on its hosts, or\non the one of the "
        "llamarl worker at ADDRESS, which need not have been there before. A\nreplica that is "
        "removed first writes what it holds; with --now its rollouts go on\nelsewhere.\n"
    ),
}
Message = dict[str, Any]
Answerer = Callable[[Message], Awaitable[Message]]


@asynccontextmanager
async def listening(run_dir: str, answer: Answerer) -> AsyncIterator[None]:
    """Answer clients while the block runs; what `answer` raises is raised at the client. Where the
    folder's file system has no sockets, no client is answered."""

    async def serve(packet: Packet) -> Answer:
        # A change that has begun is finished, even if the client is gone.
        return await asyncio.shield(answer(packet.header)), (), ()

    with ExitStack() as exits:
        with suppress(OSError):
            exits.callback(LocalServer(Path(run_dir, SOCKET), serve).close)
        yield


def ask(run_dir: str, message: Message) -> Message:
    """Return the answer of the run in this folder. ValueError if no run is at work there, or it
    refuses."""
    return asyncio.run(_ask(run_dir, message))


async def _ask(run_dir: str, message: Message) -> Message:
    try:
        connection = Connection(Path(run_dir, SOCKET), f"the run in {run_dir}")
    except PermissionError:
        owner = pwd.getpwuid(Path(run_dir).stat().st_uid).pw_name
        raise ValueError(f"RUN must be a run of yours, got {run_dir}, of {owner}") from None
    except OSError:
        raise ValueError(
            f"RUN must be the folder of a run that is at work, got {run_dir}, where none is"
        ) from None
    try:
        return (await connection.ask((message, []))).header
    except ConnectionError:
        raise ValueError(
            f"RUN must be at work until it has answered, got {run_dir}, which ended"
        ) from None
    finally:
        connection.close()


def status(arguments: list[str]) -> str:
    """Return the text that `llamarl status RUN` prints."""
    if len(arguments) != 1:
        raise ValueError(f"status must get one folder, RUN, got {' '.join(arguments) or 'none'}")
    found = ask(arguments[0], {"ask": "status"})
    values = (each.values() for each in found["executors"])
    rows = [[*COLUMNS], *(["" if value is None else str(value) for value in row] for row in values)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    of = "" if found["num_steps"] is None else f" of {found['num_steps']}"
    head = f"version {found['version']}{of}, {found['num_open']} groups open"
    return "\n".join([head, *lines]) + "\n"


def scale(arguments: list[str]) -> str:
    """Scale the run, and return the text that `llamarl scale RUN generators=N` prints then."""
    run, *words = [word for word in arguments if word != "--now"] or [""]
    values = dict(word.partition("=")[::2] for word in words)
    number, host = values.pop("generators", ""), values.pop("host", "")
    if values or not number.isdecimal() or len(words) > 1 + bool(host):
        got = " ".join(arguments) or "nothing"
        raise ValueError(f"scale must get RUN generators=N [host=ADDRESS] [--now], got {got}")
    message = {"ask": "scale", "generators": int(number), "drains": "--now" not in arguments}
    return f"{ask(run, message | {'host': host})['text']}\n"


@dataclass(frozen=True)
class RunControl:
    """Answers the questions to a run at work."""

    config: Config
    controller: Controller
    supervisor: Supervisor

    async def answer(self, message: Message) -> Message:
        """Answer a message of the form that the module's docstring gives. ValueError if it cannot
        be done."""
        if message.get("ask") == "status":
            return self._status()
        if message.get("ask") == "scale":
            host = str(message.get("host", ""))
            return await self._scale(int(message["generators"]), bool(message["drains"]), host)
        raise ValueError(f"a message must ask status or scale, got {message.get('ask')}")

    def _status(self) -> Message:
        version = self.controller.saver.version
        found = self.supervisor.status()
        found = [s._replace(version=version) if s.name == "trainer" else s for s in found]
        rows = [[*each, *self._place(each.name)] for each in found]
        return {
            "version": version,
            "num_steps": self.config.last_step,
            "num_open": self.controller.gate.num_open,
            "executors": [dict(zip(COLUMNS, row, strict=True)) for row in rows],
        }

    async def _place_on(self, address: str, replicas: list[int]) -> None:
        """Let these replicas, when they are started, run on the host at `address`."""
        config, generator = self.config, self.config.generator
        num_ranks = len(replicas) * generator.num_ranks
        if not replicas:
            raise ValueError("generators must be more than before with host=ADDRESS")
        on_gpus, room = is_gpu(generator.device), config.cluster.num_gpus_per_host
        if on_gpus and num_ranks > room:
            raise ValueError(f"generators must fit on {address}, got {num_ranks} ranks for {room}")
        if TRANSPORTS[transport := config.weights.transport].is_mapped:
            raise ValueError(f"weights.transport must be collective for a host, got {transport}")
        executors = self.supervisor.executors
        assert executors.add_host is not None
        host = await executors.add_host(address)
        devices = (Device(host=host, gpu=i if on_gpus else None) for i in range(num_ranks))
        for replica in replicas:
            executors.places[f"generator-{replica}"] = [*islice(devices, generator.num_ranks)]

    def _place(self, name: str) -> tuple[str, str]:
        """Return the hosts and pids of an executor's processes."""
        cluster, executors = self.config.cluster, self.supervisor.executors
        names = [cluster.name_host(each.host) for each in executors.places.get(name, ())]
        pids = getattr(executors.by_name.get(name), "pids", [])
        return ",".join(dict.fromkeys(names)), ",".join(map(str, pids))

    async def _scale(self, num_replicas: int, drains: bool, host: str) -> Message:
        """Scale the generators to `num_replicas`. Replicas that are added run on `host` if one is
        given."""
        supervisor, config = self.supervisor, self.config
        fewest, most = config.generator.elastic or (1, MAX_REPLICAS)
        if not fewest <= num_replicas <= most:
            raise ValueError(f"generators must be from {fewest} to {most}, got {num_replicas}")
        if config.placement.colocated:
            raise ValueError("placement must be disaggregated to scale generators, got colocated")
        if not supervisor.executors.generators:
            raise ValueError("RUN must have generators to scale, got one of demonstrations")
        before, missing = len(supervisor.wanted()), supervisor.missing(num_replicas)
        if host:
            await self._place_on(host, missing)
        elif missing:
            place_generator(config, missing[-1])  # ValueError if the hosts have no room
        await supervisor.scale(num_replicas, drains=drains)
        return {"text": f"generators: {before} -> {num_replicas}"}
