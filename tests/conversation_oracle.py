"""The oracle of an agent's conversations: what its program has asked and was told, replayed as
text, and by transformers, token by token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from llamarl.core.records import NO_VERSION
from llamarl.model.tokenizer import Tokenizer

END = "<|end|>"


def rendered(messages: Sequence[Mapping[str, Any]]) -> str:
    """What the quickstart's chat template writes for these messages."""
    return "".join(f"<|{m['role']}|>{m['content'] or ''}{END}" for m in messages)


@dataclass(frozen=True)
class Template:
    """What a chat template writes: the `head` of a conversation with these tools, and messages."""

    tokenizer: Tokenizer
    rendered: Callable[[Sequence[Mapping[str, Any]]], str] = rendered
    head: Callable[[Any], str] = lambda tools: "<bos>"

    def known(self, text: str) -> str:
        """The text without what the tokenizer has no tokens for."""
        return self.tokenizer.decode_raw(self.tokenizer.encode(text, special=False))


@dataclass(frozen=True)
class Turn:
    """A turn as it stands in the archive: the ids before it, and its own, with their log-probs."""

    row_id: int
    before: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def turns_of(line: Mapping[str, Any]) -> list[Turn]:
    ids, versions = line["response_ids"], line["token_versions"]
    found, place = [], 0
    for is_observed, run in groupby(versions, key=lambda version: version == NO_VERSION):
        end = place + len([*run])
        if not is_observed:
            before = (*line["prompt_ids"], *ids[:place])
            logprobs = tuple(line["generator_logprobs"][place:end])
            found.append(Turn(line["row_id"], before, tuple(ids[place:end]), logprobs))
        place = end
    return found


class Replay:
    """The oracle: an exchange follows the longest earlier one that it extends, without a turn that
    the model did not write; its context is that one's, its turn, and the new messages."""

    def __init__(
        self, exchanges: Sequence[Mapping[str, Any]], turns: Sequence[Turn], template: Template
    ) -> None:
        self.exchanges, self.left, self.template = exchanges, [*turns], template
        self.texts: list[str] = []  # of each exchange: context and turn
        self.num_rows = 0
        tips: set[int] = set()  # exchanges that are the last of their row
        for number, each in enumerate(exchanges):
            parents = self.parents(number)
            new = each["messages"][self.length(parents[0]) :] if parents else each["messages"]
            heads = [self.texts[parent] for parent in parents] or [template.head(each["tools"])]
            new_text = template.rendered(new)
            contexts = {template.known(f"{head}{new_text}<|assistant|>") for head in heads}
            turn = self.take(contexts, each)
            check_turn(turn, each, template.tokenizer)
            context = template.tokenizer.decode_raw(turn.before)
            raw = template.tokenizer.decode_raw(turn.ids)
            self.texts.append(context + raw + END * (not raw.endswith(END)))
            free = [parent for parent in parents if parent in tips]
            tips.difference_update(free[:1])
            self.num_rows += not free
            tips.add(number)

    def length(self, number: int) -> int:
        return len(self.exchanges[number]["messages"]) + 1

    def parents(self, number: int) -> list[int]:
        """Earlier exchanges of equal messages that this one follows."""
        messages, tools = (self.exchanges[number][key] for key in ("messages", "tools"))
        found: dict[int, list[int]] = defaultdict(list)
        for place, each in enumerate(self.exchanges[:number]):
            said, size = [*each["messages"], each["reply"]], self.length(place)
            is_start = each["tools"] == tools and messages[:size] == said
            if is_start and not any(m["role"] == "assistant" for m in messages[size:]):
                found[size].append(place)
        return found[max(found)] if found else []

    def take(self, contexts: set[str], exchange: Mapping[str, Any]) -> Turn:
        """The turn of the archive that was written after one of these contexts."""
        usage, logprobs = exchange["usage"], exchange["logprobs"]
        sizes = usage["prompt_tokens"], usage["completion_tokens"]
        for turn in self.left:
            is_it = (len(turn.before), len(turn.ids)) == sizes
            is_it = is_it and (not logprobs or np.allclose(turn.logprobs, logprobs, atol=1e-6))
            if is_it and self.template.tokenizer.decode_raw(turn.before) in contexts:
                self.left.remove(turn)
                return turn
        raise AssertionError(f"no turn of {sizes} tokens follows {contexts}")


def check_turn(turn: Turn, exchange: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """The program was told what the model wrote, and the options of its request were kept."""
    said, options = exchange["reply"]["content"] or "", exchange["options"]
    assert said.strip() in tokenizer.decode_raw(turn.ids)
    assert len(turn.ids) <= options.get("max_tokens", 1000)
    for stop in options.get("stop", ()):
        assert stop not in said
        assert stop not in tokenizer.decode(turn.ids[:-1]), "the turn ends where it comes"


@torch.no_grad()
def check_logprobs(lines: Sequence[Mapping[str, Any]], checkpoint: Path) -> None:
    """Those of every written token are what transformers computes after its exact ids."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for line in lines:
        ids = torch.tensor([line["prompt_ids"] + line["response_ids"]])
        logprobs = model(ids).logits[0].log_softmax(-1)
        start = len(line["prompt_ids"])
        expected = logprobs[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0].numpy()
        is_written = np.array(line["token_versions"]) != NO_VERSION
        found = np.array(line["generator_logprobs"])
        assert np.abs(found - expected)[is_written].max() < 1e-4, line["row_id"]
        for name in ("trainer_logprobs", "ref_logprobs"):
            if name in line:
                others = np.array(line[name])
                assert np.abs(others - expected)[is_written].max() < 1e-4, (line["row_id"], name)
