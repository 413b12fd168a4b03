"""The kernels of decode attention without a GPU: interpreted on the CPU, and compiled for two."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from llamarl.device.devices import PLATFORMS
from tests.places import ROOT
from tests.random_search import searched

if TYPE_CHECKING:
    from triton import JITFunction

THREADS_PER_WARP = 32
MOST_REGISTERS = 128  # of a thread: four programs of four warps on a multiprocessor
MOST_SHARED_BYTES = 80 << 10  # two programs on a multiprocessor of an A100, which has 164 KiB
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
GEOMETRIES = [(7, 64), (8, 128), (16, 128), (8, 80)]
"""Query heads per key-value head, and head_dim."""


@pytest.fixture(autouse=True)
def has_triton() -> None:
    found = importlib.util.find_spec("triton")
    assert found, "Triton must be installed for these tests: pip install -r requirements.txt"


def interpret(*arguments: str) -> None:
    """Run the cases in a process whose Triton interprets."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.decode_attention_cases"]
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


@searched(few=50, many=400)
def test_the_kernels_write_what_torchs_attention_does(seeds: list[int]) -> None:
    interpret(*map(str, seeds))


def test_an_engine_decodes_with_them_what_it_decodes_without() -> None:
    interpret("engine")


def compiled(
    kernel: JITFunction[Any], constants: dict[str, int], types: list[str], capability: int
) -> tuple[int, int, int]:
    """Registers of a thread, bytes that it spills, and bytes of shared memory of a program."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from llamarl.generation.decode_attention import NUM_WARPS

    names = [name for name in kernel.arg_names if name not in constants]
    signature = dict(zip(names, types, strict=True)) | dict.fromkeys(constants, "constexpr")
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if signature[name] not in ("constexpr", "fp32")
    }
    target = GPUTarget("cuda", capability, THREADS_PER_WARP)
    source = ASTSource(kernel, signature, constants, aligned)
    made = triton.compile(source, target=target, options={"num_warps": NUM_WARPS})
    file = Path(os.environ["TRITON_CACHE_DIR"]) / "kernel.cubin"
    file.write_bytes(made.asm["cubin"])
    tool = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)]
    said = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    (registers,), (stack,), (local,) = (
        re.findall(rf"{name}:(\d+)", said) for name in ("REG", "STACK", "LOCAL")
    )
    return int(registers), int(stack) + int(local), made.metadata.shared


@pytest.mark.parametrize("capability", [80, 90], ids="sm_{}".format)
@pytest.mark.parametrize("dtype", NAMES, ids=str)
def test_they_compile_for_a_gpu_and_spill_nothing(
    dtype: torch.dtype, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from llamarl.generation import decode_attention as kernels

    cache, sums = f"*{NAMES[dtype]}", "*fp32"
    arguments = [cache, cache, cache, "*i64", sums, sums, "i32", "i32", "fp32"]
    for group, head_dim in GEOMETRIES:
        constants = kernels.splits_options(dtype, group, head_dim, 32768)
        most = compiled(kernels.attend_splits, constants, arguments, capability)
        assert most[0] <= MOST_REGISTERS, (group, head_dim)
        assert most[1] == 0, (group, head_dim)
        assert most[2] <= MOST_SHARED_BYTES, (group, head_dim)
        constants = kernels.combine_options(constants)
        registers, spilled, shared = compiled(
            kernels.combine_splits, constants, [sums, sums, "*i64", cache], capability
        )
        assert registers <= MOST_REGISTERS
        assert not spilled
        assert shared <= MOST_SHARED_BYTES


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
