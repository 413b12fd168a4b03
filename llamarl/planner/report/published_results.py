"""What others report, beside which a forecast is shown.

Owns: the LlamaRL paper's figures and which models they are of, and how far public measurements of
training are from the forecasts' law. Does not own: any figure of ours. Invariant: nothing here
enters a forecast.

Source: LlamaRL, arXiv 2505.24034. Step times and speed-ups: its evaluation of Llama 3.1 policies on
MATH and GSM8K prompts, against a synchronous colocated system in the manner of DeepSpeed-Chat. The
405B times and the speed-ups stand in several digests of the paper, the 8B and 70B times in one; the
baselines of 8B and 70B are speed-up times step. Publishes: its section on DDMA.
"""

from dataclasses import dataclass

from llamarl.models.architecture import Architecture


@dataclass(frozen=True, kw_only=True)
class Published:
    """One model's figures; None where the paper gives none."""

    model: str
    step_s: float
    baseline_s: float
    speedup: float
    num_gpus: int | None = None
    publish_s: float | None = None


PUBLISHED: dict[tuple[int, int, int], Published] = {  # by vocabulary, width and number of layers
    (128256, 4096, 32): Published(
        model="Llama 3.1 8B",
        step_s=8.90,
        baseline_s=2.52 * 8.90,
        speedup=2.52,
    ),
    (128256, 8192, 80): Published(
        model="Llama 3.1 70B",
        step_s=20.67,
        baseline_s=3.98 * 20.67,
        speedup=3.98,
        publish_s=1.15,
    ),
    (128256, 16384, 126): Published(
        model="Llama 3.1 405B",
        step_s=59.5,
        baseline_s=635.8,
        speedup=10.7,
        num_gpus=1024,
        publish_s=2.0,
    ),
}

SLOWER = (1.3, 2.3)
"""Seconds measured over seconds forecast of a trainer's forward and backward, the least and the
most. Measured by others on H100: torchtitan, Llama 3.1 8B with FSDP on 8 GPUs 2.3 (2.0 compiled),
with FSDP and tensor parallelism of 8 on 64 GPUs 1.7 (1.6), 70B in that layout on 256 GPUs 1.4
(1.3); prime-rl, Qwen3 4B with 65k tokens on 8 GPUs 1.75."""

CAVEAT = (
    f"Trainer times are optimistic: public measurements (torchtitan, prime-rl; 4B to 70B on H100) "
    f"are {SLOWER[0]} to {SLOWER[1]} times as long as these forecasts, which are not fitted to any."
)

DIFFERENCES = (
    "The paper does not publish its batch sizes, lengths of rollouts or layouts, nor, for 8B and "
    "70B, how many GPUs it used: seconds compare in kind only, ratios a little better.",
    "Its baseline is another system, in the manner of DeepSpeed-Chat; ours is this controller run "
    "synchronously and colocated, so nothing that other code loses is in our ratio.",
    "Its ratio bundles placement, layout, batch sizes, precision and overlap, as the split above "
    "does in our simulator; the paper itself gives no such split.",
    "Its trainer has pipeline stages too; here it shards with FSDP and tensor parallelism.",
)


def published_figures(architecture: Architecture) -> Published | None:
    """The paper's figures for this architecture; None if it has none."""
    a = architecture
    return PUBLISHED.get((a.vocab_size, a.hidden_size, a.num_layers))
