"""The passes of one trainer rank over packed rollouts.

Owns: forward and backward of micro-batches, and what they add to a step's statistics. Does not own:
which rollouts (the trainer), the loss (`algorithms/`) or what becomes of the gradients
(`models/policy.py`). Invariant: an empty micro-batch still runs, since the other ranks' collectives
need this one.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from llamarl.algorithms.loss_inputs import LossInputs, TokenLoss
from llamarl.algorithms.loss_metrics import LossMetrics
from llamarl.algorithms.policy_loss import policy_loss
from llamarl.config import AlgorithmConfig
from llamarl.data.micro_batch import column, micro_batch
from llamarl.models.policy import Policy
from llamarl.types import (
    GENERATOR_LOGPROBS,
    REF_LOGPROBS,
    SAMPLING,
    TOKEN_VERSIONS,
    BatchRollout,
    Columns,
    FinishReason,
    finish_reason,
)


class Passes:
    """Runs `policy` at sampling `temperature`; `loss_metrics` sums the statistics of a step."""

    def __init__(
        self,
        policy: Policy,
        device: torch.device,
        algorithm: AlgorithmConfig,
        token_loss: TokenLoss,
        temperature: float,
    ) -> None:
        self.loss_metrics = LossMetrics()
        self._policy = policy
        self._device = device
        self._algorithm = algorithm
        self._token_loss = token_loss
        self._temperature = temperature

    def accumulate(
        self, step: int, rows: Sequence[BatchRollout], columns: Columns, sizes: Sequence[int]
    ) -> list[np.ndarray]:
        """Forward and backward of this rank's micro-batches: `rows` cut into runs of `sizes`.

        Returns log pi of every row, float32. RuntimeError, naming `step`, if a loss is not finite.
        """
        logprobs: list[np.ndarray] = []
        start = 0
        for size in sizes:
            logprobs += self._forward_backward(step, rows, columns, range(start, start + size))
            start += size
        return logprobs

    @torch.no_grad()
    def differences(self, columns: Columns, micro_batches: Sequence[Sequence[int]]) -> torch.Tensor:
        """float64 [rows of `columns`]: the largest |log pi - log mu| over each row's response, 0
        for rows that are in none of the micro-batches. Changes nothing."""
        found = torch.zeros(len(columns[GENERATOR_LOGPROBS]), dtype=torch.float64)
        for indices in micro_batches:
            packed = micro_batch(columns, indices, self._device)
            stats = self._policy.model(
                packed.token_ids, packed.lengths, packed.targets, self._temperature
            )
            if indices:
                generator_logprobs = column(columns, GENERATOR_LOGPROBS, indices, self._device)
                apart = (stats.logprobs[packed.response] - generator_logprobs).abs()
                parts = apart.split(list(packed.response_lengths))
                found[list(indices)] = torch.stack([part.max() for part in parts]).double().cpu()
        self._policy.finish_inference()
        return found

    def _forward_backward(
        self, step: int, rows: Sequence[BatchRollout], columns: Columns, indices: range
    ) -> list[np.ndarray]:
        """Add one micro-batch to the gradients; returns log pi of its rollouts."""
        packed = micro_batch(columns, indices, self._device)
        stats = self._policy.model(
            packed.token_ids, packed.lengths, packed.targets, self._temperature
        )
        trainer_logprobs = stats.logprobs[packed.response]
        if not indices:
            trainer_logprobs.sum().backward()  # zero, but the other ranks need our part
            return []
        lengths = torch.tensor(packed.response_lengths, device=self._device)
        index = torch.repeat_interleave(lengths)
        advantages = torch.tensor([rows[i].advantage for i in indices], device=self._device)
        has_reference = REF_LOGPROBS in columns
        inputs = LossInputs(
            trainer_logprobs=trainer_logprobs,
            generator_logprobs=column(columns, GENERATOR_LOGPROBS, indices, self._device),
            advantages=advantages[index],
            weights=self._token_weights(rows, columns, indices),
            entropy=stats.entropy[packed.response],
            rollout_index=index,
            rollout_lengths=lengths,
            ref_logprobs=(
                column(columns, REF_LOGPROBS, indices, self._device) if has_reference else None
            ),
            columns={
                name: column(columns, name, indices, self._device)
                for name in self._algorithm.loss_columns
            },
        )
        outputs = policy_loss(inputs, self._algorithm, self._token_loss)
        if not math.isfinite(outputs.loss.item()):
            named = [rows[i].row_id for i in indices]
            raise RuntimeError(
                f"the loss of step {step} is {outputs.loss.item()} in rows {named}: check "
                "trainer.lr, rewards and the generator's log-probs"
            )
        outputs.loss.backward()
        self.loss_metrics.add(outputs, len(index))
        values = trainer_logprobs.detach().cpu()
        return [part.numpy() for part in values.split(list(packed.response_lengths))]

    def _token_weights(
        self, rows: Sequence[BatchRollout], columns: Columns, indices: range
    ) -> torch.Tensor:
        """float32 [T]: 0 for tokens that are too stale, or truncated and to be masked."""
        masks = []
        for i in indices:
            is_trained = columns[TOKEN_VERSIONS][i] >= rows[i].oldest_version
            if self._algorithm.mask_truncated:
                is_trained &= finish_reason(columns[SAMPLING][i]) is not FinishReason.LENGTH
            masks.append(is_trained)
        return torch.from_numpy(np.concatenate(masks).astype(np.float32)).to(self._device)
