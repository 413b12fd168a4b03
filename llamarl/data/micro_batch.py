"""Packed rollouts as tensors: the input of one forward of the trainer or the reference.

Owns: the step from stored columns to tensors. Does not own: which rollouts share a micro-batch
(`packing.py`). Invariant: token ids are copied from storage, never produced again from text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from llamarl.types import PROMPT_IDS, RESPONSE_IDS, Columns


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """R packed rollouts: N tokens that are fed, T response tokens that are predicted.

    A rollout of P prompt and L response tokens feeds P + L - 1 tokens: no token follows its last.
    """

    token_ids: torch.Tensor  # int64 [N], fed tokens
    targets: torch.Tensor  # int64 [N], the token that follows each fed token
    lengths: tuple[int, ...]  # R fed lengths; their sum is N
    response: torch.Tensor  # int64 [T], which of the N positions predict response tokens, in order
    response_lengths: tuple[int, ...]  # R response lengths; their sum is T


def micro_batch(columns: Columns, indices: Sequence[int], device: torch.device) -> MicroBatch:
    """Pack the rollouts at `indices` of `columns` (each P >= 1 prompt, L >= 1 response tokens).

    Without rollouts it is one fed token and no response: a rank without work still takes part in
    the collectives of a forward.
    """
    if not indices:
        blank = torch.zeros(1, dtype=torch.int64, device=device)
        return MicroBatch(
            token_ids=blank, targets=blank, lengths=(1,), response=blank[:0], response_lengths=()
        )
    prompts = [columns[PROMPT_IDS][i] for i in indices]
    responses = [columns[RESPONSE_IDS][i] for i in indices]
    whole = [np.concatenate(pair) for pair in zip(prompts, responses, strict=True)]
    lengths = tuple(len(ids) - 1 for ids in whole)
    ends = zip(accumulate(lengths), responses, strict=True)
    response = [np.arange(end - len(ids), end) for end, ids in ends]
    return MicroBatch(
        token_ids=_tensor([ids[:-1] for ids in whole], device),
        targets=_tensor([ids[1:] for ids in whole], device),
        lengths=lengths,
        response=_tensor(response, device),
        response_lengths=tuple(len(ids) for ids in responses),
    )


def column(
    columns: Columns, name: str, indices: Sequence[int], device: torch.device
) -> torch.Tensor:
    """One per-token float column of the rollouts at `indices`, packed: float32 [T]."""
    parts = [columns[name][i] for i in indices]
    packed = np.concatenate(parts) if parts else np.zeros(0)
    return torch.from_numpy(packed.astype(np.float32)).to(device)


def _tensor(parts: list[np.ndarray], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)
