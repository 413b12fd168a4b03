"""What the CPU says of rollouts that a recipe's engines have written, in float32.

Owns: log-probs and the gradient of a step, by the trainer's own passes on one process. Does not
own: what is made of differences (`trial.py`). Invariant: nothing here runs on the recipe's device.
"""

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import torch

from llamarl.algorithms.losses import find_loss
from llamarl.algorithms.policy_loss import denominator
from llamarl.config import Config
from llamarl.executors.passes import Passes, infer
from llamarl.groups import BatchRollout
from llamarl.models import hf
from llamarl.models.architecture import read_architecture
from llamarl.models.transformer import Transformer
from llamarl.types import Columns


class CpuReference:
    """The checkpoint in `folder` under the algorithm and temperature of `config`."""

    def __init__(self, folder: str, config: Config) -> None:
        self._config, self._device = config, torch.device("cpu")
        self.architecture = read_architecture(folder)
        self._model = Transformer(self.architecture)
        hf.load_into(dict(self._model.named_parameters()), folder)

    def logprobs(self, columns: Columns) -> list[np.ndarray]:
        """log pi of each response, float32 [t] each."""
        every = [range(len(next(iter(columns.values()))))]
        temperature = self._config.sampling.temperature
        found = infer(self._model, columns, every, temperature, self._device)
        return [found[i] for i in every[0]]

    def gradient_norm(self, rows: Sequence[BatchRollout], columns: Columns) -> float:
        """Of the step that these rows are, before it is clipped."""
        config = self._config
        policy = SimpleNamespace(model=self._model, finish_inference=lambda: None)
        passes = Passes(policy, self._device, config, find_loss(config.algorithm))  # type: ignore[arg-type]
        passes.accumulate(rows, columns, [len(rows)])
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        norm = torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt().item()
        num_tokens = sum(row.num_generated for row in rows)
        return norm / denominator(
            num_tokens, len(rows), config.sampling.max_tokens, config.algorithm
        )
