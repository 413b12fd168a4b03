"""How many replicas should take the long rollouts of a step: StreamRL's Algorithm 2.

Owns: the cost of a set of rollouts on some replicas, and the search. Does not own: which replica
gets which group (`loop/balance.py`). Invariant: a pure function, and what it returns costs at most
what any other split costs, or no split at all, by the same model.

Long rollouts want small batches: a step takes longer the more rollouts it decodes, and a long one
needs many steps. So the longest `tail_share` of a step's groups get replicas of their own. A set of
groups of n rollouts each, on k replicas, takes

    M = n * ceil(groups / k)                                rollouts on a replica
    BS = min(M, max_num_seqs, kv_tokens / L)                of them at once
    PTL(BS) * max(L_longest, L * ceil(M / BS))              seconds

with L the mean expected length of the set. The paper has PTL(BS) * L * ceil(M / BS): without the
longest one a set that mixes long and short rollouts would seem to end as early as its mean. The two
sets run side by side, so the later one counts (`max`); the paper's digests add them (`sum`).

Expected lengths are less extreme than the true ones, and a set that is expected to be long holds
some short rollouts. So a split must promise `LEAST_GAIN`, or all replicas take all groups.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

LEAST_GAIN = 0.15  # of the seconds without a split


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one replica holds: most rollouts at once, and most tokens (0: as many as those need)."""

    max_num_seqs: int
    kv_tokens: int = 0

    def batch_size(self, num_rollouts: int, mean_tokens: float) -> int:
        """How many of these rollouts run at once, at least one."""
        most = min(num_rollouts, self.max_num_seqs)
        if self.kv_tokens:
            most = min(most, int(self.kv_tokens / mean_tokens))
        return max(1, most)


@dataclass(frozen=True, slots=True)
class TailSplit:
    """`num_long` replicas take the groups that are expected to have `long_from` tokens or more;
    0: all replicas take all."""

    num_long: int = 0
    long_from: int = 0


def duration(
    lengths: Sequence[int],
    num_replicas: int,
    num_rollouts: int,
    latency: Callable[[float], float],
    limits: Limits,
) -> float:
    """Seconds that groups of `num_rollouts` each, of these expected lengths, take on the replicas:
    the equation above."""
    if not lengths:
        return 0.0
    mean = sum(lengths) / len(lengths)
    on_each = num_rollouts * -(-len(lengths) // num_replicas)
    size = limits.batch_size(on_each, mean)
    return latency(size) * max(max(lengths), mean * -(-on_each // size))


def find_split(
    lengths: Sequence[int],
    num_replicas: int,
    num_rollouts: int,
    latency: Callable[[float], float],
    limits: Limits,
    *,
    tail_share: float,
    objective: str,
) -> TailSplit:
    """The best of all splits of the replicas, for the groups of a step.

    `lengths` int [groups]: the expected tokens of a rollout of each. `objective`: max | sum. Of
    splits that cost the same, the one with fewer replicas for the long groups.
    """
    ordered = sorted(lengths, reverse=True)
    num_long = round(tail_share * len(ordered))
    together_s = duration(ordered, num_replicas, num_rollouts, latency, limits)
    best, best_s = TailSplit(), (1 - LEAST_GAIN) * together_s
    if not 0 < num_long < len(ordered) or ordered[num_long - 1] == ordered[num_long]:
        return best
    for count in range(1, num_replicas):
        long_s = duration(ordered[:num_long], count, num_rollouts, latency, limits)
        rest = num_replicas - count
        rest_s = duration(ordered[num_long:], rest, num_rollouts, latency, limits)
        seconds = max(long_s, rest_s) if objective == "max" else long_s + rest_s
        if seconds < best_s:
            best, best_s = TailSplit(count, ordered[num_long - 1]), seconds
    return best
