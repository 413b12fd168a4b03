"""The metrics of a step about its routers: the load of the experts, the routers' entropy, and how
far the trainer's routers have moved from the generator's choices."""

from __future__ import annotations

import torch
import torch.distributed as dist

from llamarl.model.experts import RoutingStats

BUSIEST, ENTROPY, MOVED = "experts/busiest_share", "experts/router_entropy", "experts/moved_share"


class RoutingTotals:
    """The numbers of the routers over the micro-batches of a step, kept on the device until it
    ends."""

    def __init__(self) -> None:
        self._sums: list[torch.Tensor] = []  # float64 [layers, experts + 3]

    def add(self, stats: RoutingStats) -> None:
        """Count one micro-batch of this rank."""
        num_tokens = torch.full_like(stats.entropy, stats.num_tokens)
        columns = (stats.entropy, stats.num_moved, num_tokens)
        parts = [stats.counts.double(), *(each.double().unsqueeze(1) for each in columns)]
        self._sums.append(torch.cat(parts, 1))

    def reduce(self) -> tuple[dict[str, float], tuple[float, ...]]:
        """Return the scalars over all ranks, by tag, and the load of each expert of each layer: its
        choices over those that it would have if all were alike. Nothing without experts; all ranks
        call it."""
        if not self._sums:
            return {}, ()
        sums = torch.stack(self._sums).sum(0)
        if dist.get_world_size() > 1:
            dist.all_reduce(sums)
        sums = sums.cpu()
        counts, (entropy, num_moved, num_tokens) = sums[:, :-3], sums[:, -3:].unbind(1)
        chosen = counts.sum(1).clamp(min=1)
        tokens = num_tokens.clamp(min=1)
        scalars = {
            BUSIEST: (counts.amax(1) / chosen).mean().item(),
            ENTROPY: (entropy / tokens).mean().item(),
            MOVED: (num_moved / chosen).mean().item(),
        }
        loads = counts / chosen.unsqueeze(1) * counts.shape[1]
        return scalars, tuple(loads.flatten().tolist())
