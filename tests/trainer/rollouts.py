"""Stored rollouts and batches of them, for the tests of the trainer."""

import numpy as np

from llamarl.core.groups import Batch, BatchRollout
from llamarl.core.records import (
    FINISH_CODES,
    GENERATOR_LOGPROBS,
    PROMPT_IDS,
    REF_LOGPROBS,
    RESPONSE_IDS,
    SAMPLING,
    TOKEN_VERSIONS,
    FinishReason,
)
from llamarl.trainer.packing import pack
from tests.tiny_checkpoints import CONFIG

VOCAB = CONFIG["vocab_size"]


TEMPERATURE = 0.8


def make_rollouts(num_rows=13, seed=0, oldest_version=0):
    """(cells by row id, batch rows): odd lengths, two versions, one advantage of zero."""
    random = np.random.default_rng(seed)
    cells, rows = {}, []
    for row_id in range(num_rows):
        num_prompt = int(random.integers(1, 9))
        num_tokens = int(random.integers(1, 26))
        cells[row_id] = {
            PROMPT_IDS: random.integers(0, VOCAB, num_prompt).astype(np.int32),
            RESPONSE_IDS: random.integers(0, VOCAB, num_tokens).astype(np.int32),
            GENERATOR_LOGPROBS: (-np.log(VOCAB) + random.normal(size=num_tokens)).astype("f4"),
            TOKEN_VERSIONS: np.sort(random.integers(0, 3, num_tokens)).astype(np.int32),
            SAMPLING: np.array(
                [TEMPERATURE, 0, 1, 64, 0, FINISH_CODES[FinishReason.LENGTH] * (row_id % 5 == 2)],
                np.float64,
            ),
        }
        rows.append(
            BatchRollout(
                row_id=row_id,
                group_id=row_id // 4,
                num_prompt_tokens=num_prompt,
                num_tokens=num_tokens,
                num_generated=num_tokens,
                advantage=0.0 if row_id == 4 else float(random.normal()),
                oldest_version=oldest_version,
            )
        )
    return cells, tuple(rows)


def add_reference(cells, seed=1):
    """Give every rollout `ref_logprobs`."""
    random = np.random.default_rng(seed)
    for cell in cells.values():
        noise = random.normal(size=len(cell[RESPONSE_IDS]))
        cell[REF_LOGPROBS] = (-np.log(VOCAB) + noise).astype("f4")


def make_batch(rows, num_ranks, budget, version=0):
    lengths = [row.num_prompt_tokens + row.num_tokens for row in rows]
    return Batch(version=version, rows=rows, assignment=pack(lengths, num_ranks, budget))
