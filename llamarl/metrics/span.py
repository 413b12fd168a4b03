"""Spans, which record what each process did, from when to when, in its file `<process>.jsonl`.

Categories: `busy` (useful work), `wait` (the name says for what), `publish`, `mark` (anything
else). Example line: {"name": "decode", "cat": "busy", "start_ns": 5, "end_ns": 9, "tokens": 64}.
Times are nanoseconds of the host's monotonic clock. A process that starts appends an origin line,
which converts its clock to Unix time and begins a session, and a `start` mark. Any other line is
skipped. A file that is half full is replaced, in one move, by one with an origin line as its head,
a sum for each session, category and name in Unix time, and the newest spans as they were recorded:
a file stays below its limit, and busy and wait time, counts and bytes stay exact."""

import json
import math
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llamarl.metrics.estimates import EMPTY, length, subtract, union

FLUSH_SPANS = 256  # a killed process loses at most this many spans
FLUSH_NS = 10**9  # what is older is written when the next span is recorded
# The old file and the new one exist together for a moment, hence the shares of the limit.
LIMIT_BYTES = 16 * 1024 * 1024  # of one process on disk; 40,000 spans or more
FULL_SHARE = 1 / 2  # when old spans are summed
KEPT_SHARE = 1 / 4  # the newest spans, which stay as they are
COUNTS = {"tokens", "rows", "spans"}  # what is added up over spans
BYTES = "bytes"  # by column: added up too
ORIGIN = "unix_minus_monotonic_ns"
MAX_NS = 2**63  # three centuries


class Span(NamedTuple):
    """One finished span as read back; times are Unix nanoseconds, so processes compare.

    `session` counts the starts of the process within one run folder, from 0.
    """

    session: int
    name: str
    cat: str
    start_ns: int
    end_ns: int
    args: dict[str, Any]

    @property
    def track(self) -> tuple[str, str]:
        return self.cat, self.name

    @property
    def is_sum(self) -> bool:
        """True if this stands for several spans of one name, with their counts and bytes. A busy
        one or a wait is as long as they were together; any other reaches from the first to the last
        of them."""
        return "spans" in self.args


class Spans:
    """Records spans of one process into `folder/<process>.jsonl`; `folder` None keeps nothing.

    It is thread-safe. `process` is unique in a run, such as `generator-0` or `trainer-1`. Its file
    takes at most `limit_bytes`; older spans are then summed.
    """

    def __init__(
        self, process: str, folder: str | Path | None, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        self.process = process
        self._limit_bytes = limit_bytes
        self._num_bytes = 0
        self._summing: threading.Thread | None = None
        self._lines: list[str] = []
        self._lock = threading.Lock()
        self._path = Path(folder) / f"{process}.jsonl" if folder is not None else None
        origin_ns = time.time_ns() - (now_ns := time.monotonic_ns())  # at one moment
        self._flushed_ns = now_ns
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                self._lines.append("")  # ends the line that a killed session left unfinished
                self._num_bytes = self._path.stat().st_size
            self._lines.append(json.dumps({"process": process, ORIGIN: origin_ns}))
            self.record("start", now_ns, now_ns, "mark")

    @contextmanager
    def span(self, name: str, cat: str = "busy", **args: Any) -> Iterator[None]:
        """Record the block as one span, also when it raises."""
        start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self.record(name, start_ns, time.monotonic_ns(), cat, **args)

    def record(self, name: str, start_ns: int, end_ns: int, cat: str = "busy", **args: Any) -> None:
        """Add a span measured by the caller."""
        if self._path is None:
            return
        line = {"name": name, "cat": cat, "start_ns": start_ns, "end_ns": end_ns, **args}
        with self._lock:
            self._lines.append(json.dumps(line))
            if len(self._lines) >= FLUSH_SPANS or end_ns - self._flushed_ns >= FLUSH_NS:
                self._flush(self._path)

    def close(self) -> None:
        """Write what is still in memory; it goes with the run's folder if that is removed."""
        with self._lock:
            if self._path is not None:
                with suppress(FileNotFoundError):
                    self._flush(self._path)
            if self._summing is not None:
                self._summing.join()

    def _flush(self, path: Path) -> None:
        if self._summing is not None:
            self._summing.join()  # no wait, unless tens of thousands of spans come in a second
        self._flushed_ns = time.monotonic_ns()
        text = "".join(line + "\n" for line in self._lines)
        self._lines.clear()
        with path.open("a") as file:
            file.write(text)
        self._num_bytes += len(text)
        if self._num_bytes >= FULL_SHARE * self._limit_bytes:
            # It runs beside the process's work, as reading spans back takes tenths of a second.
            self._summing = threading.Thread(target=self._sum_up, args=(path,), daemon=True)
            self._summing.start()

    def _sum_up(self, path: Path) -> None:
        self._num_bytes = sum_old_spans(path, self._limit_bytes)


class SpanReader:
    """Reads one process's file while it grows, also one that is not there yet: every `read`
    continues where the last one ended. Spans that were summed meanwhile are not read as sums."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.process = self.path.stem
        self._parser = SpanParser()
        self._num_read: int | None = None  # bytes of recorded lines, summed ones too

    def read(self) -> Iterator[Span]:
        """Yield spans not read yet, in the order they were recorded (by their end, nearly)."""
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            head = file.readline()
            num_summed, kept_from = _extent_of_sums(head)
            offset = 0
            if self._num_read is not None:
                offset = kept_from + max(0, self._num_read - num_summed)
                if self._num_read < num_summed:
                    self._parser.parse(head)  # the session of the first span that is kept
            file.seek(offset)
            for text in file:
                if not text.endswith(b"\n"):
                    break  # still being written
                offset += len(text)
                self._num_read = num_summed + max(0, offset - kept_from)
                if (span := self._parser.parse(text)) is not None:
                    yield span


class SpanFolder:
    """Reads the files of all processes of a run, or of those of one `executor`; if an executor has
    more than `max_files`, so many of them, evenly spread."""

    def __init__(
        self, folder: str | Path, *, executor: str | None = None, max_files: int = 2**31
    ) -> None:
        self._folder, self._executor, self._max_files = folder, executor, max_files
        self._seen: set[Path] = set()
        self.readers: list[SpanReader] = []

    def read(self) -> Iterator[tuple[str, Span]]:
        """Yield (process, span) of each span not read yet, process by process."""
        new: dict[str, list[Path]] = defaultdict(list)
        for path in span_files(self._folder):
            executor = executor_of(path.stem)
            if path not in self._seen and self._executor in (None, executor):
                new[executor].append(path)
        for executor, paths in new.items():
            self._seen.update(paths)
            num_open = sum(executor_of(reader.process) == executor for reader in self.readers)
            if room := self._max_files - num_open:
                self.readers += map(SpanReader, paths[:: math.ceil(len(paths) / room)])
        for reader in self.readers:
            for span in reader.read():
                yield reader.process, span


class SpanParser:
    """Turns the lines of one file, in order, into spans."""

    def __init__(self) -> None:
        self.session = -1
        self.unix_minus_monotonic_ns = 0

    def parse(self, text: bytes) -> Span | None:
        """Return the span in a line; None if the line is something else or damaged."""
        try:
            line = json.loads(text)
            if "cat" not in line:
                if ORIGIN in line:
                    self.unix_minus_monotonic_ns = _whole(line[ORIGIN])
                    self.session = _whole(line.get("session", self.session + 1))
                return None
            is_sum = "spans" in line
            offset_ns = 0 if is_sum else self.unix_minus_monotonic_ns
            session = _whole(line.pop("session")) if is_sum else self.session
            start_ns, end_ns = (_whole(line.pop(key)) + offset_ns for key in ("start_ns", "end_ns"))
            name, cat = line.pop("name"), line.pop("cat")
            sizes = line.get(BYTES)
            counts = [line[key] for key in line.keys() & COUNTS]
            for count in (*counts, *(sizes.values() if isinstance(sizes, dict) else ())):
                _whole(count)
            is_named = type(name) is type(cat) is str
            return Span(session, name, cat, start_ns, end_ns, line) if is_named else None
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None


def sum_old_spans(path: Path, limit_bytes: int) -> int:
    """Replace all but the newest spans of a span file by sums, in one move. Returns its new size.

    The file must not be written to before it returns."""
    data = path.read_bytes()
    num_summed, kept_from = _extent_of_sums(data[: data.find(b"\n") + 1])
    newest = max(0, len(data) - int(limit_bytes * KEPT_SHARE))
    cut = max(kept_from, data.rfind(b"\n", 0, newest) + 1)
    parser, sessions = SpanParser(), defaultdict[int, list[Span]](list)
    for text in data[:cut].split(b"\n"):
        if (span := parser.parse(text)) is not None:
            sessions[span.session].append(span)
    found = [each._asdict() for spans in sessions.values() for each in sums_of(spans)]
    sums = "".join(json.dumps(each | each.pop("args")) + "\n" for each in found)
    head = {
        "process": path.stem,
        ORIGIN: parser.unix_minus_monotonic_ns,
        "session": parser.session,
        "summed_bytes": num_summed + cut - kept_from,
        "sums_bytes": len(sums),
    }
    unfinished = path.with_name(path.name + ".tmp")
    num_bytes = unfinished.write_bytes(f"{json.dumps(head)}\n{sums}".encode() + data[cut:])
    os.replace(unfinished, path)
    return num_bytes


def sums_of(spans: Sequence[Span]) -> Iterator[Span]:
    """Yield a sum for each category and name of a session, the first of them for its `start` mark.

    Busy time and waits, in the precedence of `shares.shares_of`, follow each other up to where the
    last of them ended. Waits come first, as before a run's first step, so that its shares stay
    right."""
    tracks = defaultdict[tuple[str, str], list[Span]](list)
    for span in spans:
        tracks[span.track].append(span)
    taken, lengths_ns = EMPTY, {}
    for track in sorted(key for key in tracks if key[0] in ("busy", "wait")):
        times = np.array([(span.start_ns, span.end_ns) for span in tracks[track]], dtype=np.int64)
        own = subtract(union(times), taken)
        taken, lengths_ns[track] = union(np.concatenate([taken, own])), length(own)
    last_ns = int(taken[-1, 1]) if len(taken) else spans[0].start_ns
    end_ns = last_ns - sum(lengths_ns.values())
    for track in sorted(tracks, key=lambda key: key[0] == "busy"):  # else as they appeared
        members = tracks[track]
        first_ns, last_ns = min(s.start_ns for s in members), max(s.end_ns for s in members)
        if track in lengths_ns:
            first_ns, last_ns = end_ns, end_ns + lengths_ns[track]
            end_ns = last_ns
        counts, sizes = Counter[str](), Counter[str]()
        for span in members:
            counts.update({"spans": 1} | {key: span.args[key] for key in COUNTS & span.args.keys()})
            if isinstance(span.args.get(BYTES), dict):
                sizes.update(span.args[BYTES])
        args = {**counts, **({BYTES: dict(sizes)} if sizes else {})}
        yield Span(members[0].session, track[1], track[0], first_ns, last_ns, args)


def _extent_of_sums(head: bytes) -> tuple[int, int]:
    """Return, from the first line of a file, the bytes of the lines that were summed, and the place
    where the lines begin that were not; 0, 0 if none were summed."""
    try:
        line = json.loads(head)
        num_summed, sums_bytes = (_whole(line[key]) for key in ("summed_bytes", "sums_bytes"))
        return max(0, num_summed), len(head) + max(0, sums_bytes)
    except (ValueError, TypeError, KeyError, RecursionError):
        return 0, 0


def _whole(number: object) -> int:
    if type(number) is not int or not 0 <= abs(number) < MAX_NS:
        raise ValueError(f"a time or count must be a whole number, got {number!r}")
    return number


def span_files(folder: str | Path) -> list[Path]:
    """Return `<process>.jsonl` of every process, in a stable order."""
    return sorted(Path(folder).glob("*.jsonl"))


def executor_of(process: str) -> str:
    """Return the executor of a process: `generator-0` and `generator-0-1` (rank 1 of replica 0) ->
    `generator`."""
    return process.partition("-")[0]
