"""The kernels of decode attention without a GPU: interpreted on the CPU, and compiled for two."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from llamarl.core.device.devices import PLATFORMS
from tests.places import ROOT
from tests.random_search import searched

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget

pytestmark = pytest.mark.full

THREADS_PER_WARP = 32
MOST_REGISTERS = 128  # of a thread: four programs of four warps on a multiprocessor
MOST_SHARED_BYTES = 80 << 10  # two programs on a multiprocessor of an A100, which has 164 KiB
GEOMETRIES = [(7, 64), (16, 128), (8, 80)]
"""Query heads per key-value head, and head_dim."""


@pytest.fixture(autouse=True)
def has_triton() -> None:
    found = importlib.util.find_spec("triton")
    assert found, (
        "Triton must be installed for these tests: pip install -r requirements/kernels.txt"
    )


def interpret(*arguments: str) -> None:
    """Run the cases in a process whose Triton interprets."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.generator.decode_attention_cases"]
    done = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@searched(few=10, many=400)
def test_the_kernels_write_what_torchs_attention_does(seeds: list[int]) -> None:
    interpret(*map(str, seeds))


@pytest.mark.long
def test_an_engine_decodes_with_them_what_it_decodes_without() -> None:
    interpret("engine")


class Driver:
    """Triton's driver of a GPU that is not there: it keeps the programs that it is given to load,
    (name, code, bytes of shared memory), and the grids that they are launched on."""

    def __init__(self, capability: int) -> None:
        self.capability, self.utils = capability, self
        self.programs: list[tuple[str, bytes, int]] = []
        self.grids: list[tuple[int, ...]] = []

    def get_current_target(self) -> GPUTarget:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, THREADS_PER_WARP)

    def get_current_device(self) -> int:
        return self.capability  # by which Triton keeps what it compiled

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": MOST_SHARED_BYTES}

    def load_binary(self, name: str, code: bytes, shared: int, device: int) -> tuple[int, ...]:
        self.programs.append((name, code, shared))
        return 0, 0, 0, 0, 1024  # threads of a program, at most

    def launcher_cls(self, source: object, metadata: object) -> Callable[..., None]:
        return lambda *arguments: self.grids.append(arguments[:3])


def resources(code: bytes, folder: Path) -> tuple[int, int]:
    """Registers of a thread, and bytes that it spills."""
    import triton

    file = folder / "kernel.cubin"
    file.write_bytes(code)
    tool = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)]
    said = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    (registers,), (stack,), (local,) = (
        re.findall(rf"{name}:(\d+)", said) for name in ("REG", "STACK", "LOCAL")
    )
    return int(registers), int(stack) + int(local)


@pytest.mark.parametrize(
    ("dtype", "capability"),
    [
        (torch.bfloat16, 90),
        pytest.param(torch.float32, 80, marks=pytest.mark.long),
        pytest.param(torch.bfloat16, 80, marks=pytest.mark.long),
        pytest.param(torch.float32, 90, marks=pytest.mark.long),
    ],
)
def test_they_compile_for_a_gpu_and_spill_nothing(
    dtype: torch.dtype, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launched as on a GPU, down to Triton's driver."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton.runtime import driver

    from llamarl.generator.engine.decode_attention import attend

    given = Driver(capability)
    monkeypatch.setattr(driver, "_active", given)
    for group, head_dim in GEOMETRIES:
        queries = torch.empty(64, 8 * group, head_dim, dtype=dtype, device="meta")
        cache = torch.empty(64, 8, 32768, head_dim, dtype=dtype, device="meta")
        attend(queries, cache, cache, torch.empty(64, dtype=torch.int64, device="meta"))
        assert given.grids[-2:] == [(32, 8, 64), (8 * group, 64, 1)]
    names = [name for name, *_ in given.programs]
    assert names.count("attend_splits") == len(GEOMETRIES)
    assert names.count("combine_splits") == len({head_dim for _, head_dim in GEOMETRIES})
    for name, code, shared in given.programs:
        registers, spilled = resources(code, tmp_path)
        assert registers <= MOST_REGISTERS, name
        assert spilled == 0, name
        assert shared <= MOST_SHARED_BYTES, name


def test_a_gpu_where_triton_cannot_be_set_up_keeps_torchs_attention(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No driver; and a card that is too old is not even tried."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for capability, warnings in (((7, 5), 0), ((9, 0), 1)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, c=capability: c)
        assert not PLATFORMS["cuda"].has_triton(torch.device("cuda", 0))
        assert len(caplog.records) == warnings
    assert "Triton cannot be set up" in caplog.text
