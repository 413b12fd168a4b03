"""The passes of one trainer or reference rank over packed rollouts.

Owns: forward and backward of micro-batches, and what they add to a step's statistics. Does not own:
which rollouts (the executors), the loss (`algorithms/`) or what becomes of the gradients
(`models/policy.py`). Invariant: an empty micro-batch still runs, since the other ranks' collectives
need this one.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch

from llamarl.algorithms.loss_inputs import LossInputs, TokenLoss
from llamarl.algorithms.loss_metrics import LossMetrics
from llamarl.algorithms.policy_loss import policy_loss
from llamarl.data.micro_batch import column, micro_batch
from llamarl.executors.specs import TrainerSpec
from llamarl.groups import BatchRollout
from llamarl.models.policy import Policy
from llamarl.models.trained_model import TrainedModel
from llamarl.types import (
    CLIPPED,
    GENERATOR_LOGPROBS,
    LOSS_WEIGHTS,
    NO_VERSION,
    REF_LOGPROBS,
    SAMPLING,
    TOKEN_VERSIONS,
    TRAINER_LOGPROBS,
    Columns,
    FinishReason,
    finish_reason,
)


@torch.no_grad()
def infer(
    model: TrainedModel,
    columns: Columns,
    micro_batches: Sequence[Sequence[int]],
    temperature: float,
    device: torch.device,
) -> dict[int, np.ndarray]:
    """log pi of each response, float32, by its place in `columns`."""
    found: dict[int, np.ndarray] = {}
    for indices in micro_batches:
        packed = micro_batch(columns, indices, device)
        stats = model(packed.token_ids, packed.lengths, packed.targets, temperature)
        values = stats.logprobs[packed.response].float().cpu()
        parts = values.split(list(packed.response_lengths))
        found |= {i: part.numpy() for i, part in zip(indices, parts, strict=True)}
    return found


class Passes:
    """Runs `policy` at the sampling temperature; `loss_metrics` sums the statistics of a step."""

    def __init__(
        self, policy: Policy, device: torch.device, spec: TrainerSpec, token_loss: TokenLoss
    ) -> None:
        self.loss_metrics = LossMetrics()
        self._policy, self._device, self._token_loss = policy, device, token_loss
        self._algorithm, self._temperature = spec.algorithm, spec.sampling.temperature

    def accumulate(
        self, step: int, rows: Sequence[BatchRollout], columns: Columns, sizes: Sequence[int]
    ) -> Columns:
        """Forward and backward of this rank's micro-batches: `rows` cut into runs of `sizes`.

        Returns what was found of every row: TRAINER_LOGPROBS, LOSS_WEIGHTS and CLIPPED.
        RuntimeError, naming `step`, if a loss is not finite.
        """
        found: Columns = {TRAINER_LOGPROBS: [], LOSS_WEIGHTS: [], CLIPPED: []}
        for start, end in pairwise(accumulate(sizes, initial=0)):
            more = self._forward_backward(step, rows, columns, range(start, end))
            for name, cells in more.items():
                found[name] += cells
        return found

    def differences(self, columns: Columns, micro_batches: Sequence[Sequence[int]]) -> torch.Tensor:
        """float64 [rows of `columns`]: the largest |log pi - log mu| over what the model wrote of
        each row, 0 for rows that are in none of the micro-batches. Changes nothing."""
        found = torch.zeros(len(columns[GENERATOR_LOGPROBS]), dtype=torch.float64)
        model, temperature = self._policy.model, self._temperature
        for i, logprobs in infer(model, columns, micro_batches, temperature, self._device).items():
            is_written = columns[TOKEN_VERSIONS][i] != NO_VERSION
            difference = np.abs(logprobs - columns[GENERATOR_LOGPROBS][i])[is_written]
            found[i] = float(difference.max(initial=0.0))
        self._policy.finish_inference()
        return found

    def _forward_backward(
        self, step: int, rows: Sequence[BatchRollout], columns: Columns, indices: range
    ) -> Columns:
        """Add one micro-batch to the gradients; returns the columns of its rollouts."""
        packed = micro_batch(columns, indices, self._device)
        stats = self._policy.model(
            packed.token_ids, packed.lengths, packed.targets, self._temperature
        )
        trainer_logprobs = stats.logprobs[packed.response]
        if not indices:
            trainer_logprobs.sum().backward()  # zero, but the other ranks need our part
            return {}
        lengths = torch.tensor(packed.response_lengths, device=self._device)
        index = torch.repeat_interleave(lengths)
        written = [int((columns[TOKEN_VERSIONS][i] != NO_VERSION).sum()) for i in indices]
        advantages = torch.tensor([rows[i].advantage for i in indices], device=self._device)

        def packed_column(name: str) -> torch.Tensor:
            return column(columns, name, indices, self._device)

        inputs = LossInputs(
            trainer_logprobs=trainer_logprobs,
            generator_logprobs=packed_column(GENERATOR_LOGPROBS),
            advantages=advantages[index],
            weights=self._token_weights(rows, columns, indices),
            entropy=stats.entropy[packed.response],
            rollout_index=index,
            rollout_lengths=torch.tensor(written, device=self._device),
            ref_logprobs=packed_column(REF_LOGPROBS) if REF_LOGPROBS in columns else None,
            columns={name: packed_column(name) for name in self._algorithm.loss_columns},
        )
        outputs = policy_loss(inputs, self._algorithm, self._token_loss)
        if not math.isfinite(outputs.loss.item()):
            named = [rows[i].row_id for i in indices]
            raise RuntimeError(
                f"the loss of step {step} is {outputs.loss.item()} in rows {named}: check "
                "trainer.lr, rewards and the generator's log-probs"
            )
        outputs.loss.backward()
        self.loss_metrics.add(outputs, sum(written))
        found = {
            TRAINER_LOGPROBS: trainer_logprobs.detach(),
            LOSS_WEIGHTS: inputs.weights.to(torch.uint8),
            CLIPPED: outputs.clipped.to(torch.uint8),
        }
        sizes = list(packed.response_lengths)
        parts = {name: values.cpu().split(sizes) for name, values in found.items()}
        return {name: [part.numpy() for part in each] for name, each in parts.items()}

    def _token_weights(
        self, rows: Sequence[BatchRollout], columns: Columns, indices: range
    ) -> torch.Tensor:
        """float32 [T]: 0 for observations, and tokens that are too stale, or truncated and to be
        masked."""
        masks = []
        for i in indices:
            versions = columns[TOKEN_VERSIONS][i]
            is_trained = (versions != NO_VERSION) & (versions >= rows[i].oldest_version)
            if self._algorithm.mask_truncated:
                is_trained &= finish_reason(columns[SAMPLING][i]) is not FinishReason.LENGTH
            masks.append(is_trained)
        return torch.from_numpy(np.concatenate(masks).astype(np.float32)).to(self._device)
