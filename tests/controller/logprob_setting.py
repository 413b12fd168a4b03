"""A log-prob check of replicas that differ from the trainer by what a test says."""

import asyncio
from types import SimpleNamespace

from llamarl.controller.logprob_check import LogprobCheck
from llamarl.core.config import EmbeddedConfig, WeightsConfig
from llamarl.core.records import FinishReason, Prompt, Sampling
from tests.fakes import RolloutSetting, stopped
from tests.planner.planner_recipes import make_recipe

SAMPLING = Sampling(temperature=0.7, max_tokens=256, stop_token_ids=(1,))


PROMPTS = [Prompt(prompt_id=i, text="", token_ids=(5, i)) for i in range(3)]


class NoisyTrainer:
    """`noise(replica)` is the difference of a row of that replica."""

    def __init__(self, replica_of):
        self.replica_of = replica_of
        self.noise = lambda replica: 1e-5
        self.asked = []

    async def infer(self, row_ids):
        assert row_ids, "a collective for nothing"
        self.asked.append(row_ids)
        return [self.noise(self.replica_of[row_id]) for row_id in row_ids]


class CheckSetting(RolloutSetting):
    """A log-prob check among fakes, `publish` and `check` as the controller calls them. Rollouts
    are written at once, with the version that `dispatch.replicas` has; those of replicas in
    `never_come` do not stop."""

    def __init__(self, replicas=(0, 1), mode="fail", pools=(), dtype="float32"):
        super().__init__()
        self.dispatch.replicas = dict.fromkeys(replicas, 0)
        self.dispatch.longest_s, self.dispatch.stop = 0.0, self.written
        self.never_come, self.replica_of = set(), {}
        self.trainer = NoisyTrainer(self.replica_of)
        self.serving = None
        self.num_rows = 0
        self.engines = SimpleNamespace(
            dispatch=self.dispatch,
            rollouts=self.rollouts,
            compare_logprobs=self.trainer.infer,
            gate=SimpleNamespace(allocate_rows=self.allocate),
        )
        self.logprob_check = LogprobCheck(
            engines=self.engines,
            config=make_recipe(
                seed=7,
                weights=WeightsConfig(logprob_check=mode),
                generator=EmbeddedConfig(pools=[*pools], dtype=dtype),
            ),
            prompts=PROMPTS,
            sampling=SAMPLING,
        )

    def written(self, request):
        index = self.replica_of[request.row_id] = request.replica
        if index in self.never_come:
            return None
        if index not in self.dispatch.replicas:
            return stopped(request.row_id, reason=FinishReason.ABORTED, replica=index)
        versions = self.dispatch.replicas[index]
        versions = versions if isinstance(versions, tuple) else (versions,)
        spans = ((version, 2) for version in versions)
        return stopped(request.row_id, *spans, reason=FinishReason.LENGTH, replica=index)

    def allocate(self, count, unit):
        self.num_rows += count
        return range(self.num_rows - count, self.num_rows)

    async def publish(self, version, *, serves=None):
        for replica in list(self.dispatch.replicas):
            self.dispatch.replicas[replica] = version if serves is None else serves
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
