"""Prompts of a run that may have been interrupted: first the open ones, then the stream.

Owns: the order in which a resumed run meets its prompts. Does not own: the stream's own order.
Invariant: `state` and the gate's open groups together name every prompt that was drawn and not
yet trained, so a run may be killed at any time, also right after a resume.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from llamarl.data.prompts import PromptStream
from llamarl.types import Prompt


class Backlog(Iterator[Prompt]):
    """`first` lists (epoch, prompt_id) of prompts to hand out before the stream goes on.

    `digest` is what `state` said of the prompts then; ValueError if they are others now, for
    neither `first` nor the stream's position would mean the same.
    """

    def __init__(
        self,
        stream: PromptStream,
        prompts: Sequence[Prompt],
        first: Sequence[tuple[int, int]] = (),
        digest: str | None = None,
    ) -> None:
        self._stream = stream
        self._digest = _digest(prompts)
        if digest is not None and digest != self._digest:
            raise ValueError(
                "data.prompts, data.chat and the tokenizer must give the same prompts as when the "
                "checkpoint was saved, got others: resume with those, or start a new run from "
                "the export"
            )
        by_id = {prompt.prompt_id: prompt for prompt in prompts}
        self._first = deque(replace(by_id[prompt_id], epoch=epoch) for epoch, prompt_id in first)

    def __next__(self) -> Prompt:
        return self._first.popleft() if self._first else next(self._stream)

    def state(self) -> dict[str, object]:
        """What a checkpoint needs of the prompts that nobody has drawn yet."""
        backlog = [[prompt.epoch, prompt.prompt_id] for prompt in self._first]
        return {
            "position": self._stream.position,
            "backlog": backlog,
            "prompts": self._digest,
        }


def _digest(prompts: Sequence[Prompt]) -> str:
    """Stands for all prompts: their numbers and token ids, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(f"{prompt.prompt_id} {prompt.token_ids}\n".encode())
    return digest.hexdigest()
