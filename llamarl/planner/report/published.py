"""What LlamaRL's paper reports, beside a forecast.

Owns: its figures, where they stand, and the words around them. Does not own: any number of a
forecast. Invariant: nothing that the paper reports enters a forecast.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from rich.console import RenderableType

from llamarl.model.architecture import Architecture
from llamarl.planner.forecast import Decomposition, Forecast
from llamarl.planner.report.tables import make_table


class Published(NamedTuple):
    """One model's figures in the LlamaRL paper; None where it gives none."""

    model: str
    baseline_s: float
    step_s: float
    speedup: float
    publish_s: float | None
    num_gpus: int | None


# LlamaRL, arXiv 2505.24034. Step times and speed-ups: its evaluation of Llama 3.1 policies on MATH
# and GSM8K prompts, against a synchronous colocated system in the manner of DeepSpeed-Chat. The
# 405B times and the speed-ups stand in several digests of the paper, the 8B and 70B times in one;
# the baselines of 8B and 70B are speed-up times step. Publishes: its section on DDMA.
PUBLISHED = {  # by vocabulary, width and number of layers
    (128256, 4096, 32): Published("Llama 3.1 8B", 2.52 * 8.90, 8.90, 2.52, None, None),
    (128256, 8192, 80): Published("Llama 3.1 70B", 3.98 * 20.67, 20.67, 3.98, 1.15, None),
    (128256, 16384, 126): Published("Llama 3.1 405B", 635.8, 59.5, 10.7, 2.0, 1024),
}
DIFFERENCES = (
    "The paper does not publish its batch sizes, lengths of rollouts or layouts, nor, for 8B and "
    "70B, how many GPUs it used: seconds compare in kind only, ratios a little better.",
    "Its baseline is another system, in the manner of DeepSpeed-Chat; ours is this controller run "
    "synchronously and colocated, so nothing that other code loses is in our ratio.",
    "Its ratio bundles placement, layout, batch sizes, precision and overlap, as the split above "
    "does in our simulator; the paper itself gives no such split, and no constant here was chosen "
    "to come near its figures.",
    "Its trainer has pipeline stages too; here it shards with FSDP and tensor parallelism.",
)


def published_figures(architecture: Architecture) -> Published | None:
    """The paper's figures for this architecture; None if it has none."""
    a = architecture
    return PUBLISHED.get((a.vocab_size, a.hidden_size, a.num_layers))


def published_parts(forecast: Forecast, published: Published) -> Iterator[RenderableType]:
    """A table of both, and what has to be known to compare them."""
    yield ""
    yield f"{published.model}: published (LlamaRL, arXiv 2505.24034) and forecast"
    table, gain = make_table(None, "published", "forecast"), forecast.decomposition
    baseline = gain and f"{gain.baseline.step.step_s:.1f} s"
    publish_s = f"{published.publish_s:.2f} s" if published.publish_s else "not given"
    for row in (
        ("baseline step", f"{published.baseline_s:.1f} s", baseline),
        ("step", f"{published.step_s:.1f} s", f"{forecast.step.step_s:.1f} s"),
        ("speed-up", f"{published.speedup:g}x", gain and f"{gain.speedup:.2f}x"),
        ("publish", publish_s, f"{forecast.publish.seconds:.2f} s"),
        ("GPUs", str(published.num_gpus or "not given"), str(forecast.num_gpus)),
    ):
        table.add_row(*(cell or "-" for cell in row))
    yield table
    if forecast.unstated and gain is not None:
        yield from _unstated_lines(forecast, gain, published)
    yield from (f"- {words}" for words in DIFFERENCES)


def _unstated_lines(forecast: Forecast, gain: Decomposition, published: Published) -> Iterator[str]:
    """Where the paper's ratio falls among those over baselines that it may have run."""
    step_s = forecast.step.step_s
    known = sorted([gain.baseline, *forecast.unstated], key=lambda each: each.step.step_s)
    ratios = [each.step.step_s / step_s for each in known]
    low, high = ratios[0], ratios[-1]
    place = f"inside, at {_place(published.speedup, low, high):.0%} of the width in logarithms"
    if not low <= published.speedup <= high:
        place = "below" if published.speedup < low else "above"
    yield (
        f"The paper states neither degree nor batches nor engine of its baseline. Over these the "
        f"speed-up is {low:.2f}x to {high:.2f}x; its {published.speedup:g}x lies {place}:"
    )
    for ratio, each in zip(ratios, known, strict=True):
        yield f"  {ratio:.2f}x, {each.step.step_s:.1f} s: {each.words}"


def _place(ratio: float, low: float, high: float) -> float:
    """0 at `low`, 1 at `high`."""
    return math.log(ratio / low) / math.log(high / low) if high > low else 0.0
