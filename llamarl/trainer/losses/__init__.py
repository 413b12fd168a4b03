"""The losses: one file each, with the formula and its sources, the options and the function.

A file defines `loss(inputs, config)` and `ALGORITHMS`, from the names in a recipe to their options;
nothing else registers it. Importing a loss does not import torch, because the process that composes
recipes reads the options: a file that needs more than the methods of its tensors imports torch
inside `loss`.

What holds for every table in these files, against TRL 1.16 (GRPOTrainer, RLOOTrainer), verl 0.9.1:

    mu           Here the probability that the generator recorded when it sampled the token, so r
                 corrects staleness and engine in one, as in verl's bypass mode. By default TRL and
                 verl recompute "old" log-probs in the trainer at the start of a step (and can
                 multiply a truncated or masked old / mu on top); with one optimizer step per batch
                 their r is then always 1. `algorithm.proximal` does the same here.
    std          Divided by n (the papers' formulas); TRL and verl divide by n - 1.
    masks        A rollout is averaged over all its tokens, those of weight 0 included, so masking
                 never increases the weight of others; TRL and verl average over unmasked tokens.
    equal        Groups with equal rewards stay in for most: advantage 0, but part of the divisor,
    rewards      and their KL and entropy terms count. They are dropped for dapo and cispo, as their
                 papers do (dynamic sampling), and for aipo, on no paper's advice: a dropped group
                 frees its slot for one with a gradient. TRL keeps them; verl drops them only with
                 filter_groups.
"""

import importlib
import pkgutil
from functools import cache

from llamarl.core.config import AlgorithmConfig
from llamarl.core.extensions import TaskSource
from llamarl.trainer.loss_inputs import TokenLoss
from llamarl.trainer.losses.task_loss import TaskConfig, load_loss


@cache
def algorithms() -> dict[str, type[AlgorithmConfig]]:
    """Return the options of every algorithm, by its name."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return dict(sorted(item for module in modules for item in module.ALGORITHMS.items()))


def find_loss(config: AlgorithmConfig, task_source: TaskSource | None = None) -> TokenLoss:
    """Return the loss in the file that defines the options `config`; `task_source` is the recipe's
    task.py, for `algorithm=task`."""
    if isinstance(config, TaskConfig):
        assert task_source is not None, "algorithm=task comes with a task.py"
        return load_loss(task_source)
    loss: TokenLoss = importlib.import_module(type(config).__module__).loss
    return loss
