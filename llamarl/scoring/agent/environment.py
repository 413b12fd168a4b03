"""The environment that a program plays, as a recipe's task.py defines it."""

from __future__ import annotations

from typing import Any


class AgentEnvironment:
    """An environment whose episode is played by a program that asks for the model's turns. A
    subclass defines `play`, and may have any other members of its own."""

    conversations: list[list[dict[str, Any]]]
    """The messages of each conversation of the episode, once it has ended."""
    program_failure: str = ""
    """How the program ended, if not as one that has done its work: the episode has failed with this
    error if the last request was refused as none that can be served, or if there was none."""

    def play(self, url: str, **row: Any) -> Any:
        """Play an episode of this prompt's row with the model served at `url`, and return its
        reward, perhaps with those of single conversations: (reward, {the id of any response in a
        conversation: its reward}). It may be a coroutine; a plain function runs in a thread."""
        raise NotImplementedError("an AgentEnvironment must have play(url, **row)")
