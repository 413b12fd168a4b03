"""`llamarl train` in which the orders of rollouts take turns, step by step.

Times of steps in one run differ by what the machine does beside far less than those of two runs.
Step i of a run has the order `ORDERS[i % 3]`; the history learns from all.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from llamarl.lengths.ranker import History, Oracle, Ranker, Unranked
from llamarl.loop import skew
from llamarl.main import main
from llamarl.types import Request

ORDERS = ("none", "history", "oracle")


class Turns(History):
    """Expects what the ranker of the step expects."""

    def __init__(self) -> None:
        super().__init__()
        self._others: dict[str, Ranker] = {
            "none": Unranked(),
            "oracle": Oracle(attrgetter("replay_tokens")),
        }

    def expect(self, requests: Sequence[Request]) -> list[int]:
        order = ORDERS[requests[0].step % len(ORDERS)] if requests else "none"
        if order == "history":
            return super().expect(requests)
        return self._others[order].expect(requests)


if __name__ == "__main__":
    skew.make_ranker = lambda config: Turns()
    main()
