"""Accuracy on held-out prompts, and the choice of the best version by it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamarl.core.errors import TaskError
from llamarl.core.groups import Evaluation, Group, HeldOutResult
from llamarl.core.records import EXTRA, FinishReason, StageStatus
from llamarl.metrics.estimates import majority_at, pass_at, share_of, with_interval
from llamarl.metrics.step_metrics import Scalars, means

RESULTS_FILE = "evaluations.jsonl"
EVALUATION = "evaluation/"
ACCURACY, PASS_AT, MAJORITY_AT = "accuracy", "pass_at_", "maj_at_"
ENDS = ("", "_low", "_high")  # of the tags of a share and its interval
NEAR = 0.005  # a reward this near to the accuracy is not shown beside it


def result_of(group: Group, at_k: Sequence[int]) -> HeldOutResult:
    """Return the results of this prompt's rollouts."""
    scores = [group.scores[row_id] for row_id in group.row_ids]
    rows = [group.rollouts[row_id] for row_id in group.row_ids]
    correct = tuple(score.correct and score.status is StageStatus.OK for score in scores)
    answers = tuple(score.answer for score in scores)
    shares = {ACCURACY: sum(correct) / len(correct)}
    for k in at_k:
        shares[f"{PASS_AT}{k}"] = pass_at(k, len(correct), sum(correct))
        shares[f"{MAJORITY_AT}{k}"] = majority_at(k, answers, correct)
    return HeldOutResult(
        held_out=group.prompt.held_out,
        prompt_id=group.prompt.prompt_id,
        correct=correct,
        rewards=tuple(s.reward if s.status is StageStatus.OK else None for s in scores),
        answers=answers,
        num_tokens=tuple(sum(each.num_generated for each in row.sequences) for row in rows),
        is_truncated=tuple(row.finish_reason is FinishReason.LENGTH for row in rows),
        shares=shares,
        extra=tuple(score.extra for score in scores),
    )


def summed_up(
    version: int, results: Sequence[HeldOutResult], at_k: Sequence[int], sets: Sequence[str] = ()
) -> Evaluation:
    """Return these results together, and those of each of the `sets`. There is no maj_at_k if no
    rollout has an answer."""
    num_tokens = [count for each in results for count in each.num_tokens]
    is_truncated = [is_cut for each in results for is_cut in each.is_truncated]
    rewards = [reward for each in results for reward in each.rewards]
    counts = [len(each.correct) for each in results]  # equal for all prompts
    names = [ACCURACY, *(f"{PASS_AT}{k}" for k in at_k)]
    if any(answer is not None for each in results for answer in each.answers):
        names += [f"{MAJORITY_AT}{k}" for k in at_k]
    of_sets = {name: [each for each in results if each.held_out == name] for name in sets}
    return Evaluation(
        version=version,
        shares={
            name: share_of([each.shares[name] * len(each.correct) for each in results], counts)
            for name in names
        },
        reward=sum(reward or 0.0 for reward in rewards) / len(rewards),
        mean_tokens=sum(num_tokens) / len(num_tokens),
        truncated_share=sum(is_truncated) / len(is_truncated),
        num_prompts=len(results),
        num_rollouts=len(rewards),
        num_failed=sum(reward is None for reward in rewards),
        extra=means([numbers for each in results for numbers in each.extra]),
        sets={name: summed_up(version, those, at_k) for name, those in of_sets.items()},
        results=tuple(results),
    )


def evaluation_scalars(evaluated: Evaluation, prefix: str = EVALUATION) -> Scalars:
    """Return the values by tag: those of all prompts, and those of each named set under
    evaluation/<set>/."""
    scalars: Scalars = {}
    for name, share in evaluated.shares.items():
        scalars |= {f"{prefix}{name}{end}": each for end, each in zip(ENDS, share, strict=True)}
    scalars |= {
        f"{prefix}prompts": evaluated.num_prompts,
        f"{prefix}reward": evaluated.reward,
        f"{prefix}length": evaluated.mean_tokens,
        f"{prefix}truncated_share": evaluated.truncated_share,
        f"{prefix}failed": evaluated.num_failed,
    }
    scalars |= {f"{prefix}{EXTRA}/{name}": value for name, value in evaluated.extra.items()}
    for name, of_set in evaluated.sets.items():
        scalars |= evaluation_scalars(of_set, f"{prefix}{name}/")
    return scalars


def append_results(run_dir: str | Path, evaluated: Evaluation) -> None:
    """Add a line for each prompt to the run's evaluations.jsonl, in which `answers` number the
    different answers of a prompt in the order of its rollouts."""
    lines = []
    for each in evaluated.results:
        given = dict.fromkeys(answer for answer in each.answers if answer is not None)
        places: dict[int | None, int] = {answer: place for place, answer in enumerate(given)}
        line = {
            "version": evaluated.version,
            "held_out": each.held_out,
            "prompt_id": each.prompt_id,
            **each.shares,
            "correct": each.correct,
            "rewards": each.rewards,
            "answers": [places.get(answer) for answer in each.answers],
            "num_tokens": each.num_tokens,
            "is_truncated": each.is_truncated,
            **({EXTRA: each.extra} if any(each.extra) else {}),
        }
        lines.append(json.dumps(line, allow_nan=False) + "\n")
    with Path(run_dir, RESULTS_FILE).open("a") as file:
        file.write("".join(lines))


def share_words(name: str) -> str:
    """Return the name of a share on a console: `gsm8k/pass_at_4` -> `gsm8k pass@4`."""
    return name.replace("/", " ").replace("_at_", "@")


def in_lines(evaluated: Evaluation, name: str = "") -> Iterator[str]:
    """Yield one line for all prompts and one for each named set, every share with its interval."""
    shaped = is_shaped(evaluated.reward, evaluated.accuracy)
    reward = f"reward {evaluated.reward:.3f}, " if shaped else ""
    yield f"{name} {reward}{', '.join(_shares(evaluated))}".lstrip()
    for of_set, those in evaluated.sets.items():
        yield from in_lines(those, of_set)


def result_line(name: str, evaluated: Evaluation) -> str:
    """Return the line that `llamarl evaluate` prints for all prompts, or for the set with this
    name."""
    words = [
        *_shares(evaluated),
        f"reward {evaluated.reward:.4f}",
        f"mean length {evaluated.mean_tokens:.1f}",
        f"truncated {evaluated.truncated_share:.1%}",
        f"failed rewards (counted as wrong) {evaluated.num_failed}",
    ]
    return f"{name}{name and '  '}{'  '.join(words)}"


def _shares(evaluated: Evaluation) -> list[str]:
    times = evaluated.num_rollouts // evaluated.num_prompts
    of = f"{evaluated.num_prompts}" + (f" x {times}" if times > 1 else "")
    return [
        f"{share_words(key)} {with_interval(share, of if key == ACCURACY else '')}"
        for key, share in evaluated.shares.items()
    ]


def is_shaped(reward: float | None, accuracy: float | None) -> bool:
    """Return True if the reward says more than the accuracy."""
    if reward is None or accuracy is None:
        return reward is not None
    return abs(reward - accuracy) > NEAR or (accuracy == 0 and reward != 0)


@dataclass(kw_only=True)
class BestVersion:
    """The best version by the metric `evaluation/<metric>`, larger being better and the earlier one
    of equals. `version` is -1 while there is none, always if `metric` is empty. Version 0 does not
    count: no run is needed for it.

    `num_since` evaluations were no better than `version`; `patience` (0: any number) of them end
    the run."""

    metric: str = ""
    patience: int = 0
    version: int = -1
    value: float = -math.inf
    num_since: int = 0

    @property
    def is_known(self) -> bool:
        return self.version > 0

    def add(self, evaluated: Evaluation) -> None:
        """Take an evaluation of another version into account. Raises TaskError if there is no such
        metric."""
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
        """Return the state that a checkpoint saves, as JSON; empty if no version is the best
        yet."""
        found = {"version": self.version, "value": self.value, "num_since": self.num_since}
        return {"metric": self.metric, **found} if self.is_known else {}


def best_version(metric: str, patience: int, saved: Mapping[str, Any]) -> BestVersion:
    """Return a BestVersion that continues from a checkpoint's `saved` state, if it has one by this
    metric."""
    is_same = saved.get("metric") == metric
    return BestVersion(**{**(saved if is_same else {}), "metric": metric, "patience": patience})


def is_sound(saved: object, most: int) -> bool:
    """Return True if `saved` has the form of a state, of a version up to `most`."""
    if not isinstance(saved, dict) or not saved:
        return saved == {}
    kinds = {key: type(value) for key, value in saved.items()}
    wanted = {"metric": str, "version": int, "value": kinds.get("value"), "num_since": int}
    is_number = kinds.get("value") in (int, float) and math.isfinite(saved["value"])
    is_formed = kinds == wanted and is_number
    return is_formed and 0 < saved["version"] <= most and saved["num_since"] >= 0
