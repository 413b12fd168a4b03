"""Forecasts of one side of a recipe alone: an optimizer step, or a batch of rollouts on one
replica.

The costs, the packing and the replica are those of a forecast of the whole recipe; nothing waits
for the other side."""

import asyncio
from collections import defaultdict
from dataclasses import replace

from llamarl.core.config import Config
from llamarl.core.device import hardware
from llamarl.core.records import Request, Sampling
from llamarl.generator.protocol import RequestOutput
from llamarl.model.architecture import Architecture
from llamarl.planner.forecast import GeneratorForecast, TrainerForecast
from llamarl.planner.law import generator_times, pair_flops, sizes, trainer_costs, trainer_times
from llamarl.planner.simulation import clock
from llamarl.planner.simulation.clock import Cores
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.replica import NOTHING, SimulatedReplica
from llamarl.planner.simulation.setting import Setting
from llamarl.planner.simulation.workload import Workload, make_workload
from llamarl.trainer.packing import pack


def forecast_trainer_alone(config: Config, architecture: Architecture) -> TrainerForecast:
    """Forecast one optimizer step over `groups_per_step` groups, all of which are there."""
    config = _alone(config)
    trainer, workload = config.trainer, make_workload(config)
    costs = Costs(**trainer_costs(config, architecture))
    times = trainer_times(config, architecture)
    requests = step_requests(config, workload)
    lengths = [workload.prompt_tokens + workload.length(each) for each in requests]
    ratio = costs.square_s / costs.token_s
    assignment = pack(lengths, trainer.num_data_ranks, trainer.tokens_per_micro_batch, ratio)
    passes_s = costs.batch_s(lengths, assignment)
    num_tokens, num_ranks = sum(lengths), trainer.num_data_ranks
    squares = sum(length * length for length in lengths)
    # Seconds of a mean rank; the rest is waiting for the slowest one, for traffic or launches.
    kinds = {
        "matrix products": num_tokens / num_ranks * times.gemm_s,
        "attention": squares / num_ranks * times.attention_s,
        "elementwise": num_tokens / num_ranks * times.elementwise_s,
        "head and loss": num_tokens / num_ranks * times.loss_s,
        "tensor parallel": num_tokens / num_ranks * times.tensor_s,
    }
    kinds["waiting"] = max(0.0, passes_s - sum(kinds.values()))
    kinds["optimizer"] = costs.optimizer_s
    count = sizes(architecture)
    num_chosen = num_tokens - workload.prompt_tokens * len(lengths)  # a prompt has no logits
    products = count.layers * num_tokens + count.head * num_chosen
    flops = 6 * products + 3 * pair_flops(architecture) * squares
    step_s = passes_s + costs.optimizer_s
    gpu = hardware.gpu(config.cluster.planned_gpu, trainer.device)
    return TrainerForecast(
        num_ranks=trainer.num_ranks,
        num_rollouts=len(lengths),
        num_micro_batches=len(assignment[0]),
        num_tokens=num_tokens,
        step_s=step_s,
        seconds=kinds,
        utilisation=flops / step_s / trainer.num_ranks / gpu.flops[trainer.compute_dtype],
    )


def forecast_generator_alone(config: Config, architecture: Architecture) -> GeneratorForecast:
    """Forecast one replica that writes a step's rollouts, from an empty cache to the last token."""
    config = _alone(config)
    costs, workload = Costs(**generator_times(config, architecture)), make_workload(config)
    requests = step_requests(config, workload)
    busy_s, num_steps = clock.run(_write(config, costs, workload, requests))
    num_tokens = sum(workload.length(each) for each in requests)
    seconds = sum(busy_s.values())
    return GeneratorForecast(
        num_ranks=config.generator.num_ranks,
        num_rollouts=len(requests),
        num_tokens=num_tokens,
        num_prompt_tokens=workload.prompt_tokens * len(requests),
        kv_tokens=costs.kv_tokens,
        seconds=busy_s,
        mean_running=num_tokens / max(1, num_steps),
        decode_step_s=busy_s.get("decode", 0.0) / max(1, num_steps),
        tokens_per_s=num_tokens / seconds,
    )


def _alone(config: Config) -> Config:
    """Return the recipe on as many hosts as it needs, with one replica."""
    num_ranks = config.trainer.num_ranks + config.generator.num_ranks
    num_hosts = num_ranks // config.cluster.num_gpus_per_host + 2
    cluster = replace(config.cluster, hosts=[], sites=[], num_hosts=num_hosts)
    generator = replace(config.generator, num_replicas=1, pools=[], elastic=[])
    return replace(config, cluster=cluster, generator=generator)


def step_requests(config: Config, workload: Workload) -> list[Request]:
    """Return the requests of one step, group after group."""
    sampling = Sampling(
        temperature=config.sampling.temperature, max_tokens=config.sampling.max_tokens
    )
    size = config.sampling.rollouts_per_prompt
    rest = (0,) * (workload.prompt_tokens - 1)
    return [
        Request(
            row_id=group * size + i,
            prompt_ids=(group, *rest),
            sampling=sampling,
            seed=group * size + i,
        )
        for group in range(config.trainer.groups_per_step)
        for i in range(size)
    ]


class LoneReplica(SimulatedReplica):
    """A replica that has a version and all its requests, and reports to nobody."""

    async def run_through(self, requests: list[Request]) -> int:
        """Write all of these; return the number of decode steps."""
        self._num_left, self._is_done = len(requests), asyncio.Event()
        self.version = 0
        self._commits.append((0, 0))
        self._open.add(requests)
        for request in requests:
            self._resume(request, NOTHING)
        await self._is_done.wait()
        return self._slots.steps

    def _put(self, item: RequestOutput) -> None:
        self._num_left -= 1
        if not self._num_left:
            self._is_done.set()


async def _write(
    config: Config, costs: Costs, workload: Workload, requests: list[Request]
) -> tuple[dict[str, float], int]:
    """Write all requests on one replica; return the seconds that it was busy, by kind of work, and
    its decode steps."""
    setting = Setting(config=config, workload=workload)
    replica = LoneReplica(setting, costs, Cores(), index=0, hosts=("host-0",))
    num_steps = await replica.run_through(requests)
    busy_s: dict[str, float] = defaultdict(float)
    for start_s, end_s, name, category in setting.timeline.bars[replica.name]:
        if category == "busy":
            busy_s[name] += end_s - start_s
    return dict(busy_s), num_steps
