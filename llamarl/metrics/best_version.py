"""The best version so far, by a metric of evaluations.

Owns: which version that is, how many evaluations came after it, and when those are too many. Does
not own: its checkpoint (`loop/saver.py`) or evaluations. Invariant: a function of the evaluations,
in their order; its state says all of it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamarl.errors import TaskError
from llamarl.groups import Evaluation
from llamarl.metrics.held_out import EVALUATION, evaluation_scalars


@dataclass(kw_only=True)
class BestVersion:
    """By the metric `evaluation/<metric>`, larger being better and the earlier one of equals; none
    if `metric` is empty. Version 0 does not count: it has no checkpoint.

    `num_since` evaluations were no better than `version`; `patience` (0: any number) ends the run.
    """

    metric: str = ""
    patience: int = 0
    version: int = 0
    value: float = -math.inf
    num_since: int = 0

    @property
    def is_known(self) -> bool:
        """Whether there is one."""
        return self.version > 0

    def add(self, evaluated: Evaluation) -> None:
        """Another version is evaluated. TaskError if there is no such metric."""
        if not self.metric or evaluated.version == 0:
            return
        scalars = evaluation_scalars(evaluated)
        if (tag := f"{EVALUATION}{self.metric}") not in scalars:
            must = "checkpoint.best must be a metric of evaluations (maj_at_k needs answers, see "
            raise TaskError(f"{must}majority_answer), got {self.metric}")
        if scalars[tag] > self.value:
            self.version, self.value, self.num_since = evaluated.version, scalars[tag], 0
        else:
            self.num_since += 1

    @property
    def why_over(self) -> str:
        """Why the run ends early; "" if it does not."""
        if not 0 < self.patience <= self.num_since:
            return ""
        best = f"{self.value:.4g} of version {self.version}"
        return f"{EVALUATION}{self.metric} was not above the {best} in {self.num_since} evaluations"

    def state(self) -> dict[str, Any]:
        """What a checkpoint saves, as JSON; empty if there is none."""
        found = {"version": self.version, "value": self.value, "num_since": self.num_since}
        return {"metric": self.metric, **found} if self.is_known else {}


def best_version(metric: str, patience: int, saved: Mapping[str, Any]) -> BestVersion:
    """Goes on from a checkpoint's `saved` state, if it has one by this metric."""
    is_same = saved.get("metric") == metric
    return BestVersion(**{**(saved if is_same else {}), "metric": metric, "patience": patience})


def is_sound(saved: object, most: int) -> bool:
    """True if `saved` has the form of a state, of a version up to `most`."""
    if not isinstance(saved, dict) or not saved:
        return saved == {}
    kinds = {key: type(value) for key, value in saved.items()}
    wanted = {"metric": str, "version": int, "value": kinds.get("value"), "num_since": int}
    is_number = kinds.get("value") in (int, float) and math.isfinite(saved["value"])
    is_formed = kinds == wanted and is_number
    return is_formed and 0 < saved["version"] <= most and saved["num_since"] >= 0
