"""Prompts of a run that may have been interrupted: first the open ones, then the stream.

Owns: the order in which a resumed run meets its prompts. Does not own: the stream's own order.
Invariant: `state` and the gate's open groups together name every prompt that was drawn and not
yet trained, so a run may be killed at any time, also right after a resume.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from llamarl.environments.prompts import PromptStream
from llamarl.types import Prompt


class ResumablePrompts(Iterator[Prompt]):
    """`first` lists (epoch, prompt_id) of prompts to hand out before the stream goes on.

    `identity` says what must be the same in a run that goes on from `state`. ValueError if `first`
    names a prompt that is none of `prompts`; there are `num_prompts` of those.
    """

    def __init__(
        self,
        stream: PromptStream,
        prompts: Sequence[Prompt],
        first: Sequence[tuple[int, int]] = (),
        identity: Mapping[str, object] | None = None,
    ) -> None:
        self._stream = stream
        self._identity = dict(identity or {})
        self.num_prompts = len(prompts)
        by_id = {prompt.prompt_id: prompt for prompt in prompts}
        for _, prompt_id in first:
            if prompt_id not in by_id:
                raise ValueError(f"open prompts must be among data.prompts, got line {prompt_id}")
        self._first = deque(replace(by_id[prompt_id], epoch=epoch) for epoch, prompt_id in first)

    def __next__(self) -> Prompt:
        return self._first.popleft() if self._first else next(self._stream)

    def state(self) -> dict[str, object]:
        """What a checkpoint needs of the prompts that nobody has drawn yet."""
        backlog = [[prompt.epoch, prompt.prompt_id] for prompt in self._first]
        return {
            "position": self._stream.position,
            "backlog": backlog,
            "identity": self._identity,
        }
