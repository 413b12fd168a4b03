"""How long each rollout will probably be, from how long the finished rollouts of this run were.

Owns: the rankers and what they remember. Does not own: when they are refitted (`loop/skew.py`) or
what the expectation is used for (`loop/balance.py`, `generation/scheduler.py`). Invariant: `expect`
answers at once, from the last refit; a ranker that has not ranked the newest rollouts better than
chance expects the same of all prompts, which is no ranking at all.

Lengths are learnt relative to their mean: the mean follows the policy when it writes more or less,
while which prompts are the long ones changes more slowly. None of this is in a checkpoint: a run
that resumes learns it again in its first steps.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import islice
from operator import attrgetter
from typing import Protocol

import numpy as np

from llamarl.config import DispatchConfig
from llamarl.lengths.linear import Ids, LinearModel, features, sum_up
from llamarl.types import Request

MEAN_HALF_LIFE = 1024  # rollouts
MAX_COUNT = 32  # a prompt's newest rollout counts at least 1 / MAX_COUNT in its mean
MAX_PROMPTS = 2**20  # remembered; beyond them the oldest are forgotten
HALF_LIVES = (128, 1024, 8192)  # prompts: of models that follow a drift, or know more
OWN_COUNT = 2.0  # rollouts of a prompt that count as much as what a model says of it
NEWEST_SHARE = 0.5  # of the newest refit in a skill
LEAST_SKILL = 0.2  # beyond what a correlation over some dozens of prompts is by chance


class Ranker(Protocol):
    """Says which rollouts will be long. `refit` may run in a thread, beside the other methods."""

    def observe(self, request: Request, num_tokens: int) -> None:
        """A training rollout has ended by itself, or at its limit."""

    def refit(self) -> None:
        """Learn from what was observed since the last time."""

    def expect(self, requests: Sequence[Request]) -> list[int]:
        """The tokens that each will probably have, at least 1; 0 where nothing is known."""


class Oracle:
    """Knows each length beforehand: what a ranker could gain at most."""

    def __init__(self, length_of: Callable[[Request], int]) -> None:
        self._length_of = length_of

    def observe(self, request: Request, num_tokens: int) -> None:
        """Nothing is new."""

    def refit(self) -> None:
        """Nothing is learnt."""

    def expect(self, requests: Sequence[Request]) -> list[int]:
        return [self._length_of(request) for request in requests]


class Unranked(Oracle):
    """Knows nothing, of any request."""

    def __init__(self) -> None:
        super().__init__(lambda request: 0)


class Skill:
    """How well guesses fitted what came: the mean of their correlations, newest ones foremost."""

    def __init__(self) -> None:
        self.value = 0.0

    def score(self, guesses: np.ndarray, found: np.ndarray) -> None:
        """Take in float64 [prompts] each; guesses that are all equal say nothing."""
        if len(found) > 2 and np.ptp(guesses) > 0 and np.ptp(found) > 0:
            new = float(np.corrcoef(guesses, found)[0, 1])
            self.value += NEWEST_SHARE * (new - self.value)


class History:
    """Expects of a prompt what its own rollouts were, and of one that has none the mean."""

    def __init__(self) -> None:
        self._new: list[tuple[Ids, int]] = []
        self._own: dict[Ids, tuple[int, float]] = {}  # rollouts, mean of their relative lengths
        self._weight, self._mean = 0.0, 0.0  # of all lengths
        self._skill = Skill()

    def observe(self, request: Request, num_tokens: int) -> None:
        self._new.append((request.prompt_ids, max(1, num_tokens)))

    def refit(self) -> None:
        """Score what was expected of the new rollouts' prompts, then learn."""
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
        """Take in relative lengths float64 [prompts], each the mean of so many rollouts."""
        for prompt, length, count in zip(prompts, relative.tolist(), counts, strict=True):
            before, mean = self._own.pop(prompt, (0, 0.0))
            total = min(before + count, max(count, MAX_COUNT))
            self._own[prompt] = total, mean + (length - mean) * count / total
        for prompt in list(islice(self._own, max(0, len(self._own) - MAX_PROMPTS))):
            del self._own[prompt]

    def _guess(self, prompts: list[Ids]) -> np.ndarray:
        """Relative lengths float64 [prompts]."""
        return np.array([self._own.get(prompt, (0, 1.0))[1] for prompt in prompts])


class Learnt(History):
    """Expects of a prompt that has no rollouts what a model learnt from others. Of one that has n
    it mixes both: the prompt's own mean counts n / (n + OWN_COUNT). Of several models, with
    memories of different lengths, that with the most skill counts."""

    def __init__(self) -> None:
        super().__init__()
        self._models = [(Skill(), LinearModel(half_life)) for half_life in HALF_LIVES]
        self._best = self._models[0][1]

    def _learn(self, prompts: list[Ids], relative: np.ndarray, counts: list[int]) -> None:
        super()._learn(prompts, relative, counts)
        x = features(prompts)
        sums = sum_up(x, relative - 1.0)
        for skill, model in self._models:
            skill.score(model.predict(x), relative)
            model.fit(sums)
        self._best = max(self._models, key=lambda pair: pair[0].value)[1]

    def _guess(self, prompts: list[Ids]) -> np.ndarray:
        pairs = [self._own.get(prompt, (0, 1.0)) for prompt in prompts]
        counts, means = np.array(pairs).reshape(-1, 2).T
        modelled = 1.0 + self._best.predict(features(prompts))
        return (counts * means + OWN_COUNT * modelled) / (counts + OWN_COUNT)


def make_ranker(config: DispatchConfig) -> Ranker:
    """The ranker that the recipe chooses."""
    rankers: dict[str, Callable[[], Ranker]] = {
        "none": Unranked,
        "history": History,
        "model": Learnt,
        "oracle": lambda: Oracle(attrgetter("replay_tokens")),
    }
    return rankers[config.ranker]()
