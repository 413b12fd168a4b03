"""What storage units on hosts of their own move, when the link of each host is the limit.

    python tools/bench_links.py [--json FILE] [--rate 200e6] [--delay 0] [--tokens 8192]
        [--rows 512] [--batch-rows 8] [--depth 4] [--consumers 2] [--rounds 5]

One or two hosts, which are network namespaces of this machine (`links.py`), hold a storage unit
each; a link carries `--rate` bits per second each way, `--delay` seconds late. A producer and
consumers on a host without such a limit move rows through one unit, then through both, in turn:
every row is written over a link and read back over it by calls between processes over mutual TLS,
as in a run on several hosts. Medians of the rounds count; the first, which does not, checks that
each row arrived once and whole.

`second_unit_behind_links` is the throughput with two units over that with one. Two links carry
twice the bytes of one, so it is below 2 as far as processes are in the way: their CPU time, waiting
for answers, and the first write and last read of a flow, when only one direction is used.
`written_share` and `read_share` are the bytes that interfaces counted over what the links could
have carried meanwhile; a link counts the headers of every packet, 4 %, an interface once for many.
`payload_share` is that of the rows' own bytes. Needs root.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from demo_two_hosts import ROOT, worker
from harness import Bench, Values, medians
from links import Host, Link, network, why_not
from store_bench.own import CONTROLLER, OwnStore
from store_bench.rows import Work, make_rows, num_bytes

from llamarl.cluster import exiting_process
from llamarl.cluster.deploy.certificates import make_certificates
from llamarl.config import ClusterConfig

UNITS = (1, 2)


async def measure(bench: Bench, arguments: argparse.Namespace) -> dict[str, list[Values]]:
    """Start hosts, units, producer and consumers, and run all rounds."""
    work = Work(
        tokens=arguments.tokens,
        rows=arguments.rows,
        consumers=arguments.consumers,
        batch_rows=arguments.batch_rows,
        depth=arguments.depth,
    )
    size, link = num_bytes(make_rows(work)), Link(arguments.rate, arguments.delay)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llamarl-")))
        sockets = folder / "sockets"  # no socket reaches from host to host
        sockets.mkdir()
        hosts = stack.enter_context(network([link] * len(UNITS), [sockets]))
        own = OwnStore(folder, start_daemons(folder, hosts, stack), range(1, len(hosts)))
        try:
            await own.start(list(UNITS), work.consumers)
            found: dict[int, list[Values]] = {units: [] for units in UNITS}
            for number in range(arguments.rounds + 1):
                for units in UNITS:
                    behind = hosts[1 : units + 1]
                    before = [host.num_bytes() for host in behind]
                    times = await own.run(units, CONTROLLER, work, True, is_checked=not number)
                    could_bytes = units * link.rate_bits_per_s / 8 * times["flow_s"]
                    if number:
                        shares = counted(behind, before, could_bytes)
                        found[units].append(figures(size, times, could_bytes) | shares)
        finally:
            await own.stop()
    one, two = (medians(rounds)["bytes_per_s"] for rounds in found.values())
    bench.add("second_unit_behind_links", two / one)
    bench.add("row_bytes", size / work.rows)
    rounds = {f"{units} units": each for units, each in found.items()}
    bench.add_medians(rounds)
    return rounds


def counted(hosts: Sequence[Host], before: Sequence[tuple[int, int]], could_bytes: float) -> Values:
    """The shares of the links' rate that the hosts' interfaces counted."""
    after = [host.num_bytes() for host in hosts]
    written, read = (
        sum(late[way] - early[way] for early, late in zip(before, after, strict=True))
        for way in (0, 1)
    )
    return {"written_share": written / could_bytes, "read_share": read / could_bytes}


def figures(size: int, times: dict[str, float], could_bytes: float) -> Values:
    """Of one run that moved `size` bytes of rows."""
    return {
        "bytes_per_s": size / times["flow_s"],
        "payload_share": size / could_bytes,
        "units_cpu_s_per_s": times["units_s"] / times["flow_s"],
    }


def start_daemons(folder: Path, hosts: Sequence[Host], stack: ExitStack) -> ClusterConfig:
    """A worker daemon on each host, for as long as the stack; the cluster of them."""
    make_certificates(str(folder), [host.address for host in hosts])
    paths = f"{ROOT}:{ROOT / 'tools'}"  # of what runs on the hosts
    daemons = [
        worker(folder, address=host.address, within=host.command(), PYTHONPATH=paths)
        for host in hosts
    ]
    names = ("ca", "certificate", "private_key")
    return ClusterConfig(
        hosts=[stack.enter_context(daemon)[0] for daemon in daemons],
        data_interface=hosts[0].interface,
        **{name: f"{folder}/{name}.pem" for name in names},
    )


def main() -> None:
    """Measure."""
    bench = Bench(__doc__, {"second_unit_behind_links": ">= 1.6"})
    bench.option("--rate", type=float, default=200e6, help="bits per second of a link")
    bench.option("--delay", type=float, default=0.0, help="seconds of a link, each way")
    bench.option("--tokens", type=int, default=8192)
    bench.option("--rows", type=int, default=512)
    bench.option("--batch-rows", type=int, default=8)
    bench.option("--depth", type=int, default=4)
    bench.option("--consumers", type=int, default=2)
    bench.option("--rounds", type=int, default=5)
    arguments = bench.parse()
    if reason := why_not():
        sys.exit(f"bench_links: {reason}")
    with exiting_process():
        bench.write(asyncio.run(measure(bench, arguments)))


if __name__ == "__main__":
    main()
