"""transformers' `generate` with given lengths, as llamarl's `sampling.replay_lengths` has it.

A rollout ends with the end-of-sequence token at its length, and never before; nothing else of the
distribution changes. Both environments import this.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, PreTrainedModel


class ReplayedLengths(LogitsProcessor):
    """For one generation: row i ends when it has `lengths[i]` tokens behind the prompt."""

    def __init__(self, lengths: Sequence[int], num_prompt_tokens: int, eos_token_id: int) -> None:
        self._last = torch.tensor(lengths) + num_prompt_tokens - 1
        self._eos_token_id = eos_token_id

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`scores` [n, V] of the next token, changed in place."""
        is_last = self._last <= input_ids.shape[1]
        scores[:, self._eos_token_id] = torch.where(is_last, 1e9, -torch.inf)
        return scores


def shares(lengths: Sequence[int], num_rows: int, rank: int, num_ranks: int) -> Iterator[list[int]]:
    """Lengths of this rank's rows, generation after generation: of all ranks' rows in their order,
    entry after entry of `lengths`, again and again."""
    endless = itertools.cycle(lengths)
    while True:
        step = list(itertools.islice(endless, num_rows * num_ranks))
        yield step[rank * num_rows : (rank + 1) * num_rows]


def replay(
    model: PreTrainedModel,
    lengths: Sequence[int],
    *,
    num_rows: int,
    rank: int,
    num_ranks: int,
    eos_token_id: int,
) -> None:
    """Let all generations of `model` on this rank have these lengths."""
    own = shares(lengths, num_rows, rank, num_ranks)
    generate = model.generate

    def with_lengths(*, input_ids: torch.Tensor, **named: Any) -> Any:
        processor = ReplayedLengths(next(own), input_ids.shape[1], eos_token_id)
        return generate(input_ids=input_ids, logits_processor=[processor], **named)

    model.generate = with_lengths
