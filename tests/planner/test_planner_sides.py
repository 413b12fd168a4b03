"""One side of a recipe alone, KV caches that are full, and lengths that are alike in a group."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llamarl.core.config import (
    ClusterConfig,
    Config,
    PlacementConfig,
    SamplingConfig,
    StalenessConfig,
    TrainerConfig,
    VllmConfig,
    WeightsConfig,
)
from llamarl.core.config.run import PlanConfig
from llamarl.planner.changes import next_change
from llamarl.planner.law import hardware_costs
from llamarl.planner.one_side import (
    LoneReplica,
    forecast_generator_alone,
    forecast_trainer_alone,
    step_requests,
)
from llamarl.planner.publish import STAGES
from llamarl.planner.recipe import forecast_one_side
from llamarl.planner.report import band_words, bands
from llamarl.planner.simulation import clock
from llamarl.planner.simulation.clock import Cores
from llamarl.planner.simulation.costs import Costs
from llamarl.planner.simulation.setting import Setting
from llamarl.planner.simulation.simulated_run import simulate
from llamarl.planner.simulation.workload import make_workload
from tests.planner.planner_recipes import LLAMA, make_recipe

ONE_B = replace(
    LLAMA,
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
)


def make_setting(plan: dict[str, Any] | None = None, **keys: Any) -> Config:
    """4 groups of 4 rollouts of 100 + 100 tokens, on GPUs."""
    plan = {"prompt_tokens": 100, "median_tokens": 100, "spread": 0.0} | (plan or {})
    generator = {"max_num_seqs": 16, "max_model_len": 512} | keys
    return make_recipe(
        sampling=SamplingConfig(rollouts_per_prompt=4, max_tokens=256),
        generator=VllmConfig(device="cuda", dtype="bfloat16", **generator),
        trainer=TrainerConfig(device="cuda", groups_per_step=4, tokens_per_micro_batch=4096),
        weights=WeightsConfig(transport="collective"),
        cluster=ClusterConfig(num_hosts=2),
        plan=PlanConfig(**plan),
    )


class WatchedReplica(LoneReplica):
    """Notes how many tokens its cache held at most while it held more than one rollout."""

    most_held = 0
    num_started = 0

    def _decode(self) -> None:
        super()._decode()
        slots = self._slots
        if self._stretch is not None and len(slots) > 1:
            steps = self._stretch[1][-1].steps - slots.steps
            grown = slots.context - slots._num_shared + min(steps, 1) * len(slots)
            self.most_held = max(self.most_held, grown)

    def _start(self, assignment: Any) -> int:
        self.num_started += 1
        return super()._start(assignment)


def write_all(config: Config, costs: Costs) -> tuple[WatchedReplica, float]:
    """A replica that has written a step's rollouts, and when the last one ended."""
    workload = make_workload(config)
    setting = Setting(config=config, workload=workload)

    async def run() -> tuple[WatchedReplica, float]:
        replica = WatchedReplica(setting, costs, Cores(), index=0, hosts=("here",))
        await replica.run_through(step_requests(config, workload))
        return replica, replica._cores.time()

    return clock.run(run())


def test_a_full_cache_takes_back_the_newest_rollout_and_writes_all_in_the_end() -> None:
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    for _ in range(12):
        plan = {"spread": chance.uniform(0, 1), "prompt_tokens": chance.randint(1, 100)}
        config = make_setting(plan, max_num_seqs=chance.randint(1, 16))
        costs = Costs(decode_step_s=1.0, kv_tokens=chance.randint(360, 1500))
        roomy, free_s = write_all(config, replace(costs, kv_tokens=0))
        tight, full_s = write_all(config, costs)
        assert tight.most_held <= costs.kv_tokens, seed
        assert full_s >= free_s - 1e-6, seed
        _, written_s = write_all(config, replace(costs, decode_step_s=0.0, decode_row_s=1.0))
        lengths = map(make_workload(config).length, step_requests(config, make_workload(config)))
        assert written_s == pytest.approx(sum(lengths)), f"{seed}: each token is decoded once"
        assert roomy.num_started == 16 <= tight.num_started, seed
        reserving = replace(config, plan=replace(config.plan, reserves_kv=True))
        patient, _ = write_all(reserving, costs)
        assert patient.num_started == 16, f"{seed}: what has room for its end is never taken back"
        assert patient.most_held <= costs.kv_tokens, seed


def test_thousands_of_calls_between_two_steps_do_not_nest() -> None:
    """As when the environments of a whole batch answer at once."""
    config, num_calls = make_setting(), 20_000
    setting = Setting(config=config, workload=make_workload(config))

    async def run() -> int:
        replica = WatchedReplica(setting, Costs(), Cores(), index=0, hosts=("here",))
        done: list[int] = []
        for number in range(num_calls):
            replica._add_command(0.0, lambda number=number: done.append(number), "turn")
        await replica.run_through(step_requests(config, setting.workload))
        return len(done)

    assert clock.run(run()) == num_calls


def test_a_group_holds_its_prompt_once() -> None:
    """Four rollouts of 100 + 100 tokens share 100: 500 tokens, where four prompts need 800."""
    config = make_setting(max_num_seqs=4)
    config = replace(config, trainer=replace(config.trainer, groups_per_step=1))
    costs = Costs(decode_step_s=1.0, kv_tokens=510)
    fits, seconds = write_all(config, costs)
    assert fits.num_started == 4
    assert seconds == pytest.approx(100)
    tight, _ = write_all(config, replace(costs, kv_tokens=450))
    assert tight.num_started > 4


def test_lengths_of_a_group_are_alike_and_all_together_are_spread_as_before() -> None:
    config = make_setting({"spread": 0.8})
    config = replace(
        config,
        sampling=replace(config.sampling, max_tokens=4096),
        generator=replace(config.generator, max_model_len=8192),
        trainer=replace(config.trainer, groups_per_step=2048),
    )

    def logarithms(correlation: float) -> np.ndarray:
        plan = replace(config.plan, group_correlation=correlation)
        workload = make_workload(replace(config, plan=plan))
        lengths = [workload.length(each) for each in step_requests(config, workload)]
        return np.log(np.array(lengths, float)).reshape(-1, 4)

    for correlation in (0.0, 0.5, 0.9):
        found = logarithms(correlation)
        assert found.mean() == pytest.approx(math.log(100), abs=0.05)
        assert found.std() == pytest.approx(0.8, abs=0.05)
        pairs = np.corrcoef(found[:, 0], found[:, 1])[0, 1]
        assert pairs == pytest.approx(correlation, abs=0.06)


def test_the_trainer_alone_takes_what_it_takes_in_a_whole_synchronous_step() -> None:
    config = make_setting()
    alone = forecast_trainer_alone(config, ONE_B)
    costs = hardware_costs(config, ONE_B)
    step = simulate(config, ONE_B, costs, num_steps=6)
    busy_s = step.busy_shares["trainer"] * step.step_s
    assert busy_s == pytest.approx(alone.step_s, rel=0.15), "parts and log-prob checks differ"
    assert sum(alone.seconds.values()) == pytest.approx(alone.step_s)
    assert 0 < alone.utilisation < 1


def test_a_replica_alone_writes_what_its_costs_say() -> None:
    config = make_setting()
    found = forecast_generator_alone(config, ONE_B)
    costs = hardware_costs(config, ONE_B)
    decode_s = costs.decode_s(16, 16 * 99, 100)
    prefill_s = costs.prefill_s([99] * 4)
    assert found.tokens_per_s == pytest.approx(1600 / (decode_s + prefill_s), rel=0.02)
    assert (found.num_tokens, found.mean_running) == (1600, pytest.approx(16, rel=0.02))


@pytest.mark.parametrize(
    ("only", "said"),
    [
        ("trainer", "tokens/s per GPU"),
        ("generator", "ms per decode step"),
        ("publish", "no band for a publish"),
    ],
)
def test_each_side_has_a_report_with_its_band(only: str, said: str) -> None:
    text, figures = forecast_one_side(only, make_setting(), ONE_B)
    assert said in text
    assert ("\nband: " in text) is (only != "publish")
    assert ("band_s" in figures) is ("half_s" in figures) is (only != "publish")
    assert ("memory of the fullest rank" in text) is ("memory" in figures) is (only == "trainer")
    with pytest.raises(ValueError, match="--only must be"):
        forecast_one_side("scorer", make_setting(), ONE_B)


def test_a_publish_shows_where_its_time_goes() -> None:
    text, figures = forecast_one_side("publish", make_setting(), ONE_B)
    (stages,) = figures["pool_stages_s"].values()
    assert list(stages) == list(STAGES)
    assert sum(stages.values()) == pytest.approx(figures["seconds"])
    shown = {name for name, stage_s in stages.items() if stage_s > 0}
    assert {"transfer", "phases"} <= shown
    for name, words in STAGES.items():
        assert (words in text) is (name in shown), name


def test_a_band_holds_its_forecast_and_a_steps_is_no_narrower_than_any_sides() -> None:
    config = make_setting()
    low_s, high_s = bands("step", 10.0, config)["band_s"]
    for kind in ("trainer", "generator"):
        found = bands(kind, 10.0, config)
        assert found["band_s"][0] <= found["half_s"][0] < 10 < found["half_s"][1]
        assert low_s <= found["band_s"][0] < found["band_s"][1] <= high_s
    for times in (1.58, 1.51, 1.12, 0.96):  # another system's steps over their forecasts
        assert low_s <= 10 * times <= high_s


@pytest.mark.parametrize(
    ("gpu", "trainer", "generator"),
    [("H100-80GB", True, True), ("B200-180GB", True, False), ("H20-96GB", False, False)],
)
def test_an_unconfirmed_card_has_no_band(gpu: str, trainer: bool, generator: bool) -> None:
    config = make_setting()
    config = replace(config, cluster=replace(config.cluster, gpu=gpu))
    is_known = {"trainer": trainer, "generator": generator, "step": trainer and generator}
    for kind, is_there in is_known.items():
        words = band_words(kind, 10.0, "it", config)
        assert bool(bands(kind, 10.0, config)) is is_there
        assert words.startswith("band: ") is is_there
        assert is_there or words.endswith(f"on {gpu}")
    _, figures = forecast_one_side("generator", config, ONE_B)
    assert ("band_s" in figures) is generator
    on_cpus = replace(config, trainer=replace(config.trainer, device="cpu"))
    assert "a trainer on CPUs" in band_words("step", 10.0, "it", on_cpus)


@pytest.mark.parametrize("is_colocated", [False, True])
def test_the_next_change_is_one_that_fits_and_shortens_the_step(is_colocated: bool) -> None:
    config = make_setting(max_num_seqs=4, enforce_eager=True)
    config = replace(config, trainer=replace(config.trainer, activation_checkpointing="full"))
    if is_colocated:
        config = replace(
            config,
            placement=PlacementConfig(colocated=True),
            weights=WeightsConfig(transport="cuda_ipc"),
            staleness=StalenessConfig(max_staleness=0),
            cluster=ClusterConfig(),
        )
    step = simulate(config, ONE_B, hardware_costs(config, ONE_B), num_steps=6)
    found = next_change(config, ONE_B, step, lambda other: True)
    assert found is not None
    assert found.step.step_s < 0.98 * step.step_s
    assert not is_colocated or "num_replicas" not in found.words, "both sides have all GPUs"
    assert next_change(config, ONE_B, step, lambda other: False) is None
