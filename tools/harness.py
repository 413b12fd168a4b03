"""The frame of every benchmark: arguments, rounds by turns, medians with their spread, the file.

Within a round every way has its turn, and a ratio compares two ways of one round.

The file of `--json FILE` holds {"bench", "commit", "date", "machine", "command", "figures",
"rounds"}, and "notes" if they are written in. A figure is {"name", "value", "unit"}, and where it
has them "case" (which setting, way or workload it belongs to), "spread" (lowest and highest of the
rounds) and "goal" (">= 1.2", "> 1" or "<= 0.05"). `value` is a number, a text, a list of numbers,
or null for what was not measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import operator
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
UNITS = {  # end of a figure's name -> unit, the first that fits
    "tokens_per_s": "tokens/s",
    "gb_per_s": "GB/s",
    "bytes_per_s": "bytes/s",
    "tflop_per_s": "TFLOP/s",
    "_per_s": "1/s",
    "_bytes": "bytes",
    "_ms": "ms",
    "_us": "µs",
    "_s": "s",
}
RELATIONS = {">=": operator.ge, ">": operator.gt, "<=": operator.le}  # of a goal
Values = dict[str, float]
Rounds = Mapping[str, Sequence[Values]]
"""By case: what each round gave."""


class Bench:
    """One benchmark's arguments and figures; `goals` is the goal of a figure by its name."""

    def __init__(self, doc: str | None, goals: Mapping[str, str] | None = None) -> None:
        self._parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
        self._goals = goals or {}
        self._figures: list[dict[str, Any]] = []
        self.option("--json", type=Path, help="write the figures here")

    def option(self, *names: str, **more: Any) -> None:
        """One more argument, as argparse takes it."""
        self._parser.add_argument(*names, **more)

    def parse(self) -> argparse.Namespace:
        """The arguments of the command line."""
        arguments = self._parser.parse_args()
        self._path: Path | None = arguments.json
        return arguments

    def add(self, name: str, value: Any, case: str = "", spread: Sequence[float] = ()) -> None:
        """Keep a figure and print it. NaN is not measured."""
        if isinstance(value, float) and math.isnan(value):
            value = None
        unit = next((unit for end, unit in UNITS.items() if name.endswith(end)), "")
        figure: dict[str, Any] = {"name": name, "value": value, "unit": unit}
        if case:
            figure["case"] = case
        if spread and min(spread) < max(spread):
            figure["spread"] = [min(spread), max(spread)]
        if goal := self._goals.get(name, ""):
            figure["goal"] = goal
        self._figures.append(figure)
        print(f"{case:40} {name:32} {shown(figure)}", flush=True)

    def add_all(self, values: Mapping[str, Any], case: str = "") -> None:
        """A figure for each name."""
        for name, value in values.items():
            self.add(name, value, case)

    def add_medians(self, rounds: Rounds) -> None:
        """The median over the rounds, with its spread, of each case and name."""
        for case, found in rounds.items():
            for name, median in medians(found).items():
                self.add(name, median, case, [each[name] for each in found])

    def write(self, rounds: object = None, name: str = "") -> None:
        """Write the file, if one was asked for. `rounds` is what lies behind the figures, `name`
        the benchmark's if it is not the program's. A file that is there already keeps its
        notes."""
        if self._path is None:
            return
        known = json.loads(self._path.read_text()) if self._path.exists() else {}
        document = {
            "bench": name or Path(sys.argv[0]).stem.removeprefix("bench_"),
            "commit": _said("git", "describe", "--always", "--dirty"),
            "date": datetime.date.today().isoformat(),
            "machine": machine(),
            "command": self._command(),
            "figures": self._figures,
            "rounds": rounds or {},
        }
        notes = {"notes": known["notes"]} if "notes" in known else {}
        self._path.write_text(dump(document | notes))

    def _command(self) -> str:
        """What was typed, without the place of the file."""
        words = re.sub(r"--json[= ]\S+", "--json FILE", " ".join(sys.argv[1:]))
        return f"python tools/{Path(sys.argv[0]).name} {words}"


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The values of a file by case and name; those without a case under ""."""
    found: dict[str, dict[str, Any]] = {}
    for figure in json.loads(path.read_text())["figures"]:
        found.setdefault(figure.get("case", ""), {})[figure["name"]] = figure["value"]
    return found


def turns(ways: Iterable[str], num_rounds: int) -> Iterator[tuple[int, str]]:
    """(round, way) for every way in each round; every second round goes backwards, so that none
    always follows the same other."""
    names = list(ways)
    for number in range(num_rounds):
        for name in names[:: -1 if number % 2 else 1]:
            yield number, name


def seconds(run: Callable[[], object]) -> float:
    """Wall time of one call."""
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median over the rounds of the ratio within one."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def medians(rounds: Sequence[Values]) -> Values:
    """Of each name over the rounds."""
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def means(rounds: Sequence[Values]) -> Values:
    """Of each name over the rounds."""
    return {name: statistics.mean(each[name] for each in rounds) for name in rounds[0]}


def machine() -> dict[str, Any]:
    """What the figures come from."""
    cpu = Path("/proc/cpuinfo").read_text().partition("model name")[2].partition("\n")[0]
    torch = sys.modules.get("torch")
    has_gpu = torch is not None and torch.cuda.is_available()
    return {
        "cpu": cpu.strip("\t :") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9),
        "gpu": torch.cuda.get_device_name() if torch is not None and has_gpu else "none",
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "load": round(os.getloadavg()[2], 1),
    }


def is_met(figure: Mapping[str, Any]) -> bool | None:
    """Whether a figure reaches its goal: every number of it, and of a bare spread both ends. None:
    it has no goal, or was not measured."""
    values = figure["value"] if figure["value"] is not None else figure.get("spread")
    if "goal" not in figure or values is None:
        return None
    relation, _, limit = figure["goal"].partition(" ")
    numbers = values if isinstance(values, list) else [values]
    if relation not in RELATIONS:
        raise ValueError(f"a goal must begin with one of {list(RELATIONS)}, got {figure['goal']!r}")
    return all(RELATIONS[relation](each, float(limit)) for each in numbers)


def shown(figure: Mapping[str, Any]) -> str:
    """A figure as text: value, spread, unit, goal, and whether that was missed."""
    value, spread = figure["value"], figure.get("spread")
    between = " to ".join(map(number, spread)) if spread else ""
    text = between if value is None else number(value)
    if value is not None and spread:
        text += f" ({between})"
    text = " ".join(filter(None, [text or "-", figure.get("unit", "")]))
    met = is_met(figure)
    if met is not None:
        text += f" (goal {figure['goal']}{'' if met else ', **missed**'})"
    return text


def number(value: Any) -> str:
    """Four digits of a number; a text as it is."""
    if isinstance(value, list):
        return ", ".join(map(number, value))
    if isinstance(value, str) or (len(str(value)) <= 6 and abs(value) < 1000):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def dump(document: Mapping[str, Any]) -> str:
    """JSON with one figure, one note and one case of the rounds a line."""

    def lines(value: Any) -> str:
        if isinstance(value, list) and value:
            return "[\n" + ",\n".join(f"    {json.dumps(each)}" for each in value) + "\n  ]"
        if isinstance(value, dict) and any(
            isinstance(each, list | dict) for each in value.values()
        ):
            items = (f"    {json.dumps(key)}: {json.dumps(each)}" for key, each in value.items())
            return "{\n" + ",\n".join(items) + "\n  }"
        return json.dumps(value)

    body = ",\n".join(f"  {json.dumps(key)}: {lines(value)}" for key, value in document.items())
    return f"{{\n{body}\n}}\n"


def _said(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
