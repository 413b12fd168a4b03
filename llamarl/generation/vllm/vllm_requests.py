"""Rollouts inside vLLM: the request that each one makes of it, and what each has written.

Owns: the translation of requests. Does not own: vLLM's core (`vllm_engine.py`). Invariant: a
running rollout holds all its tokens, so none is read back from vLLM.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamarl.episode import turn_start
from llamarl.generation.protocol import PartialOutput
from llamarl.generation.scheduler import QueuedRequest
from llamarl.types import Request

LENGTH_BITS = 25  # expected tokens are below 2^25
PURPOSE_BITS = LENGTH_BITS + 34  # so are steps below 2^34, and priorities below 2^63


@dataclass(slots=True)
class VllmRollout:
    """A rollout that vLLM decodes, with everything written so far (earlier segments included); its
    present turn begins at `turn`, and `num_kept` of its tokens were in the prefix cache."""

    key: str
    request: Request
    limit: int  # response tokens at which it must stop
    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    turn: int = 0
    num_kept: int = 0

    def written(self) -> PartialOutput:
        """The same as arrays."""
        return PartialOutput(
            ids=np.array(self.ids, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            versions=np.array(self.versions, np.int32),
            num_kept=self.num_kept,
        )


def priority(request: Request) -> int:
    """`Request.urgency` as vLLM's priority, of which the lowest starts first."""
    purpose, step, tokens = request.urgency
    return (purpose << PURPOSE_BITS) + (step << LENGTH_BITS) + tokens


def start(
    waiting: QueuedRequest,
    number: int,
    version: int,
    max_model_len: int,
    adapter: Any = None,
) -> tuple[VllmRollout, Any]:
    """The rollout's state, and vLLM's request for its next segment, which may use an adapter.

    `number` counts these requests: among equal priorities the lowest starts first.
    """
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    request, written = waiting.request, waiting.written
    # Not the row id alone, which a resumed rollout has again.
    key = f"{request.row_id}-{number}"
    sampling = request.sampling
    num_prompt, num_written = len(request.prompt_ids), len(written.ids)
    limit = min(request.replay_tokens or sampling.max_tokens, max_model_len - num_prompt)
    wanted = limit - num_written
    if request.segment_tokens:
        wanted = min(wanted, request.segment_tokens)
    params = SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        max_tokens=wanted,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # stop_token_ids holds the end-of-sequence ids
        seed=segment_seed(request.seed, num_written),
        logprobs=0,
        detokenize=False,
    )
    core_request = EngineCoreRequest(
        request_id=key,
        prompt_token_ids=[*request.prompt_ids, *written.ids.tolist()],
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=float(number),
        priority=priority(request),
        lora_request=adapter,
        cache_salt=str(version),  # a prompt's keys and values are shared only within a version
        data_parallel_rank=None,
    )
    before = (column.tolist() for column in (written.ids, written.logprobs, written.versions))
    ids, logprobs, versions = before
    rollout = VllmRollout(
        key, request, limit, ids, logprobs, versions, turn=turn_start(written.versions)
    )
    return rollout, core_request


def segment_seed(seed: int, num_written: int) -> int:
    """The seed of a segment that begins after `num_written` tokens.

    vLLM cannot start in the middle of a random stream, so each segment has its own: the same
    whenever and wherever the rollout is resumed, but not that of an uncut rollout.
    """
    if num_written == 0:
        return seed % 2**63
    key = f"{seed}/{num_written}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
