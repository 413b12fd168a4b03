"""The loss that a recipe's own task.py defines, as `loss(inputs)`.

It runs in the trainer's processes, on its device. The file is the user's own code and has all the
rights of the process; see docs/extending/task.md.
"""

from dataclasses import dataclass
from typing import ClassVar

from llamarl.core.config import AlgorithmConfig
from llamarl.core.extensions import TaskSource, load
from llamarl.trainer.loss_inputs import LossInputs, LossTerms, TokenLoss


@dataclass(kw_only=True)
class TaskConfig(AlgorithmConfig):
    """The recipe's own task.py defines the loss."""

    reads_columns: ClassVar[bool] = True
    scales_with_advantage: ClassVar[bool] = False


ALGORITHMS = {"task": TaskConfig}


def load_loss(source: TaskSource) -> TokenLoss:
    """Return the function `loss` of this task.py. Raises ValueError here, or TaskError in a call,
    in one line."""
    function = load(source, ["loss"])["loss"]

    def loss(inputs: LossInputs, config: AlgorithmConfig) -> LossTerms:
        return function(inputs)

    return loss
