"""The token ids between two turns of a model, and the reading of what a turn says.

    template([user, assistant, tool], open) = ... the assistant's turn, its end | the observation

They are taken from a made-up conversation, whose last turn is found by a unique word in it. So
changes that a template makes to earlier turns, such as dropping their thinking, ending them with
another token, or writing them otherwise than the last one, never alter ids that the model wrote. An
observation's ids depend on the observation alone, and begin right after the token that ended the
turn before."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from llamarl.core.config import EnvironmentConfig
from llamarl.core.groups import THOUGHT
from llamarl.model.text_ids import unmarked
from llamarl.model.tokenizer import Message, Tokenizer
from llamarl.scoring.definition import Kind, Schema
from llamarl.scoring.tool_calls import ToolCall, family_of, find_calls, template_calls

KEY = "environment.calls"
USER: Message = {"role": "user", "content": "question"}
SAID, OBSERVED = "said7d3c", "observed7d3c"
"""Unique words by which a turn and an observation are found in a rendered conversation."""
CALL_ID = "call00001"  # some templates want nine characters
NUM_OPENED = 64  # formats of tools that agents have brought
NUM_KNOWN = 1024  # turns, and observations, that are not worked out again
SHORT_TOKENS = 256  # of a turn that is known: rollouts of a group do not write longer ones alike
SHORT_CHARS = 1024  # of an observation


class TurnEnd(NamedTuple):
    """The text that a template writes at the end of an old turn: `body`, such as the rest of a
    call, then `token`; or, where that is empty, any token that ends a completion."""

    body: str
    token: str = ""


class TurnText(NamedTuple):
    """One turn of a model: its calls, and the text before them, or the whole text unless each call
    can be run."""

    text: str
    calls: list[ToolCall]


class TurnFormat:
    """The format of turns with one kind of environment, by the tokenizer's chat template.

    Raises ValueError, in one line, if `config.calls` is auto and the template shows no form of
    calls, if it cannot hold the results of tools or the messages of the environment, or if it
    renders one in different ways after different turns. A special token in an observation is text
    with `config.split_special_tokens`, else that token."""

    def __init__(self, tokenizer: Tokenizer, kind: Kind, config: EnvironmentConfig) -> None:
        self._tokenizer, self.kind, self._config = tokenizer, kind, config
        self.family = _family(tokenizer, config.calls) if kind.schemas else ""
        """The family of its calls; empty if there are none."""
        self.names = {schema["function"]["name"] for schema in kind.schemas}
        """The names of the tools."""
        self._special = sorted(tokenizer.special_ids, key=len, reverse=True)
        ends = {*tokenizer.eos_token_ids}
        self._ends = [text for text in self._special if tokenizer.special_ids[text] in ends]
        self._shown: Sequence[Schema] = kind.schemas
        self.is_thinking = self._render([USER]).rstrip().endswith(THOUGHT)
        """Whether the tokens that a model writes in a turn begin within its thinking."""
        self._turn_ends: dict[bool, TurnEnd] = {}  # of turns with a call, and without
        self._has_calls = False
        with suppress(ValueError):
            if (
                kind.schemas
            ):  # some templates require a call before a tool's result, others have none
                self._find_end(is_call=True)
                self._has_calls = True
        self._check()
        self._leave_out_tools()
        self._known_turn = lru_cache(NUM_KNOWN)(self._read)
        self._known_observation = lru_cache(NUM_KNOWN)(self._encode)

    def read(self, ids: Sequence[int] | np.ndarray) -> TurnText:
        """Return the text and the calls of a turn with these ids."""
        return (self._known_turn if len(ids) <= SHORT_TOKENS else self._read)(tuple(ids))

    def begun(self, ids: Sequence[int]) -> str:
        """Return the text of a turn that goes on after these ids, as far as what `read` returns at
        its end will begin with it: not what may belong to a call, nor white space at the end."""
        text = self._tokenizer.decode(ids)
        if self.family == "template" or (self.family == "llama" and "{" in text):
            return ""
        if self.family:
            names = self.names if self.family == "tagged" else {"tool_call"}
            for mark in (f"<{name}>" for name in names):
                text = text.partition(mark)[0]
                size = next((n for n in range(len(mark), 0, -1) if text.endswith(mark[:n])), 0)
                text = text[: len(text) - size]
        return text.rstrip().rstrip("\ufffd").rstrip()

    def observation(self, messages: Sequence[Message], last_id: int) -> np.ndarray:
        """Return the int32 ids of these messages, and of the text that the template puts before the
        next turn, after a turn that ended with `last_id`. Raises ValueError if the template refuses
        them."""
        is_ended = last_id in self._tokenizer.eos_token_ids
        text = json.dumps(messages)
        encode = self._known_observation if len(text) <= SHORT_CHARS else self._encode
        return np.array(encode(text, is_ended), np.int32)

    def _read(self, ids: tuple[int, ...]) -> TurnText:
        text, before, calls = self._tokenizer.decode(ids), "", list[ToolCall]()
        if self.family == "template":
            message = self._tokenizer.parse_response(ids)
            calls, before = template_calls(message), str(message.get("content") or "")
        elif self.family:
            raw = self._tokenizer.decode_raw(ids)
            for end in self._ends:
                raw = raw.removesuffix(end)
            schemas = self.kind.schemas
            found = find_calls(raw, self.family, schemas, is_thinking=self.is_thinking)
            calls = [call for _, call in found]
            before = raw[: found[0][0]] if found else raw
            for token in self._special:
                before = before.replace(token, "")
            before = before.rstrip()
        is_good = calls and not any(call.error for call in calls)
        return TurnText(before if is_good else text, calls)

    def _encode(self, messages: str, is_ended: bool) -> list[int]:
        """Return the ids of these messages, which are JSON, after a turn that has ended, or not."""
        end, rest = self._split(json.loads(messages))
        text, before = (rest, end) if is_ended else (end + rest, SAID)
        text = text if self._config.split_special_tokens else unmarked(text)
        return self._tokenizer.encode_all([text], special=False, before=[before])[0]

    def _render(self, messages: Sequence[Message], *, is_open: bool = True) -> str:
        return self._tokenizer.render_chat(messages, self._shown, is_open=is_open)

    def _split(
        self, added: Sequence[Message], before: Sequence[Message] = (USER,)
    ) -> tuple[str, str]:
        """Return the token that ends the turn before, and the text that follows it."""
        is_call = self._has_calls and added[0]["role"] == "tool"
        after = self._after_turn(before, added, is_call)
        end = self._turn_ends.get(is_call) or self._find_end(is_call)
        self._turn_ends[is_call] = end
        tokens = [end.token] if end.token else self._ends
        found = next((token for token in tokens if after.startswith(end.body + token)), None)
        if found is None:
            raise self._wrong(f"end the turn before {_role(added)} as others, it does not")
        return found, after[len(end.body + found) :]

    def _after_turn(
        self, before: Sequence[Message], added: Sequence[Message], is_call: bool
    ) -> str:
        """Return the text that the template writes after the last word of a turn that these
        messages follow."""
        new = self._render([*before, self._turn(SAID, is_call), *added])
        _, found, after = new.partition(SAID)
        if not found:
            raise self._wrong(f"keep earlier turns when {_role(added)} follows, it does not")
        return after

    def _find_end(self, is_call: bool) -> TurnEnd:
        """Return how old turns end: with the first token that ends a completion; some templates
        write another token, or none, in its place."""
        samples = self._samples(OBSERVED, is_call=is_call)
        after = self._after_turn([USER], samples, is_call)
        old, _, _ = after.partition(OBSERVED)
        if (place := _first(old, self._ends)) >= 0:
            return TurnEnd(old[:place])
        last = self._render([USER, self._turn(SAID, is_call)], is_open=False).partition(SAID)[2]
        place = _first(last, self._ends)
        if place < 0:
            ends = ", ".join(map(repr, self._ends)) or "none"
            raise self._wrong(f"end each turn with a token that ends a completion ({ends})")
        body, old_token = last[:place], ""
        if (place := _first(body, self._special)) >= 0:  # which is not the last of a turn
            body, old_token = body[:place], body[place:]
        else:
            following = after.removeprefix(body)
            old_token = next((each for each in self._special if following.startswith(each)), "")
        return TurnEnd(body, old_token) if old_token else TurnEnd("", body)

    def _turn(self, word: str, is_call: bool) -> Message:
        """Return a turn of a model that says this word, in a call or as text."""
        if not is_call:
            return {"role": "assistant", "content": word}
        name = self.kind.schemas[0]["function"]["name"]
        call = {"name": name, "arguments": {"value": word}}
        whole = {"type": "function", "id": CALL_ID, "function": call}
        return {"role": "assistant", "content": "", "tool_calls": [whole]}

    def _wrong(self, must: str) -> ValueError:
        return ValueError(f"the chat template of {self._tokenizer.folder} must {must}")

    def _samples(self, content: str, *, is_call: bool = True) -> list[Message]:
        """Return a sample of what the environment might say, to a call or to a turn without one."""
        if self.kind.has_step or (self._has_calls and not is_call):
            return [{"role": "user", "content": content}]
        name = self.kind.schemas[0]["function"]["name"]
        return [{"role": "tool", "name": name, "content": content}]

    def _leave_out_tools(self) -> None:
        """Leave the schemas of tools out of what is rendered if they change no observation."""
        if self.kind.has_step:
            return
        with_tools = self._split(self._samples("1"))
        self._shown = ()
        try:
            is_same = self._split(self._samples("1")) == with_tools
        except ValueError:
            is_same = False
        self._shown = () if is_same else self.kind.schemas

    def _check(self) -> None:
        samples, again = self._samples("1"), self._samples("2")
        first = self._split(again)
        earlier = self._turn("answer", self._has_calls)
        later = self._split(again, [USER, earlier, *samples])
        if first != later:
            role = _role(samples)
            raise self._wrong(f"render {role} the same in every turn, it does not")
        if first == self._split(self._samples("")):
            raise self._wrong(f"show {_role(samples)}, it leaves that out")


def _first(text: str, tokens: Sequence[str]) -> int:
    """Return the place of the first of these tokens; -1 if there is none."""
    return min((at for token in tokens if (at := text.find(token)) >= 0), default=-1)


def _role(messages: Sequence[Message]) -> str:
    return "a tool's result" if messages[0]["role"] == "tool" else "an observation"


def _family(tokenizer: Tokenizer, calls: str) -> str:
    response_template = tokenizer.response_template
    if calls == "template" and response_template is None:
        must = f"{KEY} must name a form of calls unless the tokenizer has a response_template"
        raise ValueError(f"{must}, got template with {tokenizer.folder}")
    if calls != "auto":
        return calls
    found = family_of(tokenizer.chat_template, response_template)
    if found is None:
        must = f"{KEY} must be hermes, llama, xml or tagged for a chat template that shows none"
        raise ValueError(f"{must}, got auto with {tokenizer.folder}")
    return found


class TurnFormats:
    """The format of each kind. Raises ValueError as TurnFormat does."""

    def __init__(
        self, tokenizer: Tokenizer, kinds: Mapping[str, Kind], config: EnvironmentConfig
    ) -> None:
        self._kinds = {name: TurnFormat(tokenizer, kind, config) for name, kind in kinds.items()}
        self._open = lru_cache(NUM_OPENED)(
            lambda schemas: TurnFormat(tokenizer, Kind(tuple(json.loads(schemas))), config)
        )

    def of(self, kind: str, opened: Sequence[Schema] = ()) -> TurnFormat:
        """Return the format of an episode of this kind, or of an episode that its environment has
        `opened` with tools of these schemas. The most recent ones of the latter are cached."""
        return self._open(json.dumps(opened)) if opened else self._kinds[kind]
