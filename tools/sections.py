"""Sections of a measurement, each in a process of its own with a limit of its own.

A fact that a section gave is kept and written, however this section or a later one ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from harness import ROOT, Bench

sys.path.insert(0, str(ROOT))  # llamarl need not be installed

CPU_PATIENCE = 10  # times its limit: a CPU may be busy with other work, the card is not


class Facts(NamedTuple):
    """Values by name; `of` says which part of the section they are of, "" the whole."""

    values: Mapping[str, Any]
    of: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """`measure` is "module:function", of a function that takes a `gpu_bench.setting.Setting` and
    yields `Facts`. `limit_s` is for a GPU."""

    measure: str
    limit_s: float
    needs_gpu: bool = False


def add_options(bench: Bench, sections: Mapping[str, Section]) -> None:
    """Which sections, and on which device."""
    bench.option("--device", choices=("cuda", "cpu"), default="cuda")
    bench.option("--only", nargs="+", choices=sections, help="sections to run")


def run(
    bench: Bench,
    sections: Mapping[str, Section],
    names: Sequence[str],
    *,
    device: str,
    is_tiny: bool,
) -> None:
    """Run the sections of these names one after the other, and write the file after each. Exits
    with 1 if all of them failed."""
    import torch  # noqa: F401 - so that the machine's description names the GPU

    left_out = [name for name in names if device == "cpu" and sections[name].needs_gpu]
    if left_out:
        bench.add("left_out", ", ".join(left_out))
        bench.write()
    errors = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        for name in names:
            if name in left_out:
                continue
            place = Path(folder, name)
            place.mkdir()
            start_s = time.monotonic()
            error = _run(bench, name, sections[name], device, is_tiny, str(place))
            bench.add_all({"error": error, "section_s": time.monotonic() - start_s}, name)
            bench.write()
            errors.append(error)
    if errors and all(errors):
        sys.exit(1)


def _run(bench: Bench, name: str, section: Section, device: str, is_tiny: bool, folder: str) -> str:
    """Why the section failed, "" if it did not."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there, section, device, is_tiny, folder))
    limit_s = section.limit_s * (CPU_PATIENCE if device == "cpu" else 1)
    end_s = time.monotonic() + limit_s
    process.start()
    there.close()
    try:
        while here.poll(max(0.0, end_s - time.monotonic())):
            answer = here.recv()
            if isinstance(answer, str):
                return answer
            bench.add_all(answer.values, ", ".join(filter(None, [name, answer.of])))
        return f"took longer than {limit_s:g} s"
    except EOFError:
        process.join()
        return f"the process ended with code {process.exitcode}"
    finally:
        with suppress(ProcessLookupError):  # its own processes too, once it leads a group
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()


def _work(pipe: Connection, section: Section, device: str, is_tiny: bool, folder: str) -> None:
    """Send the facts of a section, and at the end why it failed."""
    os.setsid()
    try:
        import torch
        from gpu_bench.setting import Setting, full, tiny

        if device == "cpu":
            torch.set_num_threads(1)
        module, _, function = section.measure.partition(":")
        measure: Callable[[Setting], Iterator[Facts]] = getattr(import_module(module), function)
        for facts in measure((tiny if is_tiny else full)(device, folder)):
            pipe.send(facts)
        pipe.send("")
    except Exception as error:  # noqa: BLE001 - said in the result; the other sections go on
        traceback.print_exc()
        first = str(error).partition("\n")[0]
        pipe.send(f"{type(error).__name__}: {first}")
