"""The protocol of an engine, for the generator executor that runs it.

Every method is synchronous and, except `process_weights`, called from the compute thread between
two steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from llamarl.core.records import FinishReason, Request, TurnResult
from llamarl.publish.comparison import Fingerprints
from llamarl.publish.target import Memory


@dataclass(slots=True, kw_only=True)
class PartialOutput:
    """The tokens that a rollout has so far: ids int32 [t], log-probs float32 [t], versions int32
    [t]. `experts` [fed, layers, k] are those that its tokens, from the prompt's first one on, went
    to in each layer with experts: of all but the last token, or of fewer, which were fed when it
    was stopped last. `kept` int32 [t, k] are the tokens among which each one was drawn, -1 where
    there are fewer. `num_kept`: tokens whose keys and values were still there when it was resumed
    last."""

    ids: np.ndarray = field(default_factory=partial(np.empty, 0, np.int32))
    logprobs: np.ndarray = field(default_factory=partial(np.empty, 0, np.float32))
    versions: np.ndarray = field(default_factory=partial(np.empty, 0, np.int32))
    experts: np.ndarray = field(default_factory=partial(np.empty, (0, 0, 0), np.uint8))
    kept: np.ndarray = field(default_factory=partial(np.empty, (0, 0), np.int32))
    num_kept: int = 0


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A rollout that stopped, with everything written so far (earlier segments included), and the
    result of its `episode`, whose further `conversations` are those in which the model wrote."""

    request: Request
    written: PartialOutput
    reason: FinishReason
    episode: TurnResult | None = None
    conversations: tuple[RequestOutput, ...] = ()


class Engine(Protocol):
    """One rank of one replica's engine. `version` is -1 until the first commit, and nothing starts
    before that. `decode_text` turns ids into text and is needed only for stop strings. With
    adapters `memory` holds these alone."""

    memory: Memory
    version: int
    decode_text: Callable[[Sequence[int]], str] | None

    @property
    def num_running(self) -> int:
        """The number of rollouts being decoded."""

    @property
    def has_work(self) -> bool:
        """True if the next step would do something."""

    def load(self, flat: Tensor, folder: str) -> None:
        """Fill `flat` [num_elements] with the weights of a checkpoint's folder, or an adapter's.

        Raises ValueError if they do not fit, are damaged, or hold numbers that are not finite."""

    def load_base(self, folder: str, dtype: str = "float32") -> dict[str, Fingerprints]:
        """Read the weights beside adapters, which stay, from a checkpoint's folder, rounded to the
        trainer's `dtype` as there.

        Returns this rank's sums of them, by kind (`publish/fingerprint.py`)."""

    def process_weights(self, flat: Tensor) -> Any:
        """Return what a commit of the weights in `flat` needs and another thread can make during
        decoding: views, quantised copies. `flat` does not change until the commit."""

    @property
    def num_written_tokens(self) -> int:
        """The number of tokens that rollouts were given since the start; with launched steps, only
        those that were read."""

    def commit(self, processed: Any, version: int) -> int:
        """Decode with these weights as `version` from the next token on. Returns num_running.

        Keys and values written before are kept or recomputed (`generator.kv_after_commit`)."""

    def submit(self, request: Request, written: PartialOutput | None = None) -> None:
        """Queue a rollout; `written` has the tokens of a resumed one so far.

        Raises ValueError if the engine cannot decode it (see `scheduler.check_request`)."""

    def abort_requests(self, row_ids: Sequence[int]) -> None:
        """Stop these rollouts; the next step returns them, marked ABORTED. Unknown ids are
        ignored."""

    def peek(self, row_id: int) -> Sequence[int]:
        """Return the ids that this running rollout has written since its last observation; none if
        it does not run."""

    def admit(self) -> int:
        """Start the waiting rollouts that fit. Returns the number of tokens prefilled."""

    def decode(self) -> list[RequestOutput]:
        """Decode one token for every running rollout. Returns the rollouts that stopped since the
        last call."""

    def movable(self, tag: str) -> list[Tensor]:
        """Return the tensors of one tag, "weights" (beyond `flat`, which the executor owns) or
        "kv", that may leave the device between two steps."""

    def forget_prompts(self) -> None:
        """Drop the prefix cache, because the KV memory's contents are lost. It is called only while
        nothing runs."""

    def close(self) -> None:
        """Give back processes, sockets and memory."""
