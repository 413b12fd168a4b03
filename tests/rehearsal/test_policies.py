"""The policies of a rehearsal: what they write, and what they refuse."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from llamarl.core.config import EnvironmentConfig
from llamarl.core.records import NO_VERSION, Prompt, conversation_row
from llamarl.model.tokenizer import Tokenizer, load_tokenizer
from llamarl.recipe.composition import compose, to_config
from llamarl.rehearsal.policies import (
    CUT,
    ENDLESS,
    SCRIPTS,
    SILENT,
    AskedTurn,
    EndpointPolicy,
    RecordedPolicy,
    ScriptedPolicy,
    TinyPolicy,
)
from llamarl.scoring.definition import Kind
from llamarl.scoring.turn_format import TurnFormat
from tests.e2e.forks import Forks
from tests.json_lines import write_lines
from tests.places import ROOT

RECIPE = ROOT / "recipes" / "quickstart_tools"
CHECKPOINT = str(RECIPE / "checkpoint")
ROW = {"question": "What is 2*3?", "answer": "6"}
SCHEMA = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(CHECKPOINT)


def asked(tokenizer: Tokenizer, **changes: Any) -> AskedTurn:
    ids = tuple(tokenizer.encode("What is 2*3?"))
    form = TurnFormat(tokenizer, Kind((SCHEMA,)), EnvironmentConfig(calls="tagged"))
    prompt = Prompt(prompt_id=1, text="What is 2*3?", token_ids=ids, fields=ROW)
    given: dict[str, Any] = {"number": 0, "conversation": 0, "turn": 0, "room": 20}
    return AskedTurn(prompt=prompt, ids=ids, form=form, **given | changes)


def test_a_script_calls_answers_and_never_ends_as_it_is_named(tokenizer: Tokenizer) -> None:
    policy = ScriptedPolicy(to_config(compose(RECIPE, [])), tokenizer)
    places = {name: number for number, name in enumerate(SCRIPTS)}

    def text(name: str, turn: int) -> str:
        turned = asked(tokenizer, number=places[name], turn=turn)
        ids = asyncio.run(policy.write(turned))  # type: ignore[arg-type]
        assert (ids[-1] in tokenizer.eos_token_ids) == (name != CUT or turn > 0)
        assert name != CUT or turn > 0 or len(ids) == turned.room
        return tokenizer.decode(ids)

    assert text("right", 0) == "<calculator>2*3</calculator>"
    assert text("right", 1) == "Answer: 6"
    assert text(SILENT, 0) == ""
    assert text(ENDLESS, 0) == text(ENDLESS, 7) == "<calculator>2*3</calculator>"
    assert text("wrong", 1) != "Answer: 6"
    assert text(CUT, 0).startswith("an")


def line(row_id: int, turns: list[tuple[str, str]], **more: Any) -> dict[str, Any]:
    said = [{"role": role, "content": content} for role, content in turns]
    empty = {"response_ids": None, "token_versions": None, "finish": "stop"}
    return {"row_id": row_id, "fields": json.dumps(ROW), "turns": said, **empty, **more}


def test_recorded_turns_are_played_as_ids_or_as_texts(tmp_path: Path, tokenizer: Tokenizer) -> None:
    end = tokenizer.eos_token_ids[0]
    ids = [5, 6, end, 9, 9, 7, end]
    versions = [0, 0, 1, NO_VERSION, NO_VERSION, 1, 1]
    texts = [("assistant", "1"), ("observation", "2"), ("assistant", "3")]
    lines = [
        line(8, texts, response_ids=ids, token_versions=versions),
        line(9, texts, finish="length"),
        line(conversation_row(9, 2), [("assistant", "4")]),
    ]
    policy = RecordedPolicy(write_lines(tmp_path / "kept-0.jsonl", lines), tokenizer)
    assert policy.rows == [ROW]

    def played(**where: int) -> list[int]:
        return [*asyncio.run(policy.write(asked(tokenizer, **where)))]  # type: ignore[arg-type]

    assert played() == [5, 6, end]
    assert played(turn=1) == [7, end]
    assert played(turn=2) == [end], "nothing was recorded"
    assert played(number=1) == [*tokenizer.encode("1", special=False), end]
    assert played(number=1, turn=1) == tokenizer.encode("3", special=False), "it was cut"
    assert played(number=3, conversation=2) == [*tokenizer.encode("4", special=False), end]
    assert policy.of(asked(tokenizer).prompt, 1).observations[0] == ["2"]


@pytest.mark.parametrize("text", ["{", "[]", '{"row_id": 1}', '{"row_id": "a", "fields": "{}"}'])
def test_a_file_that_is_no_archive_is_refused_with_its_line(
    tmp_path: Path, tokenizer: Tokenizer, text: str
) -> None:
    path = tmp_path / "kept-0.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"kept-0.jsonl:1 must be a line of archive"):
        RecordedPolicy(path, tokenizer)


@pytest.fixture
def completions() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An endpoint that says the same to each request but every second one, which fails."""
    found: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def respond(self, status: int, body: object) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.respond(200, {"object": "list", "data": [{"id": "m", "object": "model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found.append(body)
            if body["seed"] == 1:
                return self.respond(400, {"error": {"message": "no"}})
            finish = "length" if body["max_tokens"] < 10 else "stop"
            choice = {"index": 0, "text": "Answer: 6", "finish_reason": finish, "logprobs": None}
            whole = {"id": "1", "object": "text_completion", "created": 1, "model": "m"}
            return self.respond(200, whole | {"choices": [choice]})

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", found
    server.shutdown()
    server.server_close()


def test_an_endpoint_goes_on_from_the_ids(
    completions: tuple[str, list[dict[str, Any]]], tokenizer: Tokenizer
) -> None:
    url, found = completions
    config = to_config(compose(RECIPE, ["sampling.temperature=0.5"]))

    async def ask() -> list[list[int]]:
        policy = EndpointPolicy(url, "", config, tokenizer)
        await policy.check()
        asks = [asked(tokenizer), asked(tokenizer, room=3), asked(tokenizer, number=1)]
        written = [[*await policy.write(each)] for each in asks]
        assert policy.num_failed == 1
        await policy.close()
        return written

    whole, cut, failed = asyncio.run(ask())
    text = tokenizer.encode("Answer: 6", special=False)
    end = tokenizer.eos_token_ids[0]
    assert (whole, cut, failed) == ([*text, end], text, [end])
    first = found[0]
    assert first["prompt"] == tokenizer.encode("What is 2*3?")
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("m", 0.5, 20)


@pytest.mark.long
def test_the_command_asks_an_endpoint_for_each_turn_once_and_says_what_it_did_not_get(
    completions: tuple[str, list[dict[str, Any]]], forks: Forks, tmp_path: Path
) -> None:
    url, asked_for = completions
    found = tmp_path / "found.json"
    options = [f"--against={url}", f"--json={found}", "--prompts=1", "--faults=none"]
    done = forks.run("rehearse", f"--config-dir={RECIPE}", *options)
    assert done.returncode == 0, done.stderr
    figures = json.loads(found.read_text())
    assert (figures["policy"], figures["num_episodes"]) == ("endpoint", 4)
    (note,) = figures["notes"]
    assert note.startswith("the endpoint gave no answer to 1 of 4 turns (BadRequestError")
    assert len(asked_for) == 4, "other rounds play the same turns"


def test_an_endpoint_that_is_not_there_is_one_line(tokenizer: Tokenizer) -> None:
    config = to_config(compose(RECIPE, []))
    policy = EndpointPolicy("http://127.0.0.1:9/v1", "", config, tokenizer)
    with pytest.raises(ValueError, match="--against must name a recorded file or the address"):
        asyncio.run(policy.check())


def test_a_tiny_policy_draws_the_same_turns_each_time_also_amid_a_commit(
    tokenizer: Tokenizer,
) -> None:
    config = to_config(compose(RECIPE, []))

    async def draw(*, commits: bool) -> list[list[int]]:
        policy = TinyPolicy(CHECKPOINT, config, 64)
        turns = [asked(tokenizer, number=number) for number in range(4)]
        writing = asyncio.gather(*(policy.write(turn) for turn in turns))
        if commits:
            policy.commit()
        found = [[*ids] for ids in await writing]
        await policy.close()
        return found

    first = asyncio.run(draw(commits=False))
    assert first == asyncio.run(draw(commits=False))
    assert all(0 < len(ids) <= 20 for ids in first)
    assert len(asyncio.run(draw(commits=True))) == 4


def test_a_checkpoint_that_is_none_ends_what_waits_for_it(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    config = to_config(compose(RECIPE, []))

    async def draw() -> None:
        policy = TinyPolicy(str(tmp_path), replace(config), 64)
        try:
            async with asyncio.timeout(30):
                await policy.write(asked(tokenizer))
        finally:
            await policy.close()

    with pytest.raises(ValueError, match=str(tmp_path)):
        asyncio.run(draw())
