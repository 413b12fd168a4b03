"""What a recipe may select as `device`, and the variables that libraries of devices read.

Owns: the names and what a choice of device means for a recipe. Does not own: how torch uses a
device (`platform.py`). Invariant: imports no torch, so the controller and the planner may ask.
"""

from typing import Final

CPU: Final = "cpu"
GPU: Final = "cuda"
DEVICES = [CPU, GPU]
"""What `device` may be; one that is added here has a platform too."""

GPU_INDEX = "LOCAL_RANK"  # index of this process's GPU on its host; vLLM reads it too
VISIBLE = "CUDA_VISIBLE_DEVICES"
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""What gloo and NCCL read the network interface from; without them, they take the one that the
host name resolves to."""
PROCESS_VARIABLES = {
    # Else the first error of any NCCL group, such as one with a replica that died, ends the
    # process after eight minutes, as torch's monitor takes it for a hang of all groups.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


def is_gpu(device: str) -> bool:
    """Whether this choice of a recipe is a card: each rank has one of its own, whose memory it
    fills, and is bound by what that kind of card can do."""
    return device != CPU


def dtype_for(device: str, dtype: str) -> str:
    """`dtype`; instead of "auto" what `device` computes best in."""
    best = "bfloat16" if is_gpu(device) else "float32"
    return best if dtype == "auto" else dtype
