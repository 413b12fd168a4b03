"""What simulated executors did, from when to when, on the loop's clock.

Owns: the bars and the shares of time made of them. Does not own: when anything happens. Invariant:
bars of one executor do not overlap within a category, so shares are within 0 and 1.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

JOINT_S = 1e-9  # bars of one name that are no further apart are one


def kind(executor: str) -> str:
    """ "generator" for "generator-3"."""
    return executor.partition("-")[0]


@dataclass
class SimulatedTimeline:
    """Bars by executor ("generator-3"): (start, end, name, category), as `metrics/span.py` has."""

    bars: dict[str, list[tuple[float, float, str, str]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    step_ends_s: list[float] = field(default_factory=list)
    publishes_s: list[float] = field(default_factory=list)
    offered_s: dict[int, float] = field(default_factory=dict)
    """Version -> when the first replica was asked to receive it."""
    num_tokens: list[int] = field(default_factory=list)
    """Response tokens trained in each step."""
    ages: list[dict[int, int]] = field(default_factory=list)
    """Of each step: staleness -> trained tokens."""
    written: list[tuple[float, int, int]] = field(default_factory=list)
    """(when its group was settled, replica, tokens) of each rollout."""

    def record(
        self, executor: str, name: str, start_s: float, end_s: float, cat: str = "busy"
    ) -> None:
        """Add a bar that has ended."""
        if end_s <= start_s:
            return
        bars = self.bars[executor]
        if bars and bars[-1][2:] == (name, cat) and start_s - bars[-1][1] <= JOINT_S:
            start_s = bars.pop()[0]
        bars.append((start_s, end_s, name, cat))

    @contextmanager
    def bar(self, executor: str, name: str, cat: str = "busy") -> Iterator[None]:
        """Add a bar for what the block does, once it has ended."""
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        yield
        self.record(executor, name, start_s, loop.time(), cat)

    def forget_last_step(self) -> None:
        """Leave out the newest step and its publish."""
        for series in (self.step_ends_s, self.publishes_s, self.num_tokens, self.ages):
            series.pop()

    def shares(
        self, start_s: float, end_s: float, kind_of: Callable[[str], str] = kind
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Of this window: busy share by kind of executor ("generator"), wait share by "kind reason"
        ("generator requests"), both means over its members."""
        members: dict[str, int] = defaultdict(int)
        busy: dict[str, float] = defaultdict(float)
        waits: dict[str, float] = defaultdict(float)
        for executor, bars in self.bars.items():
            own = kind_of(executor)
            members[own] += any(cat in ("busy", "wait") for *_, cat in bars)
            for start, end, name, cat in bars:
                inside = max(0.0, min(end, end_s) - max(start, start_s)) / (end_s - start_s)
                if cat == "busy":
                    busy[own] += inside
                elif cat == "wait":
                    waits[f"{own} {name}"] += inside
        return (
            {each: busy[each] / number for each, number in members.items() if number},
            {key: share / members[key.partition(" ")[0]] for key, share in waits.items()},
        )
