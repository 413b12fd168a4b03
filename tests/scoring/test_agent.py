"""Programs that play episodes over HTTP: which requests are turns, and what becomes of others."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from llamarl.core.records import Prompt, StageStatus
from llamarl.recipe.inputs import read_inputs
from llamarl.scoring.agent import AgentEnvironment
from llamarl.scoring.agent.episode import AgentEpisode
from llamarl.scoring.agent.turns import Reply, too_long
from llamarl.scoring.definition import Kind, describe, find_defined, schemas_of
from llamarl.scoring.episodes import Episodes, load
from llamarl.scoring.user_code.calls import InvalidReturnError, Overdue
from tests.places import TOOLS_RECIPE
from tests.random_search import case, searched
from tests.recipe.composing import compose_recipe
from tests.scoring.test_episodes import prompt

CLIENTS = ThreadPoolExecutor(64)
ENDS: WeakKeyDictionary[AgentEpisode, asyncio.Future[Any]] = WeakKeyDictionary()
"""By episode, what its scripted program waits for to end."""
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
    return await asyncio.get_running_loop().run_in_executor(CLIENTS, post, url, body, repeat)


class Scripted(AgentEnvironment):
    """Hands its URL to the test, which asks in its place, and ends when the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.end: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def play(self, url: str, **row: Any) -> float:
        self.url.set_result(url)
        return await self.end


async def started() -> tuple[AgentEpisode, str]:
    environment = Scripted()
    agent = AgentEpisode(environment)
    await agent.start({})
    ENDS[agent] = environment.end
    return agent, await environment.url


async def event_of(agent: AgentEpisode, timeout_s: float = 20.0) -> dict[str, Any]:
    """The next thing that the program does."""
    while not (found := (await agent.wait(timeout_s))["events"]):
        pass
    assert len(found) == 1
    return found[0]


async def turn_of(agent: AgentEpisode, timeout_s: float = 20.0) -> dict[str, Any]:
    """The next thing that the program does, without options of a turn."""
    event = await event_of(agent, timeout_s)
    event.pop("options", None)
    return event


async def opened(
    *messages: Any, **more: Any
) -> tuple[AgentEpisode, str, asyncio.Task, dict[str, Any]]:
    """An episode whose first request waits for its reply, and the event of that request."""
    agent, url = await started()
    first = asyncio.create_task(asked(url, {"messages": [*(messages or (USER,))], **more}))
    return agent, url, first, await turn_of(agent)


def opening(*messages: Any, conversation: int = 0, schemas: Any = (), after: Any = None) -> Any:
    found = {"messages": [*messages], "conversation": conversation}
    return found | {"schemas": [*schemas], "after": after}


def run(main: Any) -> None:
    asyncio.run(asyncio.wait_for(main, 30.0))


async def test_each_request_is_a_turn_and_its_new_messages_are_the_observation() -> None:
    agent, url, first, event = await opened(tools=[TOOL])
    assert event == opening(USER, schemas=[TOOL])
    calls = [("multiply", {"a": 2, "b": 3})]
    agent.reply(0, Reply("I ask. ", calls, num_prompt_tokens=7, num_tokens=3))
    status, found = await first
    (choice,) = found["choices"]
    assert (status, found["object"], choice["finish_reason"]) == (
        200,
        "chat.completion",
        "tool_calls",
    )
    assert found["usage"] == {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "multiply", "arguments": '{"a": 2, "b": 3}'}
    told = {"role": "tool", "tool_call_id": call["id"], "content": [{"text": "6"}]}
    more = [USER, {**choice["message"], "content": "I ask."}, told]
    second = asyncio.create_task(asked(url, {"messages": more, "tools": [TOOL]}))
    observed = {"role": "tool", "content": "6", "name": "multiply", "tool_call_id": call["id"]}
    assert await turn_of(agent) == {"messages": [observed], "conversation": 0}
    agent.reply(
        0,
        Reply(
            "It is 6",  # written up to a limit
            is_cut=True,
        ),
    )
    (choice,) = (await second)[1]["choices"]
    assert choice["message"] == {"role": "assistant", "content": "It is 6"}
    assert choice["finish_reason"] == "length"
    ENDS[agent].set_result(0.75)
    assert await turn_of(agent) == {"end": True}
    assert await agent.get_reward(is_cut=False) == (0.75, {})
    assert (await asked(url, {"messages": [USER]}))[0] == 404


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
    ({"messages": [USER], "top_logprobs": 2}, "top_logprobs must be left out, got 2"),
    ({"messages": [USER], "max_tokens": 0}, "max_tokens must be a whole number above 0, got 0"),
    ({"messages": [USER], "max_tokens": "9"}, "max_tokens must be a whole number above 0"),
    ({"messages": [USER], "stop": ["", 3]}, "stop must be texts, got ['', 3]"),
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
    agent, url = await started()
    status, error = await asked(url, body)
    assert status == 400
    assert message in error["message"]
    assert "\n" not in error["message"]
    first = asyncio.create_task(asked(url, {"messages": [USER], "tools": [TOOL]}))
    assert (await turn_of(agent))["schemas"] == [TOOL], "the program may ask again"
    agent.abandon()
    await first


async def test_a_program_that_asks_for_nothing_is_named() -> None:
    agent, _ = await started()
    ENDS[agent].set_result(0.0)
    assert await turn_of(agent) == {"end": True}
    with pytest.raises(RuntimeError, match="play must ask for at least one message"):
        await agent.get_reward(is_cut=False)


async def test_what_a_model_may_leave_out_of_its_turn_may_be_gone() -> None:
    agent, url, first, _ = await opened()
    agent.reply(0, Reply("<think>\nhm\n</think>\n\nSix. "))
    await first
    user = {"role": "user", "content": "Sure?"}
    for number, said in enumerate(("Seven.", "", "Six.")):
        again = [USER, {"role": "assistant", "content": said}, user]
        asking = asyncio.create_task(asked(url, {"messages": again}))
        event = await turn_of(agent)
        if said == "Six.":
            assert event == {"messages": [user], "conversation": 0}
        else:
            assert event == opening(*again, conversation=number + 1), "it is another turn"
    agent.abandon()
    assert (await asking)[1]["code"] == "context_length_exceeded"


async def test_a_turn_that_comes_after_the_end_changes_nothing() -> None:
    agent, url, first, _ = await opened()
    other = asyncio.create_task(asked(url, {"messages": [USER], "tools": [TOOL]}))
    await event_of(agent)
    agent.reply(0, Reply("Six."))
    await first
    ENDS[agent].set_result(1.0)
    assert await turn_of(agent) == {"end": True}
    ending = asyncio.create_task(agent.get_reward(is_cut=False))
    await asyncio.sleep(0)  # it has refused what waits
    agent.reply(1, Reply("Six."))
    assert await ending == (1.0, {})
    assert (await other)[1]["code"] == "context_length_exceeded"


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

    for is_cut in (True, False):
        agent = AgentEpisode(Patient())
        await agent.start({})
        await turn_of(agent)
        if not is_cut:
            agent.refuse(0, too_long("9 tokens are left"))
        assert await agent.get_reward(is_cut=is_cut) == (0.0 if raises else 0.25, {})


async def test_what_a_program_raises_by_itself_is_no_reward() -> None:
    class Broken(AgentEnvironment):
        def play(self, url: str, fails_at: int) -> float:
            for number in range(fails_at):
                messages = [USER, *({"role": "assistant", "content": "x"}, USER) * number]
                assert post(url, {"messages": messages})[0] == 200
            raise OSError("no disk")

    for fails_at in (0, 2):
        agent = AgentEpisode(Broken())
        await agent.start({"fails_at": fails_at})
        for _ in range(fails_at):
            await turn_of(agent)
            agent.reply(0, Reply("x"))
        assert await turn_of(agent) == {"end": True}
        with pytest.raises(OSError, match="no disk"):
            await agent.get_reward(is_cut=False)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"chatcmpl-0000000000000000": 1.0}, "have ids of responses of its episode beside"),
        ({"ID": "much"}, "be a finite number for play"),
        ([0.5], "be rewards by ids of responses for play"),
        ({"ID": 0.5}, ""),
    ],
)
async def test_a_conversation_may_have_a_reward_of_its_own(own: Any, words: str) -> None:
    agent, url, first, _ = await opened()
    agent.reply(0, Reply("Six."))
    await first
    second = asyncio.create_task(asked(url, {"messages": [USER]}))
    assert await turn_of(agent) == opening(USER, conversation=1)
    agent.reply(1, Reply("Seven."))
    name = (await second)[1]["id"]
    given = {name: own["ID"]} if "ID" in own else own
    ENDS[agent].set_result((0.25, given))
    if words:
        with pytest.raises(InvalidReturnError, match=words):
            await agent.get_reward(is_cut=False)
    else:
        assert await agent.get_reward(is_cut=False) == (0.25, {1: 0.5})


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
        assert await episodes.begin(prompt, number, []) == {"messages": None, "schemas": None}
        (event,) = (await episodes.wait(number, 20.0))["events"]
        assert event["messages"] == [USER]
    await episodes.forget([1])
    while not ended:
        await asyncio.sleep(0.01)
    assert ended == [1]
    await episodes.reply(2, 0, {"text": "Six."})
    assert (await episodes.wait(2, 20.0))["events"] == [{"end": True}]
    assert await episodes.end(2, False) == {"reward": 1.0, "own_rewards": []}


async def test_only_the_time_in_which_a_program_works_counts_and_too_much_is_an_error() -> None:
    agent, _, first, _ = await opened()
    start_s = time.monotonic()
    found = await agent.wait(0.4)  # the model has the request
    assert found == {"events": [], "working_s": 0.0}
    assert time.monotonic() - start_s >= 0.2
    agent.reply(0, Reply("Six."))
    await first
    waiting = asyncio.ensure_future(turn_of(agent, timeout_s=0.4))
    with pytest.raises(Overdue, match="in play"):
        await waiting
    assert ENDS[agent].cancelled()


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
    """Random requests of one episode, some at the same time. The oracle knows the texts of all
    answered exchanges: a request follows the longest of them that it extends without a turn that
    nobody wrote, in the conversation of which that is the last one, if there is one; else it opens
    a conversation after it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.exchanges: list[tuple[list[dict[str, Any]], int, int]] = []  # text, place
        self.size: dict[int, int] = {}  # turns of each conversation
        self.tips: set[int] = set()  # conversations that wait for the program
        self.asking: dict[int, tuple[list[dict[str, Any]], asyncio.Task]] = {}
        self.last: dict[int, tuple[list[dict[str, Any]], str]] = {}

    async def run(self) -> None:
        self.agent, self.url = await started()
        acts = (self.reply, self.reply, self.repeat, self.extend, self.extend, self.forge, self.new)
        for _ in range(self.rng.randint(10, 40)):
            await self.rng.choice(acts)()
        self.agent.abandon()
        for _, task in self.asking.values():
            assert (await task)[1]["code"] == "context_length_exceeded"

    def user(self) -> dict[str, Any]:
        return {"role": "user", "content": self.rng.choice("abc")}

    async def request(self, messages: list[dict[str, Any]]) -> None:
        """Ask, and compare what the model gets with the oracle."""
        task = asyncio.create_task(asked(self.url, {"messages": messages}))
        event = await turn_of(self.agent)
        found = [each for each in self.exchanges if messages[: len(each[0])] == each[0]]
        longest = max((len(text) for text, *_ in found), default=0)
        is_own = not any(m["role"] == "assistant" for m in messages[longest:])
        places = [(key, num) for text, key, num in found if len(text) == longest and is_own]
        going = [key for key, num in places if key in self.tips and num == self.size[key]]
        key = event["conversation"]
        if going:
            assert key in going
            assert event == {"messages": messages[longest:], "conversation": key}
            self.tips.discard(key)
        else:
            assert key not in self.size
            self.size[key] = 0
            after = event.pop("after")
            assert tuple(after) in places if places else after is None
            new = messages[longest if places else 0 :]
            assert event == {"messages": new, "schemas": [], "conversation": key}
        self.asking[key] = messages, task

    async def reply(self) -> None:
        if not self.asking:
            return
        key = self.rng.choice([*self.asking])
        messages, task = self.asking.pop(key)
        if self.rng.random() < 0.15:
            self.agent.refuse(key, too_long("it is long"))
            assert (await task)[1]["code"] == "context_length_exceeded"
            if self.size[key]:
                self.tips.add(key)
            return
        text = self.rng.choice("xy")
        self.agent.reply(key, Reply(text))
        status, found = await task
        assert (status, found["choices"][0]["message"]["content"]) == (200, text)
        self.size[key] += 1
        self.tips.add(key)
        said = [*messages, {"role": "assistant", "content": text}]
        self.exchanges.append((said, key, self.size[key]))
        self.last[key] = messages, text

    async def repeat(self) -> None:
        """A client that repeats a request gets the reply to it, once more or for the first time."""
        if self.asking and self.rng.random() < 0.5:
            key = self.rng.choice([*self.asking])
            messages, _ = self.asking[key]
            again = asyncio.create_task(asked(self.url, {"messages": messages}, repeat=1))
            await asyncio.sleep(0.01)
            if sum(each == messages for each, _ in self.asking.values()) == 1:
                assert not again.done()
                self.asking[key] = messages, again
            else:
                again.cancel()
        elif (idle := [key for key in self.tips if key in self.last]) and not self.asking:
            messages, _ = self.last[self.rng.choice(idle)]
            texts = {text for m, text in self.last.values() if m == messages}
            _, found = await asked(self.url, {"messages": messages}, repeat=2)
            assert found["choices"][0]["message"]["content"] in texts

    async def extend(self) -> None:
        if self.exchanges:
            text, *_ = self.rng.choice(self.exchanges)
            await self.request([*text, self.user()])

    async def forge(self) -> None:
        if self.exchanges:
            text, *_ = self.rng.choice(self.exchanges)
            forged = {"role": "assistant", "content": self.rng.choice("xyz")}
            await self.request([*text[:-1], forged, self.user()])

    async def new(self) -> None:
        await self.request([self.user() for _ in range(self.rng.randint(1, 2))])


@searched(20, 400)
def test_any_requests_in_any_order_find_their_place_among_the_conversations(
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
