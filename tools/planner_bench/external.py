"""Forecasts beside public measurements.

Owns: the settings of measurements.yaml as recipes, the errors, and which kinds of card they
confirm. Does not own: the forecasts (`llamarl/planner`). Invariant: a forecast sees nothing of a
row but its model, card and keys; error is max(ratio, 1 / ratio) - 1 of forecast and measured
throughput, so twice too fast and twice too slow are both 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml

from llamarl.core.config import (
    ClusterConfig,
    Config,
    DataConfig,
    LoraConfig,
    ModelConfig,
    PlacementConfig,
    RewardConfig,
    SamplingConfig,
    StalenessConfig,
    TrainerConfig,
    VllmConfig,
    WeightsConfig,
)
from llamarl.core.config.run import PlanConfig
from llamarl.model.architecture import FAMILIES, Architecture
from llamarl.planner.efficiency import Spread
from llamarl.planner.law import hardware_costs
from llamarl.planner.one_side import forecast_generator_alone, forecast_trainer_alone
from llamarl.planner.simulation.simulated_run import simulate
from llamarl.trainer.losses.aipo import AIPOConfig

Ratios = Mapping[str, float]
TABLE = Path(__file__).with_name("measurements.yaml")
GOAL_FIT, GOAL_HALF, GOAL_TWO_THIRDS = 0.2, 0.15, 0.25
CONFIRMED_ERROR = 0.25  # of half the rows of a kind of card, or it is not confirmed


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
    is_partial: bool

    def forecast(self) -> float:
        """In the row's unit."""
        return UNITS[self.only, self.unit](self.config(), self.architecture)

    def ratio(self) -> float:
        """Forecast speed over measured speed: above 1 the forecast is too fast."""
        found = self.forecast() / self.measured
        return 1 / found if " per " in self.unit.replace(PER_GPU, "") else found

    def config(self) -> Config:
        """The setting as a recipe, all else small."""
        given: dict[str, dict[str, Any]] = defaultdict(dict)
        for key, value in self.keys.items():
            section, _, name = key.partition(".")
            given[section][name] = value
        plan = PlanConfig(**{"spread": 0.0, "num_steps": 6} | given["plan"])
        sampling = {"rollouts_per_prompt": 1, "max_tokens": plan.median_tokens} | given["sampling"]
        context = plan.prompt_tokens + sampling["max_tokens"] + 1
        trainer = {"num_ranks": 1, "tokens_per_micro_batch": 1 << 20} | given["trainer"]
        trainer["lora"] = LoraConfig(**trainer.get("lora", {}))
        return Config(
            model=ModelConfig(checkpoint="none"),
            data=DataConfig(prompts="none"),
            reward=RewardConfig(num_workers=64),
            algorithm=AIPOConfig(**{"advantage": "none"} | given["algorithm"]),
            sampling=SamplingConfig(**sampling),
            generator=VllmConfig(device="cuda", max_model_len=context, **given["generator"]),
            trainer=TrainerConfig(device="cuda", **trainer),
            weights=WeightsConfig(**{"transport": "collective"} | given["weights"]),
            placement=PlacementConfig(**given["placement"]),
            staleness=StalenessConfig(**given["staleness"]),
            cluster=ClusterConfig(gpu=self.gpu, **given["cluster"]),
            plan=plan,
        )


def error(ratio: float) -> float:
    """0 if forecast and measurement are equal."""
    return max(ratio, 1 / ratio) - 1


def compare(measurements: Iterable[Measurement]) -> dict[str, float]:
    """The ratio of each row, by its name."""
    return {each.name: each.ratio() for each in measurements}


def counted(measurements: Iterable[Measurement]) -> dict[str, list[Measurement]]:
    """The rows that say how good a trainer's, a generator's and a step's forecast is: no fitted
    ones, and partial ones only of whole steps, which are all partial."""
    found: dict[str, list[Measurement]] = defaultdict(list)
    for each in measurements:
        if not each.is_fit and (each.only == "recipe" or not each.is_partial):
            found["step" if each.only == "recipe" else each.only].append(each)
    return dict(found)


def confirmed(rows: Sequence[Measurement], ratios: Ratios) -> list[str]:
    """The kinds of card on which at least half of these rows are near their forecast."""
    by_kind: dict[str, list[float]] = defaultdict(list)
    for each in rows:
        by_kind[each.gpu].append(error(ratios[each.name]))
    return sorted(kind for kind, sizes in by_kind.items() if median(sizes) <= CONFIRMED_ERROR)


def on_confirmed(rows: Sequence[Measurement], ratios: Ratios) -> list[float]:
    """Ratios of the rows on kinds that they confirm. A whole step counts in any case."""
    kinds = confirmed(rows, ratios)
    return [ratios[each.name] for each in rows if each.only == "recipe" or each.gpu in kinds]


def spread_of(ratios: Sequence[float]) -> Spread:
    """Measured over forecast time; the ends are those of rows, outside the quantiles."""

    def within(share: float) -> tuple[float, float]:
        low, high = (1 - share) / 2, (1 + share) / 2
        return (
            round(float(np.quantile(ratios, low, method="lower")), 2),
            round(float(np.quantile(ratios, high, method="higher")), 2),
        )

    return Spread(num_rows=len(ratios), half=within(0.5), most=within(0.9))


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
            is_partial=row.get("partial", False),
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


def _step_s(config: Config, architecture: Architecture) -> float:
    return simulate(config, architecture, hardware_costs(config, architecture)).step_s


UNITS: dict[tuple[str, str], Callable[[Config, Architecture], float]] = {
    ("trainer", "tokens/s per GPU"): lambda config, architecture: (
        forecast_trainer_alone(config, architecture).tokens_per_s / config.trainer.num_ranks
    ),
    ("trainer", "s per step"): lambda config, architecture: (
        forecast_trainer_alone(config, architecture).step_s
    ),
    ("recipe", "s per step"): _step_s,
    ("generator", "output tokens/s"): lambda config, architecture: (
        forecast_generator_alone(config, architecture).tokens_per_s
    ),
    ("generator", "tokens/s with the prompt's"): lambda config, architecture: (
        forecast_generator_alone(config, architecture).tokens_per_s
        * (1 + config.plan.prompt_tokens / config.plan.median_tokens)
    ),
    ("generator", "ms per decode step"): lambda config, architecture: (
        1e3 * forecast_generator_alone(config, architecture).decode_step_s
    ),
}
