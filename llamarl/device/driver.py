"""What the driver says of this machine's cards.

Owns: the questions that bring no context up. Does not own: what torch makes of a card (`cuda.py`).
Invariant: imports no torch.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from llamarl.device.names import VISIBLE

VERSION_FILE = Path("/proc/driver/nvidia/version")
DRIVER_FILES = str(VERSION_FILE), "/dev/nvidiactl", "/dev/dxg"
ALLOCATOR_VARIABLES = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"  # old and new name
TOOL = "nvidia-smi"
QUERY = ("--query-gpu=name,memory.total,compute_cap,memory.free", "--format=csv,noheader,nounits")
TIMEOUT_S = 30.0
MIB = 2**20


@dataclass(frozen=True, slots=True, order=True)
class FoundCard:
    """A card; those with less memory are smaller. `capability`: its compute capability;
    `free_bytes`: what no program has taken."""

    memory_bytes: int
    name: str
    capability: float
    free_bytes: int


def has_driver() -> bool:
    """Whether this machine has a GPU's driver."""
    return any(map(os.path.exists, DRIVER_FILES))


def cards_here() -> list[FoundCard]:
    """The cards that this process may use, as the driver's tool says; [] if there is none, or the
    tool does not say."""
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
