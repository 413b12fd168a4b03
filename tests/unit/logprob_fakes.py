"""Replicas and a trainer that answer a log-prob check with known differences."""

import asyncio

from llamarl.algorithms.losses.aipo import AIPOConfig
from llamarl.dataflow.graph import make_graph
from llamarl.loop.logprob_check import LogprobCheck
from llamarl.loop.rollouts import Rollouts
from llamarl.types import FinishReason, Prompt, RolloutInfo, Sampling, VersionSpan
from tests.fakes import WatchedStorage
from tests.unit.planner_recipes import make_recipe

SAMPLING = Sampling(temperature=0.7, max_tokens=256, stop_token_ids=(1,))


PROMPTS = [Prompt(prompt_id=i, text="", token_ids=(5, i)) for i in range(3)]


class FakeDispatch:
    """Replicas that write what they are asked at once, with the version they serve."""

    def __init__(self, replicas):
        self.versions = dict.fromkeys(replicas, 0)
        self.asked = []
        self.is_broken = False
        self.never_come = set()  # replicas whose rollouts do not stop
        self.units = {}
        self.replica_of = {}  # by row
        self.stopped = asyncio.Queue()

    @property
    def replicas(self):
        return self.versions

    @property
    def balance(self):
        return self

    def unit_near(self, index):
        return self.units.get(index)

    async def submit(self, requests):
        self.asked += [(request.replica, request) for request in requests]
        if self.is_broken:
            raise ValueError("prompts must have a token, got none")
        for request in requests:
            index, is_lost = request.replica, request.replica not in self.versions
            self.replica_of[request.row_id] = index
            if index in self.never_come:
                continue
            versions = () if is_lost else self.versions[index]
            versions = versions if isinstance(versions, tuple) else (versions,)
            row = RolloutInfo(
                row_id=request.row_id,
                num_prompt_tokens=2,
                num_tokens=2 * len(versions),
                spans=tuple(VersionSpan(version=v, num_tokens=2) for v in versions),
                finish_reason=FinishReason.ABORTED if is_lost else FinishReason.LENGTH,
                replica=index,
            )
            self.stopped.put_nowait(row)

    async def collect(self):
        return [await self.stopped.get()]


class FakeTrainer:
    """`noise(replica)` is the difference of a row of that replica."""

    def __init__(self, dispatch):
        self.dispatch = dispatch
        self.noise = lambda replica: 1e-5
        self.asked = []

    async def infer(self, row_ids):
        assert row_ids, "a collective for nothing"
        self.asked.append(row_ids)
        return [self.noise(self.dispatch.replica_of[row_id]) for row_id in row_ids]


class Setting:
    """A log-prob check among fakes, `publish` and `check` as the controller calls them."""

    def __init__(self, replicas=(0, 1), mode="fail"):
        graph = make_graph(make_recipe(algorithm=AIPOConfig(kl_coefficient=0.1)))
        self.dispatch = FakeDispatch(replicas)
        self.trainer, self.storage = FakeTrainer(self.dispatch), WatchedStorage()
        self.rollouts = Rollouts(self.dispatch, {}, graph, self.storage)
        self.serving = None
        self.num_rows = 0
        self.logprob_check = LogprobCheck(
            dispatch=self.dispatch,
            rollouts=self.rollouts,
            trainer=self.trainer,
            allocate_rows=self.allocate,
            prompts=PROMPTS,
            sampling=SAMPLING,
            seed=7,
            mode=mode,
        )

    def allocate(self, count, unit):
        self.num_rows += count
        return range(self.num_rows - count, self.num_rows)

    async def publish(self, version, *, serves=None):
        for replica in list(self.dispatch.versions):
            self.dispatch.versions[replica] = version if serves is None else serves
            self.logprob_check.committed(replica, version)
        await self.pass_time()

    async def pass_time(self):
        """Until what was asked for has been written."""
        if self.serving is None:
            self.serving = asyncio.create_task(self.rollouts.serve())
        for _ in range(100):
            await asyncio.sleep(0)

    async def start(self):
        await self.publish(0)
        return await self.logprob_check.check(0)
