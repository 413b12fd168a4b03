"""Memory of this machine that may still be used, as the kernel and a container's limits say.

Without torch: the controller's process asks before any other process starts.
"""

from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")  # where a container sees its own limits


def available_bytes() -> int:
    """Memory this process may still use: the host's available memory or the container's rest."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            host_bytes = int(line.split()[1]) * 1024
    return min([host_bytes, *_container_rest_bytes()])


def _container_rest_bytes() -> list[int]:
    """What the container's limit (cgroup v2) leaves, page cache counted as free; [] if none."""
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used_bytes = int((CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except FileNotFoundError:
        return []
    cache_bytes = int(stat["inactive_file"]) + int(stat["active_file"])
    return [] if limit == "max" else [int(limit) - used_bytes + cache_bytes]
