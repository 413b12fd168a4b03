"""Hosts of a network on this machine: namespaces whose links have a rate and a delay.

Owns: the namespaces, their interfaces, the packets of links with a delay. Does not own: what runs
on the hosts. Invariant: all of it belongs to processes that end with the one that asked for it,
even if that is killed, so nothing is left of it once the hosts' own processes have ended too.

    with network([Link(400e6), Link(200e6, delay_s=0.03)]) as (this_machine, one, two):
        subprocess.run(one.command("ip", "address"))
        with two.broken():  # until then nothing reaches it or comes from it
            time.sleep(10)

All hosts reach each other, through a bridge in a namespace of its own. A path such as that of a
unix socket reaches from one namespace into another: name folders of those as `own_folders`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("ip", "tc", "unshare", "nsenter")
NAMESPACES = ("unshare", "--net", "--mount")
HOLD = 'for folder; do mount -t tmpfs own "$folder"; done; ip link set lo up; echo; exec cat'
BURST_S, QUEUE_S = 0.005, 0.1  # of a link: what it sends at once, and what may wait for it
MIN_BURST_BYTES = 65536
TUNSETIFF, TAP_WITHOUT_HEADERS = 0x400454CA, 0x1002
MAX_PACKETS = 64  # read before those that are due are written


@dataclass(frozen=True)
class Link:
    """What a host is behind: `rate_bits_per_s` and `delay_s` each way."""

    rate_bits_per_s: float
    delay_s: float = 0.0


@dataclass(frozen=True)
class Host:
    """A host: its `address`, its network `interface`, a process there; the other end of its link is
    `port` of the switch, where `switch_pid` is a process."""

    address: str
    interface: str
    pid: int
    port: str = ""
    switch_pid: int = 0

    def command(self, *command: str) -> list[str]:
        """The command as it runs on this host; the process is the command's own."""
        return _within(self.pid, *command)

    def num_bytes(self) -> tuple[int, int]:
        """Bytes that its interface has received and sent so far."""
        shown = _done(*self.command("ip", "-j", "-s", "link", "show", self.interface))
        counts = json.loads(shown)[0]["stats64"]
        return counts["rx"]["bytes"], counts["tx"]["bytes"]

    @contextmanager
    def broken(self) -> Iterator[None]:
        """The host's link loses every packet while the block runs."""
        _done(*_within(self.switch_pid, "ip", "link", "set", self.port, "down"))
        try:
            yield
        finally:
            _done(*_within(self.switch_pid, "ip", "link", "set", self.port, "up"))


def why_not() -> str:
    """Why there can be no such network here; "" if there can."""
    if os.geteuid():
        return "network namespaces need root"
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"network namespaces need the programs {', '.join(missing)}"
    try:
        _done(*NAMESPACES, *_shape("lo", Link(1e9)))
    except RuntimeError as error:
        return f"network namespaces with shaped links must be possible: {error}"
    return ""


@contextmanager
def network(links: Sequence[Link], own_folders: Sequence[Path] = ()) -> Iterator[list[Host]]:
    """This machine, whose own link has no limit, and a host behind each of `links`.

    `own_folders`, which exist, are empty on each of these hosts, and their own. RuntimeError if the
    system refuses anything.
    """
    interface, subnet = f"link{os.getpid()}", _free_subnet()
    with ExitStack() as stack:
        switch = stack.enter_context(_holder(()))
        _done(*switch.command("ip", "link", "add", "name", "bridge", "type", "bridge"))
        _done(*switch.command("ip", "link", "set", "bridge", "up"))
        found = [Host(f"{subnet}.1", interface, os.getpid())]
        stack.callback(subprocess.run, ["ip", "link", "delete", interface], capture_output=True)
        _connect(found[0], switch, "port0", None, stack)
        for number, link in enumerate(links, 1):
            holder = stack.enter_context(_holder(own_folders))
            port = f"port{number}"
            found.append(Host(f"{subnet}.{number + 1}", interface, holder.pid, port, switch.pid))
            _connect(found[-1], switch, port, link, stack)
        yield found


def _connect(host: Host, switch: Host, port: str, link: Link | None, stack: ExitStack) -> None:
    ends = (host, host.interface), (switch, port)
    if link is not None and link.delay_s:
        stack.enter_context(_relay(ends, link.delay_s))
    else:
        own, other = (["name", name, "netns", str(each.pid)] for each, name in ends)
        _done("ip", "link", "add", *own, "type", "veth", "peer", *other)
    _done(*switch.command("ip", "link", "set", port, "master", "bridge", "up"))
    _done(*host.command("ip", "address", "add", f"{host.address}/24", "dev", host.interface))
    _done(*host.command("ip", "link", "set", host.interface, "up"))
    if link is not None:
        for each, name in ends:
            _done(*each.command(*_shape(name, link)))


def _shape(interface: str, link: Link) -> list[str]:
    """What makes an interface send no faster than the link."""
    rate = f"{link.rate_bits_per_s:.0f}bit"
    burst = max(MIN_BURST_BYTES, int(link.rate_bits_per_s / 8 * BURST_S))
    limit = burst + int(link.rate_bits_per_s / 8 * QUEUE_S)
    place = ["tc", "qdisc", "add", "dev", interface, "root", "tbf"]
    return [*place, "rate", rate, "burst", str(burst), "limit", str(limit)]


@contextmanager
def _holder(own_folders: Sequence[Path]) -> Iterator[Host]:
    """New namespaces, which last as long as a process that waits for the end of its input."""
    command = [*NAMESPACES, "sh", "-ec", HOLD, "sh", *map(str, own_folders)]
    with _ending(command) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError(f"{' '.join(command)} must hold namespaces, got its end")
        yield Host("", "", process.pid)


@contextmanager
def _relay(ends: Sequence[tuple[Host, str]], delay_s: float) -> Iterator[None]:
    """Interfaces at both ends of a link, whose packets a process hands over once they are due: not
    every kernel has netem."""
    with ExitStack() as stack:
        files = []
        for host, name in ends:
            files.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
            stack.callback(os.close, files[-1])
            made = f"tap{os.getpid()}".encode()
            fcntl.ioctl(files[-1], TUNSETIFF, struct.pack("16sH22x", made, TAP_WITHOUT_HEADERS))
            _done("ip", "link", "set", made.decode(), "netns", str(host.pid), "name", name)
        command = [sys.executable, __file__, str(delay_s), *map(str, files)]
        relay = ExitStack()
        relay.enter_context(_ending(command, files))
        stack.close()
        with relay:
            yield


def _hand_over(delay_s: float, files: list[int]) -> None:
    """Write to each file what was read from the other `delay_s` before, until the input ends."""
    other = dict(zip(files, reversed(files), strict=True))
    held: deque[tuple[float, int, bytes]] = deque()
    while True:
        wait_s = max(0.0, held[0][0] - time.monotonic()) if held else None
        readable = select.select([*files, 0], [], [], wait_s)[0]
        if 0 in readable:
            return
        for file in readable:
            with contextlib.suppress(BlockingIOError):
                for _ in range(MAX_PACKETS):
                    packet = os.read(file, 65536)
                    held.append((time.monotonic() + delay_s, other[file], packet))
        while held and held[0][0] <= time.monotonic():
            _, file, packet = held.popleft()
            with contextlib.suppress(OSError):  # an end that is down or full loses it
                os.write(file, packet)


@contextmanager
def _ending(command: list[str], files: Sequence[int] = ()) -> Iterator[subprocess.Popen[str]]:
    """A process that ends at the end of its input, and so with this one."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, pass_fds=files) as process:
        assert process.stdin is not None
        yield process
        process.stdin.close()


def _free_subnet() -> str:
    """The first three numbers of addresses in 198.18.0.0/16, which is meant for benchmarks."""
    subnets = (f"198.18.{(os.getpid() + i) % 256}" for i in range(256))
    return next(
        each for each in subnets if not _done("ip", "address", "show", "to", f"{each}.0/24")
    )


def _within(pid: int, *command: str) -> list[str]:
    """The command as it runs in the namespaces of a process."""
    place = f"/proc/{pid}/ns"
    return ["nsenter", f"--net={place}/net", f"--mount={place}/mnt", *command]


def _done(*command: str) -> str:
    """The output of a command."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    _hand_over(float(sys.argv[1]), [int(file) for file in sys.argv[2:]])
