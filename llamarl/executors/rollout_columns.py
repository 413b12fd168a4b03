"""Rollouts as rows of storage.

Owns: the translation between what an engine writes and storage's columns. Does not own: either.
Invariant: a row's spans are the runs of its token versions.
"""

import numpy as np

from llamarl.generation.protocol import PartialOutput, RequestOutput
from llamarl.protocols import ColumnStore
from llamarl.types import (
    FINISH_CODES,
    GENERATOR_LOGPROBS,
    PROMPT_IDS,
    RESPONSE_IDS,
    SAMPLING,
    TOKEN_VERSIONS,
    FinishReason,
    Request,
    RolloutInfo,
    version_spans,
)


async def read_written(storage: ColumnStore, requests: list[Request]) -> dict[int, PartialOutput]:
    """What these resumed rollouts have written so far, by row id."""
    row_ids = [request.row_id for request in requests]
    names = [RESPONSE_IDS, GENERATOR_LOGPROBS, TOKEN_VERSIONS]
    columns = await storage.read(row_ids, names)
    return {
        row_id: PartialOutput(ids=ids, logprobs=logprobs, versions=versions)
        for row_id, ids, logprobs, versions in zip(
            row_ids, *(columns[name] for name in names), strict=True
        )
    }


async def write_finished(
    storage: ColumnStore, finished: list[RequestOutput], writer: str = ""
) -> None:
    """Store the columns of these rollouts."""
    columns = {
        PROMPT_IDS: [np.array(item.request.prompt_ids, np.int32) for item in finished],
        RESPONSE_IDS: [item.written.ids for item in finished],
        GENERATOR_LOGPROBS: [item.written.logprobs for item in finished],
        TOKEN_VERSIONS: [item.written.versions for item in finished],
        SAMPLING: [_sampling_row(item.request, item.reason) for item in finished],
    }
    await storage.write([item.request.row_id for item in finished], columns, writer)


def rollout_info(finished: RequestOutput, replica: int) -> RolloutInfo:
    """What the controller gets of it."""
    return RolloutInfo(
        row_id=finished.request.row_id,
        num_prompt_tokens=len(finished.request.prompt_ids),
        num_tokens=len(finished.written.ids),
        spans=version_spans(finished.written.versions),
        finish_reason=finished.reason,
        replica=replica,
    )


def _sampling_row(request: Request, reason: FinishReason) -> np.ndarray:
    sampling = request.sampling
    values = [sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens]
    return np.array([*values, request.seed, FINISH_CODES[reason]], np.float64)
