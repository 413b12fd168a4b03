"""Programs that play episodes over HTTP: which requests are turns, and what becomes of others."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import socket
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llamarl.core.groups import Opening
from llamarl.core.records import Prompt, StageStatus
from llamarl.recipe.inputs import read_inputs
from llamarl.scoring.agent import AgentEnvironment
from llamarl.scoring.definition import Kind, describe, find_defined, schemas_of
from llamarl.scoring.episodes import Episodes, load
from tests.places import TOOLS_RECIPE
from tests.random_search import case, searched
from tests.recipe.composing import compose_recipe
from tests.scoring.test_episodes import prompt

USER = {"role": "user", "content": "How much is 2*3?"}
TOOL = {"type": "function", "function": {"name": "multiply", "description": "", "parameters": {}}}


def post(url: str, body: object, repeat: int = 0) -> tuple[int, Any]:
    """(status, JSON or text) of a request for a message."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"x-stainless-retry-count": str(repeat), "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/chat/completions", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            text = response.read().decode()
            is_json = response.headers["Content-Type"] == "application/json"
            return response.status, json.loads(text) if is_json else text
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


async def asked(url: str, body: object, repeat: int = 0) -> tuple[int, Any]:
    return await asyncio.to_thread(post, url, body, repeat)


class Scripted(AgentEnvironment):
    """Hands its URL to the test, which asks in its place, and ends when the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.end: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def play(self, url: str, **row: Any) -> float:
        self.url.set_result(url)
        return await self.end


async def opened(*messages: Any, **more: Any) -> tuple[Scripted, str, asyncio.Task, Opening]:
    """An episode whose first request waits for its reply."""
    agent = Scripted()
    resetting = asyncio.create_task(agent.reset())
    url = await agent.url
    first = asyncio.create_task(asked(url, {"messages": [*(messages or (USER,))], **more}))
    return agent, url, first, await resetting


async def reply(agent: AgentEnvironment, text: str, *calls: tuple[str, dict]) -> asyncio.Task:
    """Let the model say this; the task ends with what the program says next."""
    functions = [{"function": {"name": name, "arguments": values}} for name, values in calls]
    written = {"role": "assistant", "content": text, **({"tool_calls": functions} if calls else {})}
    step = asyncio.create_task(agent.step([written]))
    await asyncio.sleep(0)
    return step


def run(main: Any) -> None:
    asyncio.run(asyncio.wait_for(main, 30.0))


async def test_each_request_is_a_turn_and_its_new_messages_are_the_observation() -> None:
    agent, url, first, opening = await opened(tools=[TOOL])
    assert opening == Opening([USER], [TOOL])
    step = await reply(agent, "I ask. ", ("multiply", {"a": 2, "b": 3}))
    status, found = await first
    (choice,) = found["choices"]
    assert (status, found["object"], choice["finish_reason"]) == (
        200,
        "chat.completion",
        "tool_calls",
    )
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "multiply", "arguments": '{"a": 2, "b": 3}'}
    told = {"role": "tool", "tool_call_id": call["id"], "content": [{"text": "6"}]}
    more = [USER, {**choice["message"], "content": "I ask."}, told]
    second = asyncio.create_task(asked(url, {"messages": more, "tools": [TOOL]}))
    (observed,) = await step
    assert observed == {
        "role": "tool",
        "content": "6",
        "name": "multiply",
        "tool_call_id": call["id"],
    }
    step = await reply(agent, "It is 6.")
    assert (await second)[1]["choices"][0]["message"] == {
        "role": "assistant",
        "content": "It is 6.",
    }
    agent.end.set_result(0.75)
    assert await step is None
    assert await agent.get_reward() == 0.75
    assert (await asked(url, {"messages": [USER]}))[0] == 404


async def test_a_stream_has_the_whole_message_in_one_event() -> None:
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    agent, _, first, _ = await opened(tools=[TOOL], **streamed)
    await reply(agent, "", ("multiply", {}))
    status, text = await first
    *events, end, rest = text.split("\n\n")
    assert (status, end, rest) == (200, "data: [DONE]", "")
    found = [json.loads(event.removeprefix("data: ")) for event in events]
    assert {each["object"] for each in found} == {"chat.completion.chunk"}
    delta = found[0]["choices"][0]["delta"]
    assert (delta["content"], delta["tool_calls"][0]["index"]) == (None, 0)
    assert [each["choices"] and each["choices"][0]["finish_reason"] for each in found] == [
        None,
        "tool_calls",
        [],
    ]
    agent.abandon()


def saying(**message: Any) -> dict[str, Any]:
    return {"messages": [USER, message, USER]}


def calling(**call: Any) -> dict[str, Any]:
    return saying(role="assistant", tool_calls=[{"id": "1", **call}])


def offering(tools: object) -> dict[str, Any]:
    return {"messages": [USER], "tools": tools}


PARAMETERS = {"parameters": {"properties": {"a": "integer"}}}
REFUSED = [
    (b"{", "the body must be a JSON object"),
    (b"[]", "the body must be a JSON object"),
    ({}, "messages must be a list, got None"),
    ({"messages": []}, "messages must end with one that is not the assistant's"),
    ({"messages": ["hi"]}, "a message must have a role, got 'hi'"),
    ({"messages": [USER], "n": 2}, "n must be left out, got 2"),
    ({"messages": [USER], "logprobs": True}, "logprobs must be left out, got True"),
    ({"messages": [USER], "response_format": {"type": "x"}}, "response_format must be left out"),
    (saying(role="user", content=[{"type": "image_url"}]), "content of a message must be text"),
    (saying(role="tool", content="x", name=[1]), "name of a message must be text, got [1]"),
    (saying(role="tool", content="x", tool_call_id=7), "tool_call_id of a message must be"),
    (saying(role="assistant", tool_calls=3), "tool_calls must be a list, got 3"),
    (calling(), "a tool call must be a function with arguments, got {'id': '1'}"),
    (calling(function={"name": "f", "arguments": "[1]"}), "must be a function with arguments"),
    (calling(function={"name": "f", "arguments": "[" * 20000}), "must be a function with arg"),
    (offering({"add": 1}), "tools must have a list of tools, got {'add': 1}"),
    (offering("add"), "tools must have a list of tools, got 'add'"),
    (offering(0), "tools must have a list of tools, got 0"),
    (offering(["add"]), "for each tool, got 'add'"),
    (offering([TOOL, None]), "for each tool, got None"),
    (offering([{"type": "function"}]), "for each tool, got "),
    (offering([{"type": "web_search"}]), "for each tool, got "),
    (offering([{"type": "function", "name": "add", "parameters": {}}]), "for each tool, got "),
    (offering([{"type": "function", "function": "add"}]), "for each tool, got "),
    (offering([{"type": "function", "function": {"name": 3}}]), "for each tool, got "),
    (offering([{"function": {"name": "f", "parameters": ["a"]}}]), "tools must have a JSON schema"),
    (offering([{"function": {"name": "f", **PARAMETERS}}]), "tools must have a JSON schema of an"),
]


@pytest.mark.parametrize(("body", "message"), REFUSED)
async def test_a_request_that_is_no_turn_is_refused_in_one_line(body: object, message: str) -> None:
    agent = Scripted()
    resetting = asyncio.create_task(agent.reset())
    status, error = await asked(await agent.url, body)
    assert status == 400
    assert message in error["message"]
    assert "\n" not in error["message"]
    assert not resetting.done(), "the program may ask again"
    first = asyncio.create_task(asked(await agent.url, {"messages": [USER], "tools": [TOOL]}))
    assert (await resetting).schemas == [TOOL]
    agent.abandon()
    await first


async def test_a_program_that_asks_for_nothing_is_named() -> None:
    agent = Scripted()
    agent.end.set_result(0.0)
    with pytest.raises(RuntimeError, match="play must ask for at least one message"):
        await agent.reset()


async def test_only_what_a_model_may_leave_out_of_its_turn_may_be_gone() -> None:
    agent, url, first, _ = await opened()
    step = await reply(agent, "<think>\nhm\n</think>\n\nSix. ")
    await first
    user = {"role": "user", "content": "Sure?"}
    for said, is_refused in (("Seven.", True), ("", True), ("Six.", False)):
        again = [USER, {"role": "assistant", "content": said}, user]
        asking = asyncio.create_task(asked(url, {"messages": again}))
        if is_refused:
            status, error = await asking
            assert (status, error["code"]) == (400, "conversation_changed")
            assert "message 1 of the conversation has changed" in error["message"]
    assert await step == [user]
    agent.abandon()
    assert (await asking)[1]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("raises", [False, True])
async def test_a_program_is_told_of_a_limit_and_may_score_what_there_is(raises: bool) -> None:
    class Patient(AgentEnvironment):
        async def play(self, url: str, **row: Any) -> float:
            status, found = await asked(url, {"messages": [USER]})
            if status != 200:
                assert found["code"] == "context_length_exceeded"
                assert "maximum context length" in found["message"]
                if raises:
                    raise OSError(found["message"])
            return 0.25

    agent = Patient()
    await agent.reset()
    assert await agent.get_reward() == (0.0 if raises else 0.25)


async def test_what_a_program_raises_by_itself_is_no_reward() -> None:
    class Broken(AgentEnvironment):
        def play(self, url: str, fails_at: int) -> float:
            for number in range(fails_at):
                messages = [USER, *({"role": "assistant", "content": "x"}, USER) * number]
                assert post(url, {"messages": messages})[0] == 200
            raise OSError("no disk")

    agent = Broken()
    with pytest.raises(OSError, match="no disk"):
        await agent.reset(fails_at=0)
    await agent.reset(fails_at=2)
    assert await agent.step([{"role": "assistant", "content": "x"}]) == [USER]
    with pytest.raises(OSError, match="no disk"):
        await agent.step([{"role": "assistant", "content": "x"}])


async def test_an_abandoned_episode_ends_its_program() -> None:
    ended = []

    class Waiting(AgentEnvironment):
        async def play(self, url: str, **row: Any) -> float:
            try:
                status, _ = await asked(url, {"messages": [USER]})
                if status != 200:
                    await asyncio.sleep(1000)
                return 1.0
            finally:
                ended.append(row["number"])

    episodes = Episodes(find_defined(type("Task", (), {"environment": Waiting})))  # type: ignore
    for number in (1, 2):
        prompt = Prompt(prompt_id=1, text="", token_ids=(1,), fields={"number": number})
        found = await episodes.begin(prompt, number, [])
        assert found == {"messages": [USER], "schemas": []}
    await episodes.forget([1])
    await asyncio.sleep(0.05)
    assert ended == [1]
    answer = await episodes.take_turn(2, "Six.", [])
    assert answer == {"messages": [], "calls": []}
    assert await episodes.finish(2) == {"reward": 1.0}


async def test_the_server_listens_on_the_loopback_interface_alone() -> None:
    agent, url, _, _ = await opened()
    port = int(url.split(":")[2].partition("/")[0])
    listening = socket.create_connection(("127.0.0.1", port))
    assert listening.getpeername()[0] == "127.0.0.1"
    listening.close()
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    bound = {each[1].split(":")[0] for each in lines if each[1].endswith(f":{port:04X}")}
    assert "00000000" not in bound
    assert (await asked(f"http://127.0.0.1:{port}/{'0' * 32}/v1", {"messages": [USER]}))[0] == 404
    agent.abandon()


def test_a_class_of_this_kind_is_described_without_tools() -> None:
    module = type("Task", (), {"environment": AgentEnvironment})
    kind = Kind((), has_instance=True, has_step=True, has_reward=True, is_agent=True)
    assert describe(module) == {"": kind}  # type: ignore[arg-type]


def test_a_system_message_beside_a_program_that_says_all_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe"
    shutil.copytree(TOOLS_RECIPE, recipe)
    (recipe / "task.py").write_text(
        "from llamarl.scoring.agent import AgentEnvironment as environment\n"
    )
    own = [f"recipe_dir={recipe}", "data.system=Be brief.", "reward.functions=[environment]"]
    with pytest.raises(ValueError, match=r"^data\.system must be null with an AgentEnvironment, "):
        read_inputs(compose_recipe(recipe, own))


class Search:
    """Random requests of one episode. The oracle is the conversation: a request is a turn if it is
    that and more; it is answered again if the client repeats the last one; else it is refused, and
    changes nothing."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.said: list[dict[str, Any]] = [USER]
        self.num_replies, self.is_asked = 0, True

    async def run(self) -> None:
        self.agent, self.url, self.waiting, _ = await opened()
        self.step: asyncio.Task = self.waiting
        acts = (self.reply, self.repeat, self.go_on, self.change, self.again, self.cut)
        for _ in range(self.rng.randint(10, 40)):
            await self.rng.choice(acts)()
        self.agent.abandon()

    @property
    def last_asked(self) -> list[dict[str, Any]]:
        return self.said if self.is_asked else self.said[:-1]

    def new(self) -> dict[str, Any]:
        role = self.rng.choice(("user", "system"))
        return {"role": role, "content": f"more {self.rng.random()}"}

    async def reply(self) -> None:
        if not self.is_asked:
            return
        self.num_replies += 1
        self.step = await reply(self.agent, f"reply {self.num_replies}")
        await self.expect_reply(self.waiting)
        self.said.append({"role": "assistant", "content": f"reply {self.num_replies}"})
        self.is_asked = False

    async def repeat(self) -> None:
        asking = asyncio.create_task(asked(self.url, {"messages": self.last_asked}, repeat=1))
        if not self.is_asked:
            await self.expect_reply(asking)
            return
        await asyncio.sleep(0.01)
        assert not asking.done()
        self.waiting = asking

    async def go_on(self) -> None:
        new = self.new()
        if self.is_asked:
            await self.expect_refusal([*self.said, new])
            return
        self.said.append(new)
        self.waiting = asyncio.create_task(asked(self.url, {"messages": self.said}))
        assert await self.step == [new]
        self.is_asked = True

    async def change(self) -> None:
        request, place = [*self.said, self.new()], self.rng.randrange(len(self.said))
        request[place] = {**request[place], "content": "other"}
        await self.expect_refusal(request)

    async def again(self) -> None:
        await self.expect_refusal(self.last_asked)

    async def cut(self) -> None:
        await self.expect_refusal([*self.said[: self.rng.randrange(len(self.said))], self.new()])

    async def expect_reply(self, asking: asyncio.Task) -> None:
        status, found = await asking
        said = found["choices"][0]["message"]["content"]
        assert (status, said) == (200, f"reply {self.num_replies}")

    async def expect_refusal(self, request: list[dict[str, Any]]) -> None:
        status, error = await asked(self.url, {"messages": request})
        expected = (409, "busy") if self.is_asked else (400, "conversation_changed")
        assert (status, error["code"]) == expected


@searched(20, 400)
def test_any_order_of_requests_is_answered_as_a_plain_list_of_turns_says(
    seeds: Sequence[int],
) -> None:
    for seed in seeds:
        with case(seed):
            run(Search(seed).run())


@pytest.mark.parametrize(
    ("kind", "field", "is_refused"),
    [
        (Kind((), True, has_step=True, is_agent=True), "url", True),
        (Kind((), True, has_step=True, is_agent=True), "self", True),
        (Kind((), True, has_step=True), "self", True),
        (Kind((), True, has_step=True), "url", False),
        (Kind((TOOL,)), "self", False),
    ],
)
def test_a_field_that_an_environment_gets_otherwise_is_refused_with_its_row(
    kind: Kind, field: str, is_refused: bool
) -> None:
    row = {"question": "q", field: "x"}
    if is_refused:
        with pytest.raises(ValueError, match=f"^the row's field '{field}' must have another name"):
            schemas_of(row, {"": kind})
    else:
        assert schemas_of(row, {"": kind}) == kind.schemas


OPENING = """
from llamarl.core.groups import Opening
class Opens:
    def reset(self, /, what, function=None, **row):
        user = {"role": "user", "content": "q"}
        return {
            "messages": Opening("q"), "empty": Opening([]), "role": Opening([{"content": "q"}]),
            "parts": Opening([{"role": "user", "content": [{"text": "q"}]}]),
            "tools": Opening([user], ["add"]), "good": Opening([user]),
        }[what]
    def step(self, messages): ...
environment = Opens
"""


@pytest.mark.parametrize("what", ["messages", "empty", "role", "parts", "tools", "good"])
async def test_an_opening_that_no_template_can_show_fails_its_episode(what: str) -> None:
    serve = load({"task_source": {"task.py": OPENING}, "tools": ["task"], "limits": {}})
    found = await serve(prompt(what=what, function="f"), "begin", [1, []])
    if what == "good":
        assert found == {"messages": [{"role": "user", "content": "q"}], "schemas": []}
    else:
        assert found["status"] == StageStatus.INVALID
        assert found["error"].startswith("what it returns must ")
