"""`llamarl check` on the emulated accelerator, in one process, with mistakes on purpose."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from rich.console import Console
from torch import Tensor

from llamarl.cli import check, check_trial
from llamarl.core.config import Config
from llamarl.core.device import names
from tests.emulated import module
from tests.emulated.accelerator import KIND, damage, in_every_thread
from tests.emulated.platform import RecordedGraphs, install
from tests.places import ROOT
from tests.recipe.composing import compose_recipe

RECIPE = ROOT / "recipes" / "quickstart"
CARD = "NVIDIA H100 80GB HBM3, 81559, 9.0, {free}"
GPU_RECIPE = [
    "cluster.backend=inline",
    "cluster.num_gpus_per_host=2",
    f"generator.device={KIND}",
    f"trainer.device={KIND}",
    "generator.dtype=float32",
    "trainer.compute_dtype=float32",
    "weights.staging=host",
    "weights.transport=shared_memory",
    "cluster.gpu=H100-80GB",
]


def many(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The change of tensors that are as large as weights."""
    return lambda tensor: change(tensor) if tensor.numel() > 500 else tensor


def whole_memory(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The change of memory that is moved as bytes."""
    return lambda tensor: change(tensor) if tensor.dtype == torch.uint8 else tensor


def stale(record: Callable[..., object]) -> Callable[..., object]:
    """Graphs that give again what they gave first."""

    def recorded(self: RecordedGraphs, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        first = compute()
        return lambda: first.clone()

    return recorded


def hang() -> None:
    """Waits for the device end long after the limit of a call."""
    check_trial.CALL_S = 4.0
    module.Event.synchronize = lambda self: time.sleep(6)  # type: ignore[method-assign]


MISTAKES: dict[str, Callable[[], object]] = {
    "none": lambda: None,
    "wrong products": lambda: damage.update({"aten::mm": lambda x: x * 1.05}),
    "bytes lost on the way": lambda: damage.update({"copy out": many(lambda x: x.fill_(0.5))}),
    "wrong gradient": lambda: damage.update({"aten::embedding_dense_backward": lambda x: 3 * x}),
    "a device that hangs": hang,
    "stale graphs": lambda: setattr(RecordedGraphs, "record", stale(RecordedGraphs.record)),
    "bytes lost in offload": lambda: damage.update({"copy out": whole_memory(lambda x: x.zero_())}),
    "no driver": lambda: setattr(names, "DRIVER_FILES", ()),
    "torch for CPUs": lambda: setattr(check.metadata, "version", lambda name: "2.13.0+cpu"),
}


async def check_with(
    rank: int, num_ranks: int, mistake: str, folder: str, overrides: list[str], card: str
) -> tuple[list[str], str]:
    """The lines that the command prints, and its error."""
    install()
    in_every_thread()
    names.DRIVER_FILES = ("/proc",)
    check.metadata = SimpleNamespace(version=lambda name: "2.13.0")
    torch.set_num_threads(1)
    MISTAKES[mistake]()
    tool = Path(folder) / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{card}'\necho '{card}'\n")
    tool.chmod(0o755)
    names.TOOL = str(tool)
    config: Config = compose_recipe(RECIPE, [*GPU_RECIPE, *overrides])
    config = replace(config, run_dir=f"{folder}/runs/run", recipe_dir=str(RECIPE))
    shown = io.StringIO()
    error = ""
    try:
        await check.check(config, Console(file=shown, width=300))
    except ValueError as raised:
        error = str(raised)
    return shown.getvalue().splitlines(), error
