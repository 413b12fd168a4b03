"""Rollouts inside vLLM: what is asked of it for each, and what each has written.

Owns: the translation of requests, and when a rollout ends. Does not own: vLLM's core
(`engine.py`). Invariant: a running rollout knows all its tokens, so nothing is read back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llamarl.generation.scheduler import PartialOutput, QueuedRequest
from llamarl.types import FinishReason, Request


@dataclass(slots=True)
class VllmRollout:
    """A rollout that vLLM decodes: what was written before, and the tokens since."""

    key: str
    request: Request
    before: PartialOutput
    limit: int  # response tokens at which it must stop
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def written(self) -> PartialOutput:
        """Everything written so far, earlier segments included."""
        return PartialOutput(
            ids=np.concatenate([self.before.ids, np.array(self.ids, np.int32)]),
            logprobs=np.concatenate([self.before.logprobs, np.array(self.logprobs, np.float32)]),
            versions=np.concatenate([self.before.versions, np.array(self.versions, np.int32)]),
        )

    def reason_of_length(self) -> FinishReason:
        """Why it ended, when vLLM says that it is as long as was asked for."""
        num_tokens = len(self.before.ids) + len(self.ids)
        return FinishReason.LENGTH if num_tokens >= self.limit else FinishReason.SEGMENT

    def completes_text(self, decode_text: Callable[[Sequence[int]], str]) -> bool:
        """True if the newest token completed a stop string."""
        strings = self.request.sampling.stop_strings
        # A token is at least one byte, so the text of this many tokens holds the longest string,
        # and a few more keep characters whole at the window's left edge.
        window = max(len(text.encode()) for text in strings) + 8
        ids = self.ids[-window:]
        if len(ids) < window:
            ids = [*self.before.ids[len(ids) - window :].tolist(), *ids]
        text = decode_text(ids)
        return any(string in text for string in strings)


def start(
    waiting: QueuedRequest, key: str, version: int, max_model_len: int
) -> tuple[VllmRollout, Any]:
    """The rollout's state, and vLLM's request for its next segment."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    request, written = waiting.request, waiting.written
    sampling = request.sampling
    num_prompt, num_written = len(request.prompt_ids), len(written.ids)
    limit = min(sampling.max_tokens, max_model_len - num_prompt)
    wanted = limit - num_written
    if request.segment_tokens:
        wanted = min(wanted, request.segment_tokens)
    params = SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        max_tokens=wanted,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # the stop ids say all
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
        arrival_time=0.0,
        lora_request=None,
        cache_salt=str(version),  # a prompt's keys and values are shared only within a version
        data_parallel_rank=None,
    )
    return VllmRollout(key, request, written, limit), core_request


def segment_seed(seed: int, num_written: int) -> int:
    """The seed of a segment that begins after `num_written` tokens.

    vLLM cannot enter a random stream in its middle, so each segment has a stream of its own: the
    same whenever and wherever it is resumed, but not that of an uncut rollout.
    """
    if num_written == 0:
        return seed % 2**63
    key = f"{seed}/{num_written}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
