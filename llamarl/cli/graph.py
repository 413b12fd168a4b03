"""The dataflow of a recipe as text and as a picture, which `llamarl graph` prints and draws.

It starts no process and reads no weights; figures that spans do not hold are missing, never
estimated."""

import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table

from llamarl.core.config.rank_assignment import Device
from llamarl.core.fields import require
from llamarl.metrics.shares import by_executor, read_timeline
from llamarl.metrics.span import Span, executor_of
from llamarl.scoring.stages import GENERATE, SCORE, SETTLE, FrozenModel, Graph, Stage
from llamarl.storage.columns import stored_columns

UNITS = ("B", "kB", "MB", "GB")
NS_PER_S = 1e9
LIST_ROOM, EDGE_ROOM = 26, 60  # characters of a cell
WIDTH = 100
GAP = 2  # between columns

Places = Mapping[str, Sequence[Device]]
"""The devices of an executor's ranks, by the name of its process."""


@dataclass(slots=True)
class Exchange:
    """The rows and bytes that one executor read from storage and wrote there, over all its
    processes."""

    rows: Counter[str] = field(default_factory=Counter)  # by "get" and "put"
    num_bytes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """The bytes by "get" and "put", then by column."""


@dataclass(frozen=True, kw_only=True)
class Flows:
    """The measured flows of one run: the `seconds` from its first to its last exchange with
    storage, and per executor the share of the steps in which it waited, and its exchange."""

    seconds: float
    waits: Mapping[str, float]
    exchanged: Mapping[str, Exchange]

    def rows_per_s(self, executor: str, way: str) -> float:
        """Return the rows per second that the executor got ("get") or wrote ("put")."""
        return self._of(executor).rows[way] / self.seconds

    def bytes_per_s(self, executor: str, columns: tuple[str, ...]) -> float:
        """Return the bytes per second of these columns, or of those they are made from, that the
        executor got."""
        found = self._of(executor).num_bytes["get"]
        return sum(found[name] for name in stored_columns(columns)) / self.seconds

    def _of(self, executor: str) -> Exchange:
        return self.exchanged.get(executor, Exchange())


def read_flows(run_dir: str) -> Flows:
    """Read the spans in a run's folder. ValueError if they hold no exchange with storage."""
    exchanged: dict[str, Exchange] = defaultdict(Exchange)
    times_ns: list[int] = []

    def note(process: str, span: Span) -> None:
        sizes = span.args.get("bytes")
        if span.cat != "mark" or span.name not in ("get", "put") or not isinstance(sizes, dict):
            return
        of_executor = exchanged[executor_of(process)]
        of_executor.rows[span.name] += span.args.get("rows", 0)
        of_executor.num_bytes[span.name].update(sizes)
        times_ns[:] = (
            [min(times_ns[0], span.start_ns), max(times_ns[1], span.end_ns)]
            if times_ns
            else [span.start_ns, span.end_ns]
        )

    timeline = read_timeline(Path(run_dir, "spans"), note)
    require(bool(times_ns), "--run", "name the folder of a run of this recipe", run_dir)
    shares = by_executor(timeline.shares())
    return Flows(
        seconds=max(1, times_ns[1] - times_ns[0]) / NS_PER_S,
        waits={name: sum(share.waits.values()) for name, share in shares.items()},
        exchanged=exchanged,
    )


@dataclass(frozen=True, kw_only=True)
class Dataflow:
    """A graph, the executor of each stage by its name, where executors sit, and perhaps the
    measured flows."""

    graph: Graph
    executors: Mapping[str, str]
    places: Places
    flows: Flows | None = None

    def render(self) -> str:
        """Return two tables: the stages and where they run, and the columns that go between
        them."""
        return render([self._stages(), "", self._edges()])

    def draw(self) -> str:
        """Return the graph as Mermaid text, which GitHub and most editors draw."""
        lines = ["flowchart LR"]
        for stage in self.graph.stages.values():
            words = [stage.name, self._runner(stage), self._devices(stage)]
            lines.append(f'    {stage.name}["{"<br>".join(filter(None, words))}"]')
        for writer, reader, columns in self._all_edges():
            words = [", ".join(columns) or "drops", self._rate(writer, reader, columns)]
            lines.append(f'    {writer} -- "{"<br>".join(filter(None, words))}" --> {reader}')
        return "\n".join(lines) + "\n"

    def _stages(self) -> Table:
        titles = ("stage", "run by", "per", "processes", "on", "reads", "writes")
        rows = []
        for stage in self.graph.stages.values():
            cells = [
                stage.name,
                self._runner(stage),
                stage.per,
                self._processes(stage),
                self._devices(stage),
                " ".join(stage.reads),
                " ".join(column.name for column in stage.writes),
            ]
            if self.flows is not None:
                executor = self.executors[stage.name]
                rate = self.flows.rows_per_s(executor, "put" if stage.name == GENERATE else "get")
                wait = self.flows.waits.get(executor)
                cells += [f"{rate:,.0f}" if rate else "", f"{wait:.0%}" if wait is not None else ""]
            rows.append(cells)
        return whole_words((*titles, *(("rows/s", "waits") if self.flows else ())), rows, LIST_ROOM)

    def _edges(self) -> Table:
        rows = []
        for writer, reader, columns in self._all_edges():
            what = ", ".join(columns) or "drops"
            what += " (metadata)" * (SETTLE in (writer, reader))
            rate = self._rate(writer, reader, columns)
            rows.append([writer, reader, what, *([rate] if self.flows else [])])
        return whole_words(
            ("from", "to", "what", *(("measured",) if self.flows else ())), rows, EDGE_ROOM
        )

    def _all_edges(self) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """Yield the graph's edges, and those of stages that only drop, which lead to settle."""
        yield from self.graph.edges
        yield from ((each.name, SETTLE, ()) for each in self.graph.between if not each.writes)

    def _rate(self, writer: str, reader: str, columns: tuple[str, ...]) -> str:
        if self.flows is None or SETTLE in (writer, reader):
            return ""
        executor = self.executors[reader]
        num_rows = self.flows.rows_per_s(executor, "get")
        return f"{num_rows:,.0f} rows/s, {_size(self.flows.bytes_per_s(executor, columns))}/s"

    def _runner(self, stage: Stage) -> str:
        if isinstance(stage.run, FrozenModel):
            return f"{stage.run.checkpoint} (frozen)"
        if stage.is_external:
            return "processes outside the run"
        executor = self.executors[stage.name]
        return executor if executor != stage.name else f"{stage.run} of task.py"

    def _processes(self, stage: Stage) -> str:
        num_ranks = sum(map(len, self._ranks(stage))) or 1
        runs_code = stage.name == SCORE or stage.name == self.executors[stage.name]
        more = f" + {stage.workers}" * (runs_code and not stage.is_model and not stage.is_external)
        return f"{num_ranks}{more}"

    def _devices(self, stage: Stage) -> str:
        """Return the stage's devices in words, such as "host 0 GPU 0-7"."""
        gpus: dict[int, set[int]] = {}
        for device in (device for ranks in self._ranks(stage) for device in ranks):
            gpus.setdefault(device.host, set()).update([] if device.gpu is None else [device.gpu])
        parts = []
        for found in dict.fromkeys(map(frozenset, gpus.values())):
            hosts = sorted(host for host, numbers in gpus.items() if numbers == found)
            hosts_words = f"host{'s' * (len(hosts) > 1)} {_numbers(hosts)}"
            parts.append(hosts_words + (f" GPU {_numbers(sorted(found))}" if found else ""))
        return ", ".join(parts)

    def _ranks(self, stage: Stage) -> list[Sequence[Device]]:
        """Return the devices of the stage's processes: of each replica, or of one group of
        ranks."""
        executor = self.executors[stage.name]
        return [each for name, each in self.places.items() if name.partition("-")[0] == executor]


def render(parts: Iterable[RenderableType]) -> str:
    """Return these parts one below the other, in lines of at most WIDTH characters, or of the width
    that a `whole_words` table needs."""
    parts = [*parts]
    tables = [part for part in parts if isinstance(part, Table)]
    needed = [sum((each.min_width or 0) + GAP for each in table.columns) for table in tables]
    console = Console(width=max([WIDTH, *needed]), color_system=None)
    with console.capture() as capture:
        for part in parts:
            console.print(part, highlight=False, markup=False)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def whole_words(titles: Sequence[str], rows: Sequence[Sequence[str]], room: int) -> Table:
    """Return a table whose cells have lines of `room` characters, or of one longer word: a path or
    a column's name is never cut."""
    table = Table(box=None, pad_edge=False)
    wrapped = [
        [textwrap.wrap(cell, room, break_long_words=False, break_on_hyphens=False) for cell in row]
        for row in rows
    ]
    for title, *cells in zip(titles, *wrapped, strict=True):
        longest = max(len(line) for lines in ([title], *cells) for line in lines)
        table.add_column(title, min_width=longest, no_wrap=True)
    for row in wrapped:
        table.add_row(*("\n".join(lines) for lines in row))
    return table


def _size(num_bytes: float) -> str:
    power = 0
    while num_bytes >= 1000 and power < len(UNITS) - 1:
        num_bytes, power = num_bytes / 1000, power + 1
    return f"{num_bytes:.3g} {UNITS[power]}"


def _numbers(numbers: list[int]) -> str:
    """Return numbers as ranges: "0-2,5" for [0, 1, 2, 5]."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
