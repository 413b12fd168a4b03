"""The passes of one trainer or reference rank over packed rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
import torch.distributed as dist

from llamarl.core.device.devices import platform_of, send
from llamarl.core.device.platform import Arrival
from llamarl.core.groups import BatchRollout
from llamarl.core.records import (
    CLIPPED,
    GENERATOR_LOGPROBS,
    KEPT_IDS,
    LOSS_WEIGHTS,
    NO_VERSION,
    PROMPT_IDS,
    PROXIMAL_LOGPROBS,
    REF_LOGPROBS,
    RESPONSE_IDS,
    ROUTED_EXPERTS,
    SAMPLING,
    TOKEN_VERSIONS,
    TRAINER_LOGPROBS,
    Columns,
    FinishReason,
    finish_reason,
)
from llamarl.model.attention import ModelInputs, make_packing
from llamarl.model.experts import RoutingStats, read_cell
from llamarl.model.transformer import TrainedModel, Transformer
from llamarl.trainer.loss_inputs import LossInputs, TokenLoss
from llamarl.trainer.policy import Policy
from llamarl.trainer.policy_loss import LossMetrics, interpolated, policy_loss, share_of_way
from llamarl.trainer.specs import TrainerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch(ModelInputs):
    """R packed rollouts: N tokens that are fed, each with the one that follows as its target;
    `chosen` are those that predict the T response tokens, in order.

    A rollout of P prompt and L response tokens feeds P + L - 1 tokens: no token follows its
    last."""

    response_lengths: tuple[int, ...]  # R response lengths; their sum is T


def micro_batch(columns: Columns, indices: Sequence[int], multiple: int = 1) -> MicroBatch:
    """Pack the rollouts at `indices` of `columns` (each P >= 1 prompt, L >= 1 response tokens), in
    host memory; `multiple` as in `make_packing`. Their ROUTED_EXPERTS, if they are there, are as
    `read_records` returns them.

    Without rollouts it is one fed token and no response: a rank without work still takes part in
    the collectives of a forward."""
    if not indices:
        blank = torch.zeros(1, dtype=torch.int64)
        return MicroBatch(
            token_ids=blank,
            targets=blank,
            packing=make_packing((1,), multiple),
            chosen=blank[:0],
            response_lengths=(),
        )
    prompts = [columns[PROMPT_IDS][i] for i in indices]
    responses = [columns[RESPONSE_IDS][i] for i in indices]
    whole = [np.concatenate(pair) for pair in zip(prompts, responses, strict=True)]
    lengths = tuple(len(ids) - 1 for ids in whole)
    records = [columns[ROUTED_EXPERTS][i] for i in indices] if ROUTED_EXPERTS in columns else []
    ends = zip(accumulate(lengths), responses, strict=True)
    response = [np.arange(end - len(ids), end) for end, ids in ends]
    kept = None
    if KEPT_IDS in columns:
        cells = [columns[KEPT_IDS][i].reshape(len(columns[RESPONSE_IDS][i]), -1) for i in indices]
        kept = torch.from_numpy(_kept(prompts, responses, cells))
    return MicroBatch(
        token_ids=packed([ids[:-1] for ids in whole], np.int64),
        targets=packed([ids[1:] for ids in whole], np.int64),
        packing=make_packing(lengths, multiple),
        chosen=packed(response, np.int64),
        kept=kept,
        experts=torch.from_numpy(np.concatenate(records)) if records else None,
        response_lengths=tuple(len(ids) for ids in responses),
    )


def _kept(
    prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], cells: Sequence[np.ndarray]
) -> np.ndarray:
    """Return the tokens among which the one after each fed token was drawn, int64 [N, K]. Those
    that were not drawn, of observations, stand alone."""
    parts = []
    for prompt, response, cell in zip(prompts, responses, cells, strict=True):
        own = cell.astype(np.int64)
        own[:, 0] = np.where((own < 0).all(axis=1), response, own[:, 0])
        parts += [np.full((len(prompt) - 1, own.shape[1]), -1), own]
    return np.concatenate(parts)


def packed(parts: Sequence[np.ndarray], dtype: type = np.float32) -> torch.Tensor:
    """Return the per-token numbers of several rollouts, one after another: [T], in host memory."""
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *parts], dtype=dtype))


def read_records(columns: Columns, model: TrainedModel) -> Columns:
    """Return the columns with ROUTED_EXPERTS, if it is among them, as arrays [P + L - 1, layers,
    k]. Raises ValueError for a record that is not of this model."""
    if ROUTED_EXPERTS not in columns:
        return columns
    assert isinstance(model, Transformer)
    lengths = map(len, map(np.append, columns[PROMPT_IDS], columns[RESPONSE_IDS]))
    pairs = zip(columns[ROUTED_EXPERTS], lengths, strict=True)
    records = [read_cell(cell, length - 1, model.architecture) for cell, length in pairs]
    return columns | {ROUTED_EXPERTS: records}


WAY = "way"  # no column of storage: `share_of_way` of each token


@torch.no_grad()
def infer(
    model: TrainedModel,
    columns: Columns,
    micro_batches: Sequence[Sequence[int]],
    temperature: float,
    device: torch.device,
) -> dict[int, np.ndarray]:
    """Return log pi of each response, float32, by its place in `columns`."""
    columns = read_records(columns, model)
    found: list[tuple[Sequence[int], tuple[int, ...], Arrival]] = []
    for indices in micro_batches:
        fed = send(micro_batch(columns, indices, model.num_tensor_ranks), device)
        values = model(fed, temperature).logprobs
        found.append((indices, fed.response_lengths, platform_of(device).fetch(values)))
    cells = ((indices, arrival.wait().split(lengths)) for indices, lengths, arrival in found)
    return {
        i: part.numpy() for indices, parts in cells for i, part in zip(indices, parts, strict=True)
    }


BUSIEST, ENTROPY, MOVED = "experts/busiest_share", "experts/router_entropy", "experts/moved_share"


class RoutingTotals:
    """The numbers of the routers over the micro-batches of a step, kept on the device until it
    ends."""

    def __init__(self) -> None:
        self._sums: list[torch.Tensor] = []  # float64 [layers, experts + 3]

    def add(self, stats: RoutingStats, *, is_blank: bool) -> None:
        """Count one micro-batch of this rank. One without rollouts counts nothing, but the ranks
        meet in `reduce`."""
        num_tokens = torch.full_like(stats.entropy, stats.num_tokens)
        columns = (stats.entropy, stats.num_moved, num_tokens)
        parts = [stats.counts.double(), *(each.double().unsqueeze(1) for each in columns)]
        self._sums.append(torch.cat(parts, 1) * (not is_blank))

    def reduce(self) -> tuple[dict[str, float], tuple[float, ...]]:
        """Return the scalars over all ranks, by tag, and the load of each expert of each layer: its
        choices over those that it would have if all were alike. Nothing without experts; all ranks
        call it."""
        if not self._sums:
            return {}, ()
        sums = torch.stack(self._sums).sum(0)
        if dist.get_world_size() > 1:
            dist.all_reduce(sums)
        sums = sums.cpu()
        counts, (entropy, num_moved, num_tokens) = sums[:, :-3], sums[:, -3:].unbind(1)
        chosen = counts.sum(1).clamp(min=1)
        tokens = num_tokens.clamp(min=1)
        scalars = {
            BUSIEST: (counts.amax(1) / chosen).mean().item(),
            ENTROPY: (entropy / tokens).mean().item(),
            MOVED: (num_moved / chosen).mean().item(),
        }
        loads = counts / chosen.unsqueeze(1) * counts.shape[1]
        return scalars, tuple(loads.flatten().tolist())


class Passes:
    """Runs `policy` at the sampling temperature; `loss_metrics` sums the statistics of a step,
    `routing` those of its routers.

    Between the first operation of a micro-batch and the end of `accumulate` the host never waits
    for the device."""

    def __init__(
        self, policy: Policy, device: torch.device, spec: TrainerSpec, token_loss: TokenLoss
    ) -> None:
        self.loss_metrics, self.routing = LossMetrics(), RoutingTotals()
        self._policy, self._device, self._token_loss = policy, device, token_loss
        self._algorithm, self._temperature = spec.algorithm, spec.sampling.temperature
        has_reference, runs = spec.algorithm.has_reference, spec.algorithm.runs_reference
        self._is_own_reference = has_reference and not runs(spec.config.lora)

    def accumulate(
        self,
        rows: Sequence[BatchRollout],
        columns: Columns,
        micro_batches: Sequence[Sequence[int]],
        version: int = 0,
        first_version: int = 0,
    ) -> Columns:
        """Run forward and backward of this rank's `rows` in these micro-batches, which list all of
        them in order, at trainer version `version`, in a batch that began at `first_version`.

        Returns the columns of every row: TRAINER_LOGPROBS, LOSS_WEIGHTS and CLIPPED, and
        REF_LOGPROBS if the policy is its own reference."""
        if self._algorithm.proximal == "interpolate":
            shares = [share_of_way(v, first_version, version) for v in columns[TOKEN_VERSIONS]]
            columns = columns | {WAY: shares}
        columns = read_records(columns, self._policy.model)
        parts = [self._forward_backward(rows, columns, indices) for indices in micro_batches]
        found: Columns = {TRAINER_LOGPROBS: [], LOSS_WEIGHTS: [], CLIPPED: []}
        found |= {REF_LOGPROBS: []} if self._is_own_reference else {}
        for lengths, arrival in filter(None, parts):
            for name, values in zip(found, arrival.wait(), strict=True):
                values = values.to(torch.uint8) if name in (LOSS_WEIGHTS, CLIPPED) else values
                found[name] += [part.numpy() for part in values.split(lengths)]
        return found

    def infer(
        self, columns: Columns, micro_batches: Sequence[Sequence[int]]
    ) -> dict[int, np.ndarray]:
        """Return log pi of each response, float32, by its place in `columns`. It changes
        nothing."""
        found = infer(self._policy.model, columns, micro_batches, self._temperature, self._device)
        self._policy.finish_inference()
        return found

    def _forward_backward(
        self, rows: Sequence[BatchRollout], columns: Columns, indices: Sequence[int]
    ) -> tuple[tuple[int, ...], Arrival] | None:
        """Add one micro-batch to the gradients. Returns the lengths of its responses, and the
        columns of `accumulate` for their tokens, float32 [3 or 4, T]."""
        model = self._policy.model
        host = micro_batch(columns, indices, model.num_tensor_ranks)
        written = ((columns[TOKEN_VERSIONS][i] != NO_VERSION).sum() for i in indices)
        num_written = np.fromiter(written, np.int64, len(indices))  # by the model, int64 [R]
        inputs_on_host = self._loss_inputs(rows, columns, indices, num_written)
        fed, (given, stored) = send((host, inputs_on_host), self._device)
        ref_logprobs = stored.get(REF_LOGPROBS)
        if self._is_own_reference:
            assert model.adapters is not None
            with model.adapters.off(), torch.no_grad():
                ref_logprobs = model(fed, self._temperature).logprobs
        trainer_logprobs, entropy = model(fed, self._temperature)
        if model.routing_stats is not None:
            self.routing.add(model.routing_stats, is_blank=not indices)
        if not indices:
            trainer_logprobs.sum().backward()  # zero, but the other ranks need our part
            return None
        inputs = LossInputs(
            trainer_logprobs=trainer_logprobs,
            generator_logprobs=stored[GENERATOR_LOGPROBS],
            entropy=entropy,
            ref_logprobs=ref_logprobs,
            proximal_logprobs=self._proximal(trainer_logprobs, stored),
            columns={name: stored[name] for name in self._algorithm.loss_columns},
            **given,
        )
        outputs = policy_loss(inputs, self._algorithm, self._token_loss)
        outputs.loss.backward()
        row_ids = [rows[i].row_id for i in indices]
        self.loss_metrics.add(outputs, int(num_written.sum()), row_ids)
        found = [trainer_logprobs.detach(), outputs.weights, outputs.clipped.float()]
        if self._is_own_reference and ref_logprobs is not None:
            found.append(ref_logprobs)
        return fed.response_lengths, platform_of(self._device).fetch(torch.stack(found))

    def _proximal(
        self, trainer_logprobs: torch.Tensor, stored: dict[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """Return the proximal log-probs as the algorithm says; if none were stored before, in a
        batch's first step, they are pi's."""
        if self._algorithm.proximal == "none":
            return None
        if WAY in stored:
            return interpolated(stored[GENERATOR_LOGPROBS], trainer_logprobs, stored[WAY])
        return stored.get(PROXIMAL_LOGPROBS, trainer_logprobs.detach())

    def _loss_inputs(
        self,
        rows: Sequence[BatchRollout],
        columns: Columns,
        indices: Sequence[int],
        num_written: np.ndarray,
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return, in host memory, the fields of `LossInputs` that no forward is needed for, and
        columns of storage, float32 [T]. Weights are 0 for observations, and for tokens that are too
        stale, or truncated and to be masked."""
        names = [GENERATOR_LOGPROBS, *self._algorithm.loss_columns]
        names += [name for name in (REF_LOGPROBS, PROXIMAL_LOGPROBS, WAY) if name in columns]
        lengths = [len(columns[TOKEN_VERSIONS][i]) for i in indices]
        advantages = np.array([rows[i].advantage for i in indices], np.float32)
        pairs = zip(indices, num_written, strict=True)
        in_rollout = (rows[i].num_in_rollout or num for i, num in pairs)
        whole = np.fromiter(in_rollout, np.int64, len(indices))
        given = {
            "advantages": torch.from_numpy(np.repeat(advantages, lengths)),
            "weights": packed([self._weights(rows[i], columns, i) for i in indices]),
            "rollout_index": torch.from_numpy(np.repeat(np.arange(len(indices)), lengths)),
            "rollout_lengths": torch.from_numpy(whole),
        }
        return given, {name: packed([columns[name][i] for i in indices]) for name in names}

    def _weights(self, row: BatchRollout, columns: Columns, i: int) -> np.ndarray:
        versions = columns[TOKEN_VERSIONS][i]
        is_trained = (versions != NO_VERSION) & (versions >= row.oldest_version)
        if self._algorithm.mask_truncated:
            is_trained &= finish_reason(columns[SAMPLING][i]) is not FinishReason.LENGTH
        return is_trained
