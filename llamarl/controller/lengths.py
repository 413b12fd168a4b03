"""The expected lengths of rollouts, from earlier ones of the same prompt or from a linear model,
and the split of replicas that follows from them."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

import numpy as np

from llamarl.core.config import DispatchConfig
from llamarl.core.records import Request

NUM_BUCKETS = 512  # token ids are hashed into as many counts
NUM_FEATURES = NUM_BUCKETS + 3
RIDGE = 3.0
FACTOR = np.uint64(0x9E3779B97F4A7C15)

Ids = tuple[int, ...]


def features(prompts: Sequence[Ids]) -> np.ndarray:
    """Return float64 [prompts, NUM_FEATURES]: a constant, the logarithm and the square root of the
    number of tokens, and how often each hashed token occurs, as a vector of length 1."""
    sizes = np.array([len(prompt) for prompt in prompts])
    ids = np.array([token for prompt in prompts for token in prompt], np.uint64)
    buckets = (ids * FACTOR >> np.uint64(40)) % np.uint64(NUM_BUCKETS)
    places = np.repeat(np.arange(len(prompts)), sizes) * NUM_BUCKETS + buckets.astype(np.int64)
    counts = np.bincount(places, minlength=len(prompts) * NUM_BUCKETS)
    bags = np.sqrt(counts).reshape(len(prompts), NUM_BUCKETS)
    bags /= np.maximum(np.sqrt(sizes)[:, None], 1.0)
    return np.column_stack([np.ones(len(prompts)), np.log1p(sizes), np.sqrt(sizes), bags])


class LinearModel:
    """A ridge regression in which an example counts half as much after `half_life` further ones.
    `fit` may run beside `predict`, which uses the weights of the last fit."""

    def __init__(self, half_life: float) -> None:
        self._half_life = half_life
        self._gram = np.zeros((NUM_FEATURES, NUM_FEATURES))  # sum of d x x'
        self._moment = np.zeros(NUM_FEATURES)  # sum of d x y
        self._weights: np.ndarray = np.zeros(NUM_FEATURES)

    def fit(self, x: np.ndarray, targets: np.ndarray) -> None:
        """Learn from the features of more prompts, and their `targets`, float64 [prompts]."""
        decay = 0.5 ** (len(x) / self._half_life)
        self._gram = decay * self._gram + x.T @ x
        self._moment = decay * self._moment + targets @ x
        self._weights = np.linalg.solve(self._gram + RIDGE * np.eye(NUM_FEATURES), self._moment)

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Return float64 [prompts] from the features of prompts; zeros before the first fit."""
        return x @ self._weights


NUM_KEPT = 64  # steps per size
SIZES_PER_DOUBLING = 4


class Latency:
    """The seconds of a decode step as a function of the number of rollouts in it, learnt from
    measured steps."""

    def __init__(self) -> None:
        self._steps: dict[int, deque[tuple[int, float]]] = {}  # by size, in quarters of a doubling
        self._sizes = np.zeros(0)
        self._seconds = np.zeros(0)

    @property
    def is_known(self) -> bool:
        """Whether steps of two sizes were measured."""
        return len(self._sizes) > 1

    def fit(self, steps: Iterable[tuple[int, float]]) -> None:
        """Learn from more decode steps, each given as (rollouts in it, seconds)."""
        for size, seconds in steps:
            if size > 0 and seconds > 0:
                quarter = round(SIZES_PER_DOUBLING * math.log2(size))
                self._steps.setdefault(quarter, deque(maxlen=NUM_KEPT)).append((size, seconds))
        blocks: list[tuple[float, float, int]] = []  # (mean seconds, their weight, sizes pooled)
        sizes = []
        for _, kept in sorted(self._steps.items()):
            sizes.append(float(np.mean([size for size, _ in kept])))
            blocks.append((float(np.median([s for _, s in kept])), float(len(kept)), 1))
            while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
                (one, many, n), (other, more, m) = blocks[-2:]
                blocks[-2:] = [((one * many + other * more) / (many + more), many + more, n + m)]
        self._seconds = np.repeat([s for s, _, _ in blocks], [n for _, _, n in blocks])
        self._sizes = np.array(sizes)

    def __call__(self, size: float) -> float:
        """Return the seconds of a step with `size` rollouts. ValueError if nothing was measured."""
        if not len(self._sizes):
            raise ValueError("a latency must be fitted before it is asked")
        beyond = size - self._sizes[-1]
        if beyond <= 0 or len(self._sizes) == 1:
            return float(np.interp(size, self._sizes, self._seconds))
        slope = np.ptp(self._seconds) / np.ptp(self._sizes)
        return float(self._seconds[-1] + beyond * slope)


LEAST_GAIN = 0.15  # of the seconds without a split


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The capacity of one replica: the most rollouts at once, and the most tokens (0: as many as
    those rollouts need)."""

    max_num_seqs: int
    kv_tokens: int = 0

    def batch_size(self, num_rollouts: int, mean_tokens: float) -> int:
        """Return how many of these rollouts run at once, at least one."""
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
    """Return the seconds that groups of `num_rollouts` rollouts each, of these expected lengths,
    take on the replicas: latency(b) max(longest, mean ceil(n / b)), where each replica has n
    rollouts and runs b of them at once."""
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
) -> TailSplit:
    """Return the best of all splits of the replicas for the groups of a step.

    `lengths` int [groups] are the expected tokens of a rollout of each group. A split costs the
    seconds of the side that ends last; among splits of equal cost the one with fewer replicas for
    the long groups is chosen.
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
        seconds = max(long_s, rest_s)
        if seconds < best_s:
            best, best_s = TailSplit(count, ordered[num_long - 1]), seconds
    return best


MEAN_HALF_LIFE = 1024  # rollouts
MAX_COUNT = 32  # a prompt's newest rollout counts at least 1 / MAX_COUNT in its mean
MAX_PROMPTS = 2**20  # remembered; beyond them the oldest are forgotten
HALF_LIVES = (128, 1024, 8192)  # prompts: of models that follow a drift, or know more
OWN_COUNT = 2.0  # rollouts of a prompt that count as much as what a model says of it
NEWEST_SHARE = 0.5  # of the newest refit in a skill
LEAST_SKILL = 0.2  # beyond what a correlation over some dozens of prompts is by chance


class Ranker:
    """Predicts which rollouts will be long; this one expects no length of any. `refit` may run in a
    thread, beside the other methods."""

    def observe(self, request: Request, num_tokens: int) -> None:
        """Note the length of a training rollout that has ended by itself, or at its limit."""

    def refit(self) -> None:
        """Learn from the rollouts that were observed since the last time."""

    def expect(self, requests: Sequence[Request]) -> list[int]:
        """Return the tokens that each rollout will probably have, at least 1; 0 where nothing is
        known."""
        return [0] * len(requests)


class Oracle(Ranker):
    """Knows each length beforehand, which shows the most that a ranker could gain."""

    def __init__(self, length_of: Callable[[Request], int]) -> None:
        self._length_of = length_of

    def expect(self, requests: Sequence[Request]) -> list[int]:
        return [self._length_of(request) for request in requests]


class Skill:
    """Measures how well guesses fitted the lengths that came: a mean of their correlations in which
    the newest count most."""

    def __init__(self) -> None:
        self.value = 0.0

    def score(self, guesses: np.ndarray, found: np.ndarray) -> None:
        """Take in guesses and lengths, float64 [prompts] each; guesses that are all equal are left
        out."""
        if len(found) > 2 and np.ptp(guesses) > 0 and np.ptp(found) > 0:
            new = float(np.corrcoef(guesses, found)[0, 1])
            self.value += NEWEST_SHARE * (new - self.value)


class History(Ranker):
    """Expects of a prompt the mean length of its own rollouts, and of a prompt that has none the
    mean of all."""

    def __init__(self) -> None:
        self._new: list[tuple[Ids, int]] = []
        self._own: dict[Ids, tuple[int, float]] = {}  # rollouts, mean of their relative lengths
        self._weight, self._mean = 0.0, 0.0  # of all lengths
        self._skill = Skill()

    def observe(self, request: Request, num_tokens: int) -> None:
        self._new.append((request.prompt_ids, max(1, num_tokens)))

    def refit(self) -> None:
        """Score the guesses for the prompts of the new rollouts, then learn from these."""
        new = self._new[:]
        if not new:
            return
        del self._new[: len(new)]  # more may have come meanwhile
        found = defaultdict[Ids, list[float]](list)
        for prompt, length in new:
            found[prompt].append(length)
        keep = 0.5 ** (len(new) / MEAN_HALF_LIFE) * self._weight
        total = sum(map(sum, found.values()))
        self._mean = (keep * self._mean + total) / (keep + len(new))
        self._weight = keep + len(new)
        prompts = list(found)
        relative = np.array([sum(each) / len(each) for each in found.values()]) / self._mean
        self._skill.score(self._guess(prompts), relative)
        self._learn(prompts, relative, [len(each) for each in found.values()])

    def expect(self, requests: Sequence[Request]) -> list[int]:
        if not requests or not self._weight:
            return [0] * len(requests)
        prompts = list({request.prompt_ids: None for request in requests})
        guesses = np.ones(len(prompts))
        if self._skill.value >= LEAST_SKILL:
            guesses = self._guess(prompts)
        tokens = dict(zip(prompts, np.rint(guesses * self._mean).astype(int).tolist(), strict=True))
        return [min(max(1, tokens[r.prompt_ids]), r.sampling.max_tokens) for r in requests]

    def _learn(self, prompts: list[Ids], relative: np.ndarray, counts: list[int]) -> None:
        """Take in relative lengths float64 [prompts], each the mean of `counts` rollouts."""
        for prompt, length, count in zip(prompts, relative.tolist(), counts, strict=True):
            before, mean = self._own.pop(prompt, (0, 0.0))
            total = min(before + count, max(count, MAX_COUNT))
            self._own[prompt] = total, mean + (length - mean) * count / total
        for prompt in list(islice(self._own, max(0, len(self._own) - MAX_PROMPTS))):
            del self._own[prompt]

    def _guess(self, prompts: list[Ids]) -> np.ndarray:
        """Return relative lengths, float64 [prompts]."""
        return np.array([self._own.get(prompt, (0, 1.0))[1] for prompt in prompts])


class Learnt(History):
    """Expects of a prompt without rollouts the length that a model learnt from other prompts. For a
    prompt with n rollouts it mixes both: the prompt's own mean counts n / (n + OWN_COUNT). Of
    several models, with memories of different lengths, the one with the most skill counts."""

    def __init__(self) -> None:
        super().__init__()
        self._models = [(Skill(), LinearModel(half_life)) for half_life in HALF_LIVES]
        self._best = self._models[0][1]

    def _learn(self, prompts: list[Ids], relative: np.ndarray, counts: list[int]) -> None:
        super()._learn(prompts, relative, counts)
        x = features(prompts)
        for skill, model in self._models:
            skill.score(model.predict(x), relative)
            model.fit(x, relative - 1.0)
        self._best = max(self._models, key=lambda pair: pair[0].value)[1]

    def _guess(self, prompts: list[Ids]) -> np.ndarray:
        pairs = [self._own.get(prompt, (0, 1.0)) for prompt in prompts]
        counts, means = np.array(pairs).reshape(-1, 2).T
        modelled = 1.0 + self._best.predict(features(prompts))
        return (counts * means + OWN_COUNT * modelled) / (counts + OWN_COUNT)


def make_ranker(config: DispatchConfig) -> Ranker:
    """Return the ranker that the recipe chooses."""
    rankers: dict[str, Callable[[], Ranker]] = {
        "none": Ranker,
        "history": History,
        "model": Learnt,
        "oracle": lambda: Oracle(attrgetter("replay_tokens")),
    }
    return rankers[config.ranker]()
