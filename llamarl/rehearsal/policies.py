"""The policies that play a rehearsal's episodes: by a script, as an earlier run recorded them, by a
model behind an endpoint, or by a tiny one of random weights. Each writes the ids of whole turns."""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from llamarl.core.compute import ComputeThread
from llamarl.core.config import Config, EmbeddedConfig
from llamarl.core.fields import require
from llamarl.core.groups import ASSISTANT, OBSERVATION
from llamarl.core.records import NO_VERSION, Prompt, Request, Sampling, episode_of
from llamarl.model.architecture import read_architecture
from llamarl.model.tokenizer import Tokenizer
from llamarl.rehearsal.calls import (
    NO_SUCH_TOOL,
    make_arguments,
    make_wrong_arguments,
    write_broken_call,
    write_call,
)
from llamarl.scoring.reward_functions import expected_answer
from llamarl.scoring.turn_format import TurnFormat

NO_ANSWER = "I do not know."
RIGHT, WRONG, MALFORMED, SILENT = "right", "wrong", "malformed", "silent"
ARGUMENTS, ENDLESS, CUT = "arguments", "endless", "cut"
SCRIPTS = {
    RIGHT: "calls each tool once, then gives the row's answer",
    WRONG: "calls a tool, then gives no answer",
    MALFORMED: "writes a call that breaks off, then a right one, then gives no answer",
    SILENT: "says nothing at once",
    ARGUMENTS: "calls with wrong arguments, then a tool that there is not",
    ENDLESS: "calls tools in every turn",
    CUT: "never ends its first turn",
}
"""What each rollout of a prompt does in a scripted rehearsal, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedTurn:
    """A turn that a policy is asked for: the `turn`-th, from 0, in this `conversation` of the
    rollout of this `number` in its prompt's group. `ids` are those of the conversation so far,
    and `form` is its format. A turn has up to `room` tokens."""

    prompt: Prompt
    number: int
    conversation: int
    turn: int
    ids: Sequence[int]
    form: TurnFormat
    room: int


class Policy(Protocol):
    """A source of turns."""

    async def write(self, asked: AskedTurn) -> Sequence[int]:
        """Return the ids of a turn. One that does not end with a token that ends completions was
        cut."""

    def commit(self) -> None:
        """Take another version of the weights from the next token on, if it has any."""

    async def close(self) -> None:
        """Give all resources back."""


class RememberingPolicy:
    """Plays the turns that another policy writes, and the same again where it is asked again: what
    differs then is not the policy's doing."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._written: dict[tuple[int, ...], Sequence[int]] = {}

    async def write(self, asked: AskedTurn) -> Sequence[int]:
        key = asked.prompt.prompt_id, asked.number, asked.conversation, asked.turn
        if key not in self._written:
            self._written[key] = await self._policy.write(asked)
        return self._written[key][: asked.room]

    def commit(self) -> None:
        self._policy.commit()

    async def close(self) -> None:
        await self._policy.close()


class ScriptedPolicy:
    """Plays the script of SCRIPTS that the rollout's number selects; the same turns at each time.
    `num_misread` counts the calls that are not read as they are meant, such as those of characters
    that the tokenizer lacks."""

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        self._config, self._tokenizer = config, tokenizer
        self.num_misread = 0

    async def write(self, asked: AskedTurn) -> Sequence[int]:
        name = script_of(asked.number)
        if name == CUT and asked.turn == 0:
            ids = self._tokenizer.encode("and so on ", special=False)
            return (ids * (asked.room // len(ids) + 1))[: asked.room]
        text, calls = self._text(name, asked)
        ids = self._tokenizer.encode_all([text], special=False)[0] if text else []
        ids.append(self._tokenizer.eos_token_ids[0])
        read = asked.form.read(ids).calls
        self.num_misread += [bool(call.error) for call in read] != calls
        return ids

    def commit(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def _text(self, name: str, asked: AskedTurn) -> tuple[str, list[bool]]:
        """Return the text of a turn, and for each call in it whether it cannot be read."""
        seed = f"{self._config.seed} {asked.prompt.prompt_id} {asked.number}"
        rng = random.Random(f"{seed} {asked.conversation} {asked.turn}")
        tools, turn = asked.form.kind.schemas, asked.turn
        question = asked.prompt.question(self._config.data.prompt_field)
        answer = self._answer(asked.prompt) if name == RIGHT else NO_ANSWER
        if name == SILENT:
            return "", []
        if not tools:
            return NO_ANSWER if name == ENDLESS else answer, []
        tool = tools[turn % len(tools)]
        called = tool["function"]["name"]
        if name == MALFORMED and turn == 0:
            return write_broken_call(asked.form, called), [True]
        if name == ARGUMENTS and turn < 2:
            arguments = make_wrong_arguments(tool, question, rng)
            called = called if turn == 0 else NO_SUCH_TOOL
            return write_call(asked.form, self._tokenizer, called, arguments), [False]
        num_calls = {RIGHT: len(tools), WRONG: 1, MALFORMED: 2, ENDLESS: turn + 1}.get(name, 0)
        if turn >= num_calls:
            return answer, []
        arguments = make_arguments(tool, question, rng)
        return write_call(asked.form, self._tokenizer, called, arguments), [False]

    def _answer(self, prompt: Prompt) -> str:
        """Return the row's answer in the forms that rewards look for."""
        try:
            found = expected_answer(prompt, self._config.reward)
        except (KeyError, TypeError, ValueError):
            return NO_ANSWER
        if {"math", "exact"}.isdisjoint(self._config.reward.functions):
            return f"Answer: {found}"
        return (
            f"\\boxed{{{found}}}"
            if "math" in self._config.reward.functions
            else (f"Answer: {found}")
        )


def script_of(number: int) -> str:
    """Return the name of the script that the rollout of this number plays."""
    return [*SCRIPTS][number % len(SCRIPTS)]


@dataclass(slots=True)
class RecordedRollout:
    """A rollout of the archive: its row, and by conversation the ids of its turns and the texts of
    what its environment said."""

    fields: dict[str, Any]
    turns: dict[int, list[list[int]]] = field(default_factory=dict)
    observations: dict[int, list[str]] = field(default_factory=dict)


class RecordedPolicy:
    """Plays the turns that a run has kept in its archive (archive/kept-*.jsonl), as ids where
    they were kept whole, else as texts. After the last recorded turn it says nothing."""

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._by_prompt: dict[str, list[RecordedRollout]] = defaultdict(list)
        found: dict[int, RecordedRollout] = {}
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
            try:
                self._read(json.loads(line), found)
            except (ValueError, KeyError, TypeError) as error:
                must = "be a line of archive/kept-*.jsonl of a run"
                raise ValueError(f"{path}:{number} must {must}, got {error!r:.80}") from error
        for rollout in found.values():
            self._by_prompt[_key(rollout.fields)].append(rollout)
        require(bool(found), "--against", "hold rollouts that a run has kept", str(path))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The row of each recorded prompt."""
        return [rollouts[0].fields for rollouts in self._by_prompt.values()]

    @property
    def num_rollouts(self) -> int:
        """The most rollouts of one prompt that are recorded."""
        return max(map(len, self._by_prompt.values()))

    async def write(self, asked: AskedTurn) -> Sequence[int]:
        turns = self.of(asked.prompt, asked.number).turns.get(asked.conversation, [])
        end = self._tokenizer.eos_token_ids[0]
        return turns[asked.turn] if asked.turn < len(turns) else [end]

    def of(self, prompt: Prompt, number: int) -> RecordedRollout:
        """Return the recorded rollout that a rollout of this number plays."""
        rollouts = self._by_prompt[_key(prompt.fields)]
        return rollouts[number % len(rollouts)]

    def commit(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def _read(self, line: dict[str, Any], found: dict[int, RecordedRollout]) -> None:
        row_id, conversation = episode_of(line["row_id"])
        rollout = found.setdefault(row_id, RecordedRollout(json.loads(line["fields"])))
        turns = line["turns"] or []
        said = [turn["content"] for turn in turns if turn["role"] == ASSISTANT]
        rollout.turns[conversation] = [*self._ids(line, said)]
        told = [turn["content"] for turn in turns if turn["role"] == OBSERVATION]
        rollout.observations[conversation] = told

    def _ids(self, line: dict[str, Any], said: list[str]) -> Iterator[list[int]]:
        if line.get("response_ids") and line.get("token_versions"):
            ids, versions = np.array(line["response_ids"]), np.array(line["token_versions"])
            is_observed = versions == NO_VERSION
            starts = np.flatnonzero(is_observed[1:] != is_observed[:-1]) + 1
            if not 0 <= int(ids.min()) <= int(ids.max()) < self._tokenizer.num_ids:
                raise ValueError(f"ids below {self._tokenizer.num_ids} are known")
            runs = zip(np.split(ids, starts), np.split(is_observed, starts), strict=True)
            yield from (run.tolist() for run, observed in runs if len(run) and not observed[0])
            return
        for number, text in enumerate(said):
            written = self._tokenizer.encode_all([text], special=False)[0]
            is_cut = line["finish"] != "stop" and number == len(said) - 1
            yield written if is_cut else [*written, self._tokenizer.eos_token_ids[0]]


def _key(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, sort_keys=True, default=str)


class EndpointPolicy:
    """Asks the model behind an OpenAI-compatible endpoint to go on from the ids of a
    conversation."""

    def __init__(self, url: str, model: str, config: Config, tokenizer: Tokenizer) -> None:
        import openai  # here, for it takes half a second

        self._client = openai.AsyncOpenAI(base_url=url, api_key="none")
        self._config, self._tokenizer = config, tokenizer
        self.model = model
        self.num_asked = self.num_failed = 0
        """Turns that were asked for, and those that the endpoint did not give: they are empty."""
        self._why = ""

    async def check(self) -> None:
        """Raise ValueError if there is no such endpoint; without a name of a model, take its
        first."""
        import openai

        try:
            models = await self._client.models.list()
        except (openai.OpenAIError, ValueError) as error:
            must = "name a recorded file or the address of an OpenAI-compatible endpoint"
            got = f"{self._client.base_url}: {type(error).__name__}: {error}"
            raise ValueError(f"--against must {must}, got {got:.300}") from None
        names = [model.id for model in models.data]
        require(bool(self.model or names), "--against", "serve a model", "none")
        self.model = self.model or names[0]

    async def write(self, asked: AskedTurn) -> Sequence[int]:
        import openai

        sampling = self._config.sampling
        self.num_asked += 1
        try:
            answer = await self._client.completions.create(
                model=self.model,
                prompt=[*asked.ids],
                max_tokens=asked.room,
                temperature=sampling.temperature,
                seed=asked.number,
            )
            (choice, *_) = answer.choices
            text, is_whole = choice.text, choice.finish_reason == "stop"
        except (openai.OpenAIError, ValueError, AttributeError) as error:
            self.num_failed += 1
            self._why = f"{type(error).__name__}: {error}"
            text, is_whole = "", True
        ids = self._tokenizer.encode_all([text], special=False)[0] if text else []
        return [*ids, self._tokenizer.eos_token_ids[0]] if is_whole else ids

    @property
    def failed(self) -> str:
        """How many turns the endpoint did not give, in words; empty if it gave all."""
        if not self.num_failed:
            return ""
        return f"{self.num_failed} of {self.num_asked} turns ({self._why:.200})"

    def commit(self) -> None:
        pass

    async def close(self) -> None:
        await self._client.close()


class TinyPolicy:
    """Draws turns with the embedded engine from the checkpoint in a folder, which is small."""

    def __init__(self, folder: str, config: Config, context: int) -> None:
        self._config, self._num_asked = config, 0
        self._waiting: dict[int, asyncio.Future[Sequence[int]]] = {}
        self._loop = asyncio.get_running_loop()
        self._error: BaseException | None = None  # the first
        self._thread = ComputeThread("policy", on_error=self._fail)
        self._thread.post(lambda: self._build(folder, context))

    async def write(self, asked: AskedTurn) -> Sequence[int]:
        self._num_asked += 1
        sampling = Sampling(temperature=1.0, max_tokens=asked.room)
        request = Request(
            row_id=self._num_asked,
            prompt_ids=tuple(asked.ids),
            sampling=sampling,
            seed=hash((self._config.seed, asked.prompt.prompt_id, asked.number, asked.turn)) >> 12,
        )
        waiting = self._waiting[request.row_id] = self._loop.create_future()
        self._thread.post(lambda: self._engine.submit(request))
        return await waiting

    def commit(self) -> None:
        self._thread.post(self._change)

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.close)

    def _build(self, folder: str, context: int) -> None:
        import torch  # here and below, as no other policy needs it

        from llamarl.generator.engine.engine import EmbeddedEngine

        config = EmbeddedConfig(max_model_len=context, max_num_seqs=64)
        self._engine = engine = EmbeddedEngine(read_architecture(folder), config)
        self._flat = torch.zeros(engine.memory.num_elements, dtype=engine.memory.dtype)
        engine.load(self._flat, folder)
        engine.commit(engine.process_weights(self._flat), 0)
        self._thread.begin(self._work)

    def _change(self) -> None:
        """Take weights that are a little different, as after an optimizer step."""
        changed = self._flat * 1.001
        self._engine.commit(self._engine.process_weights(changed), self._engine.version + 1)

    def _work(self) -> bool:
        self._engine.admit()
        for output in self._engine.decode():
            ids = output.written.ids.tolist()
            self._loop.call_soon_threadsafe(self._give, output.request.row_id, ids)
        return self._engine.has_work

    def _give(self, row_id: int, ids: Sequence[int]) -> None:
        waiting = self._waiting.pop(row_id)
        if not waiting.done():
            waiting.set_result(ids)

    def _fail(self, error: BaseException) -> None:
        first = self._error = self._error or error

        def tell() -> None:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(first)

        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(tell)
