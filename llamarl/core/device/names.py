"""The names of devices and kinds of GPU, and what the driver says of this machine's cards."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CPU: Final = "cpu"
GPU: Final = "cuda"
DEVICES = [CPU, GPU]
"""The choices of `device`; one that is added here needs a platform too."""

GPU_INDEX = "LOCAL_RANK"  # index of this process's GPU on its host; vLLM reads it too
VISIBLE = "CUDA_VISIBLE_DEVICES"
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""The variables that gloo and NCCL read the network interface from; without them, they take the one
that the host name resolves to."""
PROCESS_VARIABLES = {
    # Else the first error of any NCCL group, such as one with a replica that died, ends the
    # process after eight minutes, as torch's monitor takes it for a hang of all groups.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


def is_gpu(device: str) -> bool:
    """Return whether this choice of a recipe is a card: each rank has one of its own, whose memory
    it fills, and is bound by what that kind of card can do."""
    return device != CPU


def dtype_for(device: str, dtype: str) -> str:
    """Return `dtype`, or in place of "auto" the dtype that `device` computes best in."""
    best = "bfloat16" if is_gpu(device) else "float32"
    return best if dtype == "auto" else dtype


AUTO = "auto"  # the card that a process finds
SIZE = re.compile(r"(\d+(?:\.\d+)?)GB")
SIZE_TOLERANCE = 0.1  # GPUs sold with 80 GB have 79e9 to 85e9 bytes
OTHER_CARDS = {"D", "TI", "SUPER", "LAPTOP", "MIG", "ADA"}
"""Words that make a name another card's: an RTX 4090 D is no RTX 4090."""


def size_bytes(kind: str) -> float | None:
    """Return the memory of a kind that is only a size, such as 24GB, in bytes; None for others."""
    found = SIZE.fullmatch(kind)
    return float(found[1]) * 1e9 if found else None


def is_kind(kind: str, name: str, memory_bytes: int) -> bool:
    """Return whether a card with this name and memory is of the kind. "" and AUTO fit any card; a
    size fits any card with as much memory, or more."""
    if kind in ("", AUTO):
        return True
    least_bytes = size_bytes(kind)
    if least_bytes is not None:
        return memory_bytes >= least_bytes * (1 - SIZE_TOLERANCE)
    model, _, size = kind.rpartition("-")
    wanted = set(model.upper().split("-"))
    words = set(re.findall(r"[A-Z0-9]+", name.upper()))
    is_same = wanted <= words and not (words - wanted) & OTHER_CARDS
    wanted_bytes = size_bytes(size)
    assert wanted_bytes is not None, kind
    return is_same and abs(memory_bytes / wanted_bytes - 1) <= SIZE_TOLERANCE


VERSION_FILE = Path("/proc/driver/nvidia/version")
DRIVER_FILES = str(VERSION_FILE), "/dev/nvidiactl", "/dev/dxg"
ALLOCATOR_VARIABLES = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"  # old and new name
TOOL = "nvidia-smi"
QUERY = ("--query-gpu=name,memory.total,compute_cap,memory.free", "--format=csv,noheader,nounits")
TIMEOUT_S = 30.0
MIB = 2**20


@dataclass(frozen=True, slots=True, order=True)
class FoundCard:
    """A card of this machine; those with less memory compare as smaller. `capability` is its
    compute capability, `free_bytes` the memory that no program has taken."""

    memory_bytes: int
    name: str
    capability: float
    free_bytes: int


def has_driver() -> bool:
    """Return whether this machine has a GPU's driver."""
    return any(map(os.path.exists, DRIVER_FILES))


def cards_here() -> list[FoundCard]:
    """Return the cards that this process may use, as the driver's tool says; [] if there is none,
    or the tool does not say."""
    visible = os.environ.get(VISIBLE, "")
    which = [f"--id={visible}"] if visible else []
    if shutil.which(TOOL) is None:
        return []
    command = [TOOL, *QUERY, *which]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        rows = [line.rsplit(",", 3) for line in done.stdout.splitlines() if line.strip()]
        cards = [
            FoundCard(int(mib) * MIB, name, float(number), int(free) * MIB)
            for name, mib, number, free in rows
        ]
    except (OSError, subprocess.TimeoutExpired, ValueError):  # another tool, or a sick driver
        return []
    return [] if done.returncode else cards
