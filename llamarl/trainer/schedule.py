"""The learning rate over a run: a pure function of the step, so a resumed run needs no state."""

import math

from llamarl.core.config import TrainerConfig


def learning_rate(config: TrainerConfig, step: int, num_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (0 is the first) in a run of `num_steps`.

    Warm-up: lr * (step + 1) / warmup_steps while step < warmup_steps, which may be given as a share
    of num_steps (rounded up, as in transformers). Then constant, or with

        p = (step - warmup_steps) / (num_steps - warmup_steps)        m = min_lr_share

    lr times m + (1 - m) * (1 - p) (linear) or m + (1 - m) * (1 + cos(pi p)) / 2 (cosine). As in
    transformers, p is 0 at the first step after warm-up and would be 1 one step after the last: a
    step at learning rate 0 would cost a batch and a publish without any training."""
    warmup_steps = config.warmup_steps or math.ceil(config.warmup_share * num_steps)
    if step < warmup_steps:
        return config.lr * (step + 1) / warmup_steps
    if config.schedule == "constant":
        return config.lr
    num_falling = max(1, num_steps - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / num_falling)
    shape = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_share + (1 - config.min_lr_share) * shape)
