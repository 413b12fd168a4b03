"""What is known of lengths that rollouts will have, and which replicas are to take the long ones.

Owns: the expectations of a run, how the replicas are split, and the refits, in a thread. Does not
own: the rankers and the search (`lengths/`), or which replica gets which group (`balance.py`).
Invariant: nothing here waits: expectations and splits follow from the last refit that ended.

A step ends with its last rollout, so the longest ones start first. With whole batches all rollouts
start in this order: Graham's, whose last one ends at most 4/3 as late as with the best. Where parts
of a step are trained while others are written, that would keep the trainer waiting for the first
long ones, and give it the rest at once: there only the longest `tail_share` of a step come first,
and the others follow in the order of admission.

The staleness bound holds whatever is expected. Its proof (`gate.py`) needs the order in which
groups are admitted and consumed, and that no replica below a request's `min_version` starts it; the
replica and the order of starting are free.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from llamarl.config import DispatchConfig
from llamarl.lengths.latency import Latency
from llamarl.lengths.ranker import Ranker, Unranked, make_ranker
from llamarl.lengths.split import Limits, TailSplit, find_split
from llamarl.types import FinishReason, Purpose, Request, RolloutInfo

Steps = Callable[[], Iterable[tuple[int, float]]]
"""New decode steps: (rollouts in one, seconds)."""


class Skew:
    """`ranker` None: the config's. `read_steps` may take long: it is called in a thread; by default
    it finds none. `is_streamed`: parts of a step are trained before it is whole."""

    def __init__(
        self,
        config: DispatchConfig,
        limits: Limits,
        read_steps: Steps = list,
        ranker: Ranker | None = None,
        *,
        is_streamed: bool = False,
    ) -> None:
        self.split = TailSplit()
        self._is_streamed = is_streamed
        # Expected tokens of those that start before the others.
        self._first_from = math.inf if is_streamed else 0
        self._config, self._limits, self._read_steps = config, limits, read_steps
        self._ranker = make_ranker(config) if ranker is None else ranker
        self._latency = Latency()
        self._refitting: asyncio.Future[None] | None = None

    @property
    def is_on(self) -> bool:
        """Whether anything is ever expected."""
        return not isinstance(self._ranker, Unranked)

    def expect(self, requests: list[Request]) -> list[Request]:
        """The same requests, with the length expected of each, and its precedence. Rollouts that
        come alone are compared with those that came together last."""
        if not self.is_on:
            return requests
        tokens = self._ranker.expect(requests)
        num_first = round(self._config.tail_share * len(tokens))
        if self._is_streamed and num_first and len(set(tokens)) > 1:
            self._first_from = sorted(tokens, reverse=True)[num_first - 1]
        return [
            replace(each, expected_tokens=n, precedence=n if n >= self._first_from else 0)
            for each, n in zip(requests, tokens, strict=True)
        ]

    def observe(self, request: Request, row: RolloutInfo) -> None:
        """A rollout has stopped: learn from it if it ended by itself, or at its limit."""
        is_whole = row.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if is_whole and request.purpose is Purpose.TRAIN:
            self._ranker.observe(request, row.num_generated)

    def plan(
        self, groups: Sequence[Sequence[Request]], num_replicas: int, *, may_split: bool = True
    ) -> None:
        """Split so many replicas for these groups, which are a step's, and refit beside the loop.

        Raises what the last refit raised.
        """
        if not self.is_on:
            return
        lengths = [max(request.expected_tokens for request in group) for group in groups]
        self.split = TailSplit()
        if may_split and self._latency.is_known and min(lengths) > 0 and num_replicas > 1:
            self.split = find_split(
                lengths,
                num_replicas,
                max(map(len, groups)),
                self._latency,
                self._limits,
                tail_share=self._config.tail_share,
                objective=self._config.objective,
            )
        if self._refitting is None or self._refitting.done():
            if self._refitting is not None:
                self._refitting.result()
            self._refitting = asyncio.ensure_future(
                asyncio.to_thread(self._refit, num_replicas > 1)
            )

    def _refit(self, has_siblings: bool) -> None:
        self._ranker.refit()
        if has_siblings:  # else there is nothing to split
            self._latency.fit(self._read_steps())
