"""The state that all simulated executors of a run share: the record of what they did on the loop's
clock, the rollouts that replicas write and others read, the layouts reported to the publisher, and
the time of a call to another process.

An executor computes only on its own `cores`; a rollout is there once `put` has returned, and not
before; all ranks of an executor on one host count as one. Bars of one executor do not overlap
within a category, so shares are within 0 and 1."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from llamarl.core.config import Config
from llamarl.core.records import NO_VERSION, Request, RolloutInfo, StageResult, VersionSpan
from llamarl.generator.protocol import PartialOutput
from llamarl.metrics.span import executor_of
from llamarl.planner.simulation.clock import Cores
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.workload import Workload
from llamarl.publish.layout import Box, ParameterLayout, RankLayout
from llamarl.publish.reshard import SplitRoute

DIFFERENCE = 1e-6  # between a trainer's log-probs and those of a replica


class Rollout(NamedTuple):
    """A rollout as a trainer needs it: lengths, versions, and the largest difference between its
    own log-probs and the replica's."""

    num_prompt_tokens: int
    num_tokens: int
    spans: tuple[VersionSpan, ...]
    difference: float


class SimulatedRollouts:
    """The rollouts that replicas have written, by row id: those of an episode in a row for each
    conversation."""

    def __init__(self) -> None:
        self._rows: dict[int, RolloutInfo] = {}

    async def put(self, stopped: Sequence[tuple[Request, RolloutInfo]], writer: str) -> None:
        """Keep the rollouts that have stopped."""
        kept = (row for _, row in stopped if row.episode is None or not row.episode.is_lost)
        self._rows.update((each.row_id, each) for row in kept for each in row.sequences)

    async def get(self, row_ids: list[int]) -> list[Rollout]:
        """Return the rollouts in this order; KeyError if one is not there."""
        rows = [self._rows[row_id] for row_id in row_ids]
        return [Rollout(r.num_prompt_tokens, r.num_tokens, r.spans, DIFFERENCE) for r in rows]

    def find(self, row_ids: list[int]) -> list[RolloutInfo]:
        """Return the rows among these that are kept."""
        return [self._rows[row_id] for row_id in row_ids if row_id in self._rows]

    async def written(self, requests: list[Request]) -> dict[int, PartialOutput]:
        """Return the tokens that these resumed rollouts have written so far."""
        return {each.row_id: tokens_of(self._rows[each.row_id]) for each in requests}

    async def add_rewards(self, scores: list[StageResult], writer: str) -> None:
        """Take the rewards of scored rollouts, which are not kept here."""

    def forget(self, row_ids: Iterable[int]) -> None:
        """Forget these rollouts, which storage has retired, with all their conversations."""
        for row_id in row_ids:
            if (row := self._rows.pop(row_id, None)) is not None:
                for each in row.conversations:
                    self._rows.pop(each.row_id, None)


def tokens_of(row: RolloutInfo) -> PartialOutput:
    """Return the tokens of a row: those of its versions, then those of observations."""
    observed = VersionSpan(version=NO_VERSION, num_tokens=row.num_tokens - row.num_generated)
    return joined(PartialOutput(), [*row.spans, observed])


def joined(written: PartialOutput, spans: Sequence[VersionSpan]) -> PartialOutput:
    """Return `written` with tokens of these spans at its end; ids are 1, log-probs DIFFERENCE."""
    sizes = np.array([span.num_tokens for span in spans], np.int64)
    added = np.repeat(np.array([span.version for span in spans], np.int32), sizes)
    versions = np.concatenate([written.versions, added])
    num_tokens = len(versions)
    return PartialOutput(
        ids=np.ones(num_tokens, np.int32),
        logprobs=np.full(num_tokens, DIFFERENCE, np.float32),
        versions=versions,
    )


JOINT_S = 1e-9  # bars of one name that are no further apart are one


@dataclass
class SimulatedTimeline:
    """The bars of each executor ("generator-3"): (start, end, name, category), as in
    `metrics/span.py`."""

    bars: dict[str, list[tuple[float, float, str, str]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    step_ends_s: list[float] = field(default_factory=list)
    publishes_s: list[float] = field(default_factory=list)
    offered_s: dict[int, float] = field(default_factory=dict)
    """The time when the first replica was asked to receive a version, by version."""
    num_tokens: list[int] = field(default_factory=list)
    """The response tokens trained in each step."""
    ages: list[dict[int, int]] = field(default_factory=list)
    """The number of trained tokens by staleness, for each step."""
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
        """Add a bar for the work of the block, once it has ended."""
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        yield
        self.record(executor, name, start_s, loop.time(), cat)

    def forget_last_step(self) -> None:
        """Leave out the newest step and its publish."""
        for series in (self.step_ends_s, self.publishes_s, self.num_tokens, self.ages):
            series.pop()

    def shares(
        self, start_s: float, end_s: float, kind_of: Callable[[str], str] = executor_of
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Return two shares of this window: the busy share by kind of executor ("generator"), and
        the wait share by "kind reason" ("generator requests"), both means over the executors of the
        kind."""
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


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The recipe, its workload, the store of rollouts, and the record of what happened."""

    config: Config
    workload: Workload
    rollouts: SimulatedRollouts = field(default_factory=SimulatedRollouts)
    timeline: SimulatedTimeline = field(default_factory=SimulatedTimeline)


class SimulatedExecutor:
    """An executor whose work takes the time that `costs` says, on the processors `cores`."""

    def __init__(self, setting: Setting, costs: Costs, cores: Cores) -> None:
        self._config, self._workload = setting.config, setting.workload
        self._rollouts, self._timeline = setting.rollouts, setting.timeline
        self._costs, self._cores = costs, cores
        self.writer = ""
        """The name that signs what it writes into storage; set by the code that starts it."""
        self._lock = asyncio.Lock()  # of executors that compute for one call at a time

    async def _travel(self) -> None:
        """Wait while a call is on its way to this process."""
        if self._costs.message_s:
            await asyncio.sleep(self._costs.message_s)


PARAMETER = "all"


class Layouts(SimulatedExecutor):
    """An executor with one rank on each of `hosts`, each with the made-up parameter."""

    def __init__(
        self, setting: Setting, costs: Costs, cores: Cores, *, hosts: tuple[str, ...]
    ) -> None:
        super().__init__(setting, costs, cores)
        self._hosts = hosts

    async def source_layout(self) -> list[RankLayout]:
        box = Box(start=(0,), stop=(1,), buffer="all", offset=0, strides=(1,))
        layout = ParameterLayout(shape=(1,), dtype="float32", boxes=(box,))
        return [
            RankLayout(rank=rank, host=host, parameters={PARAMETER: layout})
            for rank, host in enumerate(self._hosts)
        ]

    target_layout = source_layout

    async def connect_target(self, replica: int, route: SplitRoute | None) -> list[None]:
        return [None for _ in self._hosts]
