"""Packed rollouts as tensors: the input of one forward of the trainer or the reference.

Owns: the step from stored columns to tensors of the host. Does not own: which rollouts share a
micro-batch (`packing.py`). Invariant: token ids are copied from storage, never produced again from
text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from llamarl.models.attention import Packing, make_packing
from llamarl.types import PROMPT_IDS, RESPONSE_IDS, Columns


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """R packed rollouts: N tokens that are fed, T response tokens that are predicted.

    A rollout of P prompt and L response tokens feeds P + L - 1 tokens: no token follows its last.
    """

    token_ids: torch.Tensor  # int64 [N], fed tokens
    targets: torch.Tensor  # int64 [N], the token that follows each fed token
    packing: Packing  # of R fed lengths; their sum is N
    response: torch.Tensor  # int64 [T], which of the N positions predict response tokens, in order
    response_lengths: tuple[int, ...]  # R response lengths; their sum is T


def micro_batch(columns: Columns, indices: Sequence[int], multiple: int = 1) -> MicroBatch:
    """Pack the rollouts at `indices` of `columns` (each P >= 1 prompt, L >= 1 response tokens), in
    host memory; `multiple` as in `make_packing`.

    Without rollouts it is one fed token and no response: a rank without work still takes part in
    the collectives of a forward.
    """
    if not indices:
        blank = torch.zeros(1, dtype=torch.int64)
        return MicroBatch(
            token_ids=blank,
            targets=blank,
            packing=make_packing((1,), multiple),
            response=blank[:0],
            response_lengths=(),
        )
    prompts = [columns[PROMPT_IDS][i] for i in indices]
    responses = [columns[RESPONSE_IDS][i] for i in indices]
    whole = [np.concatenate(pair) for pair in zip(prompts, responses, strict=True)]
    lengths = tuple(len(ids) - 1 for ids in whole)
    ends = zip(accumulate(lengths), responses, strict=True)
    response = [np.arange(end - len(ids), end) for end, ids in ends]
    return MicroBatch(
        token_ids=_tensor([ids[:-1] for ids in whole]),
        targets=_tensor([ids[1:] for ids in whole]),
        packing=make_packing(lengths, multiple),
        response=_tensor(response),
        response_lengths=tuple(len(ids) for ids in responses),
    )


def column(columns: Columns, name: str, indices: Sequence[int]) -> torch.Tensor:
    """One per-token float column of the rollouts at `indices`, packed: float32 [T]."""
    return concatenated([columns[name][i] for i in indices])


def concatenated(parts: Sequence[np.ndarray]) -> torch.Tensor:
    """Numbers per token of several rollouts, one after another: float32 [T], in host memory."""
    return torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *parts], dtype=np.float32))


def _tensor(parts: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts, dtype=np.int64))
