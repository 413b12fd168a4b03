"""What samples say about a model: accuracy, pass@k, maj@k, and the interval of each.

Owns: the estimators and the interval. Does not own: which samples there are (`loop/evaluation.py`)
or how figures look. Invariant: pure functions of counts; each estimate is unbiased over the samples
of a prompt, and its interval follows from how much prompts differ.
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from llamarl.groups import Share

Z_95 = 1.959964  # standard deviations on either side that hold 95 % of a normal distribution


def pass_at(k: int, num_samples: int, num_correct: int) -> float:
    """The probability that one of k samples is correct, from n of which c are:
    1 - C(n - c, k) / C(n, k) (Chen et al., arXiv 2107.03374)."""
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def majority_at(k: int, answers: Sequence[Hashable | None], correct: Sequence[bool]) -> float:
    """The probability that the answer which most of k samples give is correct, over all choices of
    k of these n samples; answers that are equally frequent win equally often.

    A sample without an answer (None) has no voice, and k samples without any answer are wrong. With
    f_a = c_a / n_a, the share of correct ones among those that answer a, it is

        sum over a, m, t of  f_a C(n_a, m) W(a, m, t) / (1 + t) / C(n, k)

    where W counts the choices of k - m of the other samples in which t other answers come m times
    and none comes more often.
    """
    sizes = Counter(answer for answer in answers if answer is not None)
    right: Counter[int] = Counter()  # samples, by how frequent their answer is: such win alike
    for answer, is_correct in zip(answers, correct, strict=True):
        if answer is not None and is_correct:
            right[sizes[answer]] += 1
    num_silent = len(answers) - sizes.total()
    total = 0.0
    for size, num_correct in right.items():
        others = [*sizes.values()]
        others.remove(size)
        for m in range(1, min(size, k) + 1):
            ways = _ways(others, num_silent, m, k - m)
            won = float((ways / np.arange(1, len(ways) + 1)).sum())
            total += num_correct / size * math.comb(size, m) * won
    return total / math.comb(len(answers), k)


def _ways(sizes: Sequence[int], num_silent: int, m: int, count: int) -> NDArray[np.float64]:
    """W(t): choices of `count` samples, at most m of each answer and any of the silent, in which t
    answers come m times; [count // m + 1]."""
    ways = np.zeros((count // m + 1, count + 1))  # by t, and how many are chosen
    for i in range(min(num_silent, count) + 1):
        ways[0, i] = math.comb(num_silent, i)
    for size in sizes:
        before, ways = ways, np.zeros_like(ways)
        for i in range(min(size, m, count) + 1):
            chosen = math.comb(size, i) * before[:, : count + 1 - i]
            if i < m:
                ways[:, i:] += chosen
            else:
                ways[1:, i:] += chosen[:-1]
    found: NDArray[np.float64] = ways[:, count]
    return found


def effective_count(sums: Sequence[float], counts: Sequence[int]) -> float:
    """How many independent samples say as much about a share as these, which come by prompt: the
    `sums` of values from 0 to 1, and how many values each sum has.

    Samples of one prompt are alike, so n samples of each of P prompts say less than n P. The share
    p = sum(s_i) / sum(m_i) has, over prompts, the variance

        V = P / (P - 1) sum((s_i - p m_i)^2) / sum(m_i)^2

    and p (1 - p) / V is the count (Korn and Graubard 1998), at least the number of prompts and at
    most that of samples. With one sample per prompt it is their number.
    """
    values, sizes = np.array(sums, dtype=np.float64), np.array(counts, dtype=np.float64)
    num_prompts, num_samples = len(values), float(sizes.sum())
    share = values.sum() / num_samples
    spread = float(((values - share * sizes) ** 2).sum())
    if num_prompts < 2 or not spread:
        return float(num_prompts)
    variance = num_prompts / (num_prompts - 1) * spread / num_samples**2
    return float(np.clip(share * (1 - share) / variance, num_prompts, num_samples))


def interval(share: float, count: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of `count` independent samples, within 0 and 1.

    (p + z^2 / 2n  -+  z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)
    """
    spread = Z_95 * math.sqrt(max(0.0, share * (1 - share)) / count + Z_95**2 / (4 * count**2))
    centre, scale = share + Z_95**2 / (2 * count), 1 + Z_95**2 / count
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def share_of(sums: Sequence[float], counts: Sequence[int]) -> Share:
    """The share with its interval, from a sum and a count per prompt: see `effective_count`."""
    value = sum(sums) / sum(counts)
    return Share(value, *interval(value, effective_count(sums, counts)))


def with_interval(share: Share, of: str = "") -> str:
    """Such as "98.4% of 512 (97.0% to 99.2%)"."""
    return f"{share.value:.1%}{of and f' of {of}'} ({share.low:.1%} to {share.high:.1%})"


def with_margin(share: Share) -> str:
    """Such as "98.4% +-1.4": the longer of the two distances to the interval's ends."""
    margin = max(share.value - share.low, share.high - share.value)
    return f"{share.value:.1%} +-{100 * margin:.1f}"
