"""The metrics of a step on demonstrations: metadata in, values by tag out.

Owns: the tags that only such runs have. Does not own: those of rollouts (`step_metrics.py`).
Invariant: nothing that compares a trainer with a generator is among them.
"""

import math
from collections.abc import Mapping, Sequence

from llamarl.groups import Group, StepStats
from llamarl.metrics.step_metrics import TRAINED_TOKENS, StepMetrics, count_values

TRAIN_LOSS, HELD_OUT_LOSS = "loss/train", "loss/held_out"
MOST_NATS = 50.0  # of a loss whose perplexity is shown
STATISTICS = {
    "loss": TRAIN_LOSS,
    "entropy": "trained/entropy",
    "grad_norm": "policy/grad_norm",
    "trained_tokens": TRAINED_TOKENS,
    "lr": "trainer/lr",
}
"""Of a step, with their tags."""


def perplexity(loss: float) -> float:
    """exp of a mean loss per token, in nats."""
    return math.exp(min(loss, MOST_NATS))


def demonstration_scalars(
    groups: Sequence[Group], stats: StepStats, seconds: Mapping[str, float]
) -> StepMetrics:
    """(scalars by tag, histograms by tag, no texts) of the step that learnt from `groups`.

    The loss is the mean over `tokens/trained`, which the assistant wrote; `tokens/context` are the
    others. `length/` is of whole demonstrations. `seconds` as for `step_scalars`.
    """
    rows = [row for group in groups for row in group.rollouts.values()]
    lengths = [row.num_prompt_tokens + row.num_tokens for row in rows]
    scalars = {tag: stats.scalars[name] for name, tag in STATISTICS.items()}
    scalars |= {name: value for name, value in stats.scalars.items() if "/" in name}
    scalars["perplexity/train"] = perplexity(scalars[TRAIN_LOSS])
    scalars["demonstrations/trained"] = len(rows)
    scalars["tokens/context"] = sum(lengths) - scalars[TRAINED_TOKENS]
    scalars["length/mean"], scalars["length/max"] = sum(lengths) / len(lengths), max(lengths)
    for name, value in seconds.items():
        scalars[name if "/" in name else f"time/{name}_s"] = value
    if seconds.get("step"):
        scalars["tokens/per_s"] = sum(lengths) / seconds["step"]
    return scalars, {"length/tokens": count_values(lengths)}, {}
