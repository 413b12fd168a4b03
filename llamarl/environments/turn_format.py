"""The token ids between two turns of a model, and what the model wrote in one.

Owns: the ids of observations, by the chat template's own difference; the check of a template. Does
not own: the forms of calls (`tool_calls.py`), or the ids that a model wrote, which are never
rendered again. Invariant: an observation's ids depend on the observation alone, and begin right
after the token that ended the turn before.

    template([user, assistant, tool], open) - template([user, assistant])  =  the observation

The difference is taken with a conversation of no meaning, so whatever a template does to earlier
turns once they are old, such as dropping their thinking, is not done to what was written.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from llamarl.data.tokenizer import Message, Tokenizer
from llamarl.environments.definition import Kind, Schema
from llamarl.environments.tool_calls import (
    ToolCall,
    family_of,
    parse_calls,
    template_calls,
    text_before,
)
from llamarl.episode import THOUGHT

KEY = "environment.calls"
USER: Message = {"role": "user", "content": "question"}
ANSWER: Message = {"role": "assistant", "content": "answer"}
THINKING: Message = {"role": "assistant", "content": "<think>\nthought\n</think>\n\nanswer"}
CALL_ID = "call00001"  # some templates want nine characters
NUM_KNOWN = 1024  # turns, and observations, that are not worked out again
SHORT_TOKENS = 256  # of a turn that is known: rollouts of a group do not write longer ones alike
SHORT_CHARS = 1024  # of an observation


@dataclass(frozen=True, slots=True)
class TurnText:
    """What a model wrote in one turn: its calls, and the text before them, or all of it unless each
    call can be run."""

    text: str
    calls: list[ToolCall]


class TurnFormat:
    """Of one kind of environment, with the tokenizer's chat template.

    ValueError, in one line, if `calls` is auto and the template shows no form of calls, if it
    cannot hold the answers of tools or of the environment, or if how it renders one depends on the
    turns before.
    """

    def __init__(self, tokenizer: Tokenizer, kind: Kind, calls: str = "auto") -> None:
        self._tokenizer, self._kind = tokenizer, kind
        self._family = _family(tokenizer, calls) if kind.schemas else ""
        special = tokenizer.special_ids.items()
        self._ends = [text for text, i in special if i in tokenizer.eos_token_ids]
        self._shown: Sequence[Schema] = kind.schemas
        # What a model writes in a turn then begins within its thinking.
        self._is_thinking = self._render([USER]).rstrip().endswith(THOUGHT)
        self._answer = self._find_answer()
        self._check()
        self._leave_out_tools()
        self._before = self._render([USER, self._answer], is_open=False)
        self._known_turn = lru_cache(NUM_KNOWN)(self._read)
        self._known_observation = lru_cache(NUM_KNOWN)(self._encode)

    @property
    def drops_thinking(self) -> bool:
        """Whether the template leaves an earlier turn's thinking out."""
        before = self._render([USER, THINKING], is_open=False)
        return not self._render([USER, THINKING, *self._samples("1")]).startswith(before)

    def read(self, ids: Sequence[int] | np.ndarray) -> TurnText:
        """What these ids, of one turn, say."""
        return (self._known_turn if len(ids) <= SHORT_TOKENS else self._read)(tuple(ids))

    def observation(self, messages: Sequence[Message], last_id: int) -> np.ndarray:
        """int32 ids of these messages, and of what the template puts before the next turn, after a
        turn that ended with `last_id`. ValueError if the template refuses them."""
        is_ended = last_id in self._tokenizer.eos_token_ids
        text = json.dumps(messages)
        encode = self._known_observation if len(text) <= SHORT_CHARS else self._encode
        return np.array(encode(text, is_ended), np.int32)

    def _read(self, ids: tuple[int, ...]) -> TurnText:
        text = self._tokenizer.decode(ids)
        if self._family == "template":
            message = self._tokenizer.parse_response(ids)
            return _turn_text(text, template_calls(message), str(message.get("content") or ""))
        if not self._family:
            return TurnText(text, [])
        raw = self._tokenizer.decode_raw(ids)
        for end in self._ends:
            raw = raw.removesuffix(end)
        form = self._family, self._kind.schemas
        calls = parse_calls(raw, *form, is_thinking=self._is_thinking)
        return _turn_text(text, calls, text_before(text, *form, is_thinking=self._is_thinking))

    def _encode(self, messages: str, is_ended: bool) -> list[int]:
        """The ids of these messages, which are JSON, after a turn that has ended, or not."""
        end, rest = self._split([USER, self._answer], json.loads(messages), self._before)
        return self._tokenizer.encode(rest if is_ended else end + rest, special=False)

    def _render(self, messages: Sequence[Message], *, is_open: bool = True) -> str:
        return self._tokenizer.render_chat(messages, self._shown, is_open=is_open)

    def _split(
        self, before: Sequence[Message], added: Sequence[Message], old: str | None = None
    ) -> tuple[str, str]:
        """(the token that ends the turn before, all that follows it); `old` is the text of the
        messages `before`, if it is known."""
        if old is None:
            old = self._render(before, is_open=False)
        new = self._render([*before, *added])
        must = f"the chat template of {self._tokenizer.folder} must"
        if not new.startswith(old):
            raise ValueError(f"{must} keep earlier turns when {_role(added)} follows, it does not")
        at, end = max(((old.rfind(each), each) for each in self._ends), default=(-1, ""))
        if at < 0:
            ends = ", ".join(map(repr, self._ends)) or "none"
            raise ValueError(f"{must} end each turn with a token that ends a completion ({ends})")
        return end, old[at + len(end) :] + new[len(old) :]

    def _samples(self, content: str) -> list[Message]:
        """What the environment might say."""
        if self._kind.has_step:
            return [{"role": "user", "content": content}]
        name = self._kind.schemas[0]["function"]["name"]
        return [{"role": "tool", "name": name, "content": content}]

    def _find_answer(self) -> Message:
        """A turn that the template lets an observation follow: some want a call before."""
        if not self._kind.schemas:
            return ANSWER
        call = {"name": self._kind.schemas[0]["function"]["name"], "arguments": {}}
        whole = {"type": "function", "id": CALL_ID, "function": call}
        calling: Message = {"role": "assistant", "content": "", "tool_calls": [whole]}
        try:
            self._split([USER, calling], self._samples("1"))
            return calling
        except ValueError:
            return ANSWER

    def _leave_out_tools(self) -> None:
        """Where their schemas change no observation, they are not rendered each time."""
        if self._kind.has_step:
            return
        with_tools = self._split([USER, self._answer], self._samples("1"))
        self._shown = ()
        try:
            is_same = self._split([USER, self._answer], self._samples("1")) == with_tools
        except ValueError:
            is_same = False
        self._shown = () if is_same else self._kind.schemas

    def _check(self) -> None:
        samples, again = self._samples("1"), self._samples("2")
        first = self._split([USER, self._answer], again)
        later = self._split([USER, self._answer, *samples, self._answer], again)
        shown, blank = "".join(first), "".join(self._split([USER, self._answer], self._samples("")))
        must = f"the chat template of {self._tokenizer.folder} must"
        if first != later:
            raise ValueError(f"{must} render {_role(samples)} the same in every turn, it does not")
        if shown == blank:
            raise ValueError(f"{must} show {_role(samples)}, it leaves that out")


def _turn_text(text: str, calls: list[ToolCall], before: str) -> TurnText:
    is_good = calls and not any(call.error for call in calls)
    return TurnText(before if is_good else text, calls)


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
    """The format of each kind. ValueError as for a TurnFormat."""

    def __init__(self, tokenizer: Tokenizer, kinds: Mapping[str, Kind], calls: str) -> None:
        self._tokenizer, self._calls = tokenizer, calls
        self._kinds = {name: TurnFormat(tokenizer, kind, calls) for name, kind in kinds.items()}
        self._opened: dict[str, TurnFormat] = {}  # by the schemas, as JSON

    def of(self, kind: str, opened: Sequence[Schema] = ()) -> TurnFormat:
        """The format of an episode of this kind, or of one that its environment has `opened` with
        tools of these schemas."""
        if not opened:
            return self._kinds[kind]
        key = json.dumps(opened, sort_keys=True)
        if key not in self._opened:
            self._opened[key] = TurnFormat(self._tokenizer, Kind(tuple(opened)), self._calls)
        return self._opened[key]
