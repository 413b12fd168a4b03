"""Forecasts beside public measurements.

Owns: the settings of measurements.yaml as recipes, and the errors. Does not own: the forecasts
(`llamarl/planner`). Invariant: a forecast sees nothing of a row but its model, card and keys; error
is max(ratio, 1 / ratio) - 1 of forecast and measured throughput, so twice too fast and twice too
slow are both 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from llamarl.algorithms.losses.aipo import AIPOConfig
from llamarl.config import (
    ClusterConfig,
    Config,
    DataConfig,
    ModelConfig,
    PlacementConfig,
    RewardConfig,
    SamplingConfig,
    TrainerConfig,
    VllmConfig,
    WeightsConfig,
)
from llamarl.config.run import PlanConfig
from llamarl.models.architecture import Architecture
from llamarl.models.families import FAMILIES
from llamarl.planner.simulation.single import forecast_generator_alone, forecast_trainer_alone

TABLE = Path(__file__).with_name("measurements.yaml")
GOAL_FIT, GOAL_HELD_OUT = 0.2, 0.3


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A row of the table: what was measured of a setting, and where that stands."""

    name: str
    only: str
    gpu: str
    architecture: Architecture
    keys: Mapping[str, Any] = field(default_factory=dict)
    measured: float
    unit: str
    source: str
    is_fit: bool

    def forecast(self) -> float:
        """In the row's unit."""
        return UNITS[self.only, self.unit](self.config(), self.architecture)

    def ratio(self) -> float:
        """Forecast speed over measured speed: above 1 the forecast is too fast."""
        found = self.forecast() / self.measured
        return 1 / found if " per " in self.unit.replace(PER_GPU, "") else found

    def config(self) -> Config:
        """The setting as a recipe, all else small."""
        given: dict[str, dict[str, Any]] = {}
        for key, value in self.keys.items():
            section, _, name = key.partition(".")
            given.setdefault(section, {})[name] = value
        plan = PlanConfig(spread=0.0, **given.get("plan", {}))
        trainer = {"num_ranks": 1, "tokens_per_micro_batch": 1 << 20} | given.get("trainer", {})
        longest = plan.prompt_tokens + plan.median_tokens
        return Config(
            model=ModelConfig(checkpoint="none"),
            data=DataConfig(prompts="none"),
            reward=RewardConfig(),
            algorithm=AIPOConfig(advantage="none"),
            sampling=SamplingConfig(rollouts_per_prompt=1, max_tokens=plan.median_tokens),
            generator=VllmConfig(
                device="cuda", max_model_len=longest + 1, **given.get("generator", {})
            ),
            trainer=TrainerConfig(device="cuda", **trainer),
            weights=WeightsConfig(transport="collective"),
            placement=PlacementConfig(),
            cluster=ClusterConfig(gpu=self.gpu),
            plan=plan,
        )


def error(ratio: float) -> float:
    """0 if forecast and measurement are equal."""
    return max(ratio, 1 / ratio) - 1


def read_measurements(path: Path = TABLE) -> list[Measurement]:
    """All rows of the table."""
    table = yaml.safe_load(path.read_text())
    return [
        Measurement(
            name=row["name"],
            only=row["only"],
            gpu=row["gpu"],
            architecture=_architecture(table["models"][row["model"]]),
            keys=row["set"],
            measured=float(row["measured"]),
            unit=row["unit"],
            source=f"{table['sources'][row['source']]}: {row['where']}",
            is_fit=row.get("fit", False),
        )
        for row in table["rows"]
    ]


def _architecture(sizes: Mapping[str, Any]) -> Architecture:
    family = FAMILIES[sizes["model_type"]]
    return Architecture(
        **{"tie_embeddings": False, "qk_norm": family.qk_norm} | dict(sizes),
        max_positions=1 << 20,
        norm_eps=1e-5,
        rope_theta=1e4,
        rope_scaling=None,
        attention_bias=False,
        output_bias=False,
        mlp_bias=False,
        eos_token_ids=(0,),
    )


PER_GPU = "per GPU"
UNITS: dict[tuple[str, str], Callable[[Config, Architecture], float]] = {
    ("trainer", "tokens/s per GPU"): lambda config, architecture: (
        forecast_trainer_alone(config, architecture).tokens_per_s / config.trainer.num_ranks
    ),
    ("trainer", "s per step"): lambda config, architecture: (
        forecast_trainer_alone(config, architecture).step_s
    ),
    ("generator", "output tokens/s"): lambda config, architecture: (
        forecast_generator_alone(config, architecture).tokens_per_s
    ),
    ("generator", "ms per decode step"): lambda config, architecture: (
        1e3 * forecast_generator_alone(config, architecture).decode_step_s
    ),
}
