"""Held-out results: of a prompt, of a version, as metrics and as lines of a file.

Owns: what an evaluation says of a version, its tags, and evaluations.jsonl. Does not own: the
estimators (`estimates.py`), or which rollouts there are (`loop/evaluation.py`). Invariant: every
share has an interval; a line of the file is one prompt under one version.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llamarl.groups import Evaluation, Group, HeldOutResult, Share
from llamarl.metrics.estimates import majority_at, pass_at, share_of, with_interval
from llamarl.metrics.step_metrics import Scalars, means
from llamarl.types import EXTRA, FinishReason, StageStatus

RESULTS_FILE = "evaluations.jsonl"
EVALUATION = "evaluation/"
ACCURACY, PASS_AT, MAJORITY_AT = "accuracy", "pass_at_", "maj_at_"
NEAR = 0.005  # a reward this near to the accuracy is not shown beside it


def result_of(group: Group, at_k: Sequence[int]) -> HeldOutResult:
    """What the rollouts of this prompt reached."""
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
        num_tokens=tuple(row.num_generated for row in rows),
        is_truncated=tuple(row.finish_reason is FinishReason.LENGTH for row in rows),
        shares=shares,
        extra=tuple(score.extra for score in scores),
    )


def summed_up(
    version: int, results: Sequence[HeldOutResult], at_k: Sequence[int], sets: Sequence[str] = ()
) -> Evaluation:
    """What these results say together, and those of each of the `sets`. There is no maj_at_k if no
    rollout has an answer."""
    num_tokens = [count for each in results for count in each.num_tokens]
    is_truncated = [is_cut for each in results for is_cut in each.is_truncated]
    rewards = [reward for each in results for reward in each.rewards]
    names = [ACCURACY, *(f"{PASS_AT}{k}" for k in at_k)]
    if any(answer is not None for each in results for answer in each.answers):
        names += [f"{MAJORITY_AT}{k}" for k in at_k]
    of_sets = {name: [each for each in results if each.held_out == name] for name in sets}
    return Evaluation(
        version=version,
        shares={name: _share(name, results) for name in names},
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


def _share(name: str, results: Sequence[HeldOutResult]) -> Share:
    """The mean over rollouts, whose number is equal for all prompts."""
    counts = [len(each.correct) for each in results]
    sums = [count * each.shares[name] for each, count in zip(results, counts, strict=True)]
    return share_of(sums, counts)


def evaluation_scalars(evaluated: Evaluation, prefix: str = EVALUATION) -> Scalars:
    """The values by tag: of all prompts, and of each named set under evaluation/<set>/."""
    scalars: Scalars = {}
    for name, (value, low, high) in evaluated.shares.items():
        scalars |= {f"{prefix}{name}": value, f"{prefix}{name}_low": low}
        scalars[f"{prefix}{name}_high"] = high
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
    """Add a line for each prompt to the run's evaluations.jsonl."""
    lines = [json.dumps(line, allow_nan=False) + "\n" for line in _lines(evaluated)]
    with Path(run_dir, RESULTS_FILE).open("a") as file:
        file.write("".join(lines))


def _lines(evaluated: Evaluation) -> Iterator[dict[str, Any]]:
    """`answers` number the different answers of a prompt in the order of its rollouts."""
    for each in evaluated.results:
        given = dict.fromkeys(answer for answer in each.answers if answer is not None)
        places = {answer: place for place, answer in enumerate(given)}
        yield {
            "version": evaluated.version,
            "held_out": each.held_out,
            "prompt_id": each.prompt_id,
            **each.shares,
            "correct": each.correct,
            "rewards": each.rewards,
            "answers": [None if answer is None else places[answer] for answer in each.answers],
            "num_tokens": each.num_tokens,
            "is_truncated": each.is_truncated,
            **({EXTRA: each.extra} if any(each.extra) else {}),
        }


def share_words(name: str) -> str:
    """How a share is called on a console: `gsm8k/pass_at_4` -> `gsm8k pass@4`."""
    return name.replace("/", " ").replace("_at_", "@")


def in_lines(evaluated: Evaluation, name: str = "") -> Iterator[str]:
    """One line for all prompts and one for each named set, every share with its interval."""
    shaped = is_shaped(evaluated.reward, evaluated.accuracy)
    reward = f"reward {evaluated.reward:.3f}, " if shaped else ""
    yield f"{name} {reward}{', '.join(_shares(evaluated))}".lstrip()
    for of_set, those in evaluated.sets.items():
        yield from in_lines(those, of_set)


def result_line(name: str, evaluated: Evaluation) -> str:
    """What `llamarl evaluate` prints of all prompts, or of the set with this name."""
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
    """True if the reward says more than the accuracy."""
    if reward is None or accuracy is None:
        return reward is not None
    return abs(reward - accuracy) > NEAR or (accuracy == 0 and reward != 0)
