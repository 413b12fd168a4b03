"""What a recipe's processes have in memory now, beside what its plan counts with.

Owns: the measurement. Does not own: the forecast. Invariant: on GPUs what others have taken is not
counted, for it was taken before.
"""

import os
from contextlib import suppress
from pathlib import Path

from llamarl.config import Config
from llamarl.config.rank_assignment import needs_gpu
from llamarl.device.driver import TOOL, cards_here
from llamarl.models.architecture import Architecture
from llamarl.planner.memory.ranks import HOST, forecast_memory
from llamarl.user_code.supervisor import descendants

GIB = 2**30
OWN = ("Pss_Anon:", "Pss_Shmem:")  # of smaps_rollup, in KiB; memory of files is left out


def free_bytes() -> list[int]:
    """Of each card."""
    return [card.free_bytes for card in cards_here()]


def compare_with_plan(config: Config, architecture: Architecture, free_before: list[int]) -> str:
    """In words; ValueError if more is in use than the plan counts with."""
    ranks = forecast_memory(config, architecture).ranks
    if needs_gpu(config):
        taken = [before - now for before, now in zip(free_before, free_bytes(), strict=True)]
        if not taken:
            return f"{TOOL} does not say"
        used_bytes, where = max(taken), "on the fullest card"
        planned_bytes = max(rank.total_bytes for rank in ranks if rank.executor != HOST)
    else:
        found = descendants(os.getpid()) or {os.getpid()}
        used_bytes, where = sum(map(_own_bytes, found)), f"in {len(found)} processes"
        planned_bytes = next(rank.total_bytes for rank in ranks if rank.executor == HOST)
    words = f"{used_bytes / GIB:.2f} GiB {where}; the plan counts with {planned_bytes / GIB:.2f}"
    if used_bytes > planned_bytes:
        raise ValueError(
            f"{words}: the recipe may need more than llamarl plan says; leave room for it "
            "(generator.max_num_seqs, trainer.tokens_per_micro_batch)"
        )
    return words


def _own_bytes(process: int) -> int:
    with suppress(OSError):  # it has ended
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(OWN))
    return 0
