"""The APIs through which programs ask for turns, with the clients that people use, and with hostile
ones."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import anthropic
import openai
import pytest

from llamarl.scoring.agent.episode import AgentEpisode
from llamarl.scoring.agent.turns import Reply, too_long
from tests.random_search import case, searched
from tests.scoring.test_agent import USER, event_of, run, started

ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": ADD}}
RESPONSE_TOOL: Any = {"type": "function", "name": "add", "description": "Adds.", "parameters": ADD}
CLAUDE_TOOL: Any = {"name": "add", "description": "Adds.", "input_schema": ADD}
CALL = [("add", {"a": 2, "b": 3})]
QUESTION: Any = [{"role": "user", "content": "How much is 2+3?"}]


def of_openai(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)


def of_anthropic(url: str) -> anthropic.AsyncAnthropic:
    base_url = url.removesuffix("/v1")
    return anthropic.AsyncAnthropic(base_url=base_url, api_key="none", max_retries=0)


async def answered(agent: AgentEpisode, asking: Any, reply: Reply, *pieces: str) -> Any:
    """What a client returns when the model says this, and before it these pieces."""
    task = asyncio.ensure_future(asking)
    event = await event_of(agent)
    key = event["conversation"]
    for piece in pieces:
        agent.stream(key, piece, begins_in_thought=reply.begins_in_thought)
        await asyncio.sleep(0.01)
    agent.reply(key, reply)
    return event, await task


async def test_chat_completions_serve_openai_s_client_over_several_turns() -> None:
    agent, url = await started()
    client = of_openai(url)
    assert [model.id async for model in client.models.list()] == ["policy"]
    ask = client.chat.completions.create
    said = Reply("I add.", CALL, num_prompt_tokens=9, num_tokens=4)
    own: Any = {"model": "any", "tools": [CHAT_TOOL], "temperature": 0.1, "top_p": 0.5}
    own |= {"max_tokens": 7, "stop": ["END"]}
    event, found = await answered(agent, ask(messages=QUESTION, **own), said)
    assert event["schemas"][0]["function"]["name"] == "add"
    options = {"max_tokens": 7, "stop_strings": ("END",), "streams": False, "has_logprobs": False}
    assert event["options"] == options
    message = found.choices[0].message
    assert (found.choices[0].finish_reason, found.usage.total_tokens) == ("tool_calls", 13)
    call = message.tool_calls[0]
    told: Any = {"role": "tool", "tool_call_id": call.id, "content": "5"}
    more = [*QUESTION, message.model_dump(exclude_none=True), told]
    scored = Reply("It is", is_cut=True, logprobs=[("It", -0.5), (" is", -0.25)])
    asking = ask(messages=more, model="any", tools=[CHAT_TOOL], logprobs=True)
    event, found = await answered(agent, asking, scored)
    assert event["conversation"] == 0
    assert event["messages"] == [{**told, "name": "add"}]
    content = found.choices[0].logprobs.content
    assert [(each.token, each.logprob) for each in content] == scored.logprobs
    assert found.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match="n must be left out"):
        await ask(messages=QUESTION, model="any", n=2)
    agent.abandon()


async def test_a_streamed_chat_completion_comes_as_it_is_written() -> None:
    agent, url = await started()
    client = of_openai(url)
    asking = client.chat.completions.create(
        messages=QUESTION,
        model="any",
        tools=[CHAT_TOOL],
        stream=True,
        stream_options={"include_usage": True},
    )
    task = asyncio.ensure_future(asking)
    assert (await event_of(agent))["options"]["streams"]
    agent.stream(0, "I ", begins_in_thought=False)
    stream = await task
    pieces: list[Any] = []
    async for chunk in stream:
        pieces.append(chunk)
        text = "".join(c.choices[0].delta.content or "" for c in pieces if c.choices)
        if text == "I ":  # the client has it before the model goes on
            agent.stream(0, "add", begins_in_thought=False)
        elif text == "I add" and len(pieces) == 3:
            agent.reply(0, Reply("I add.", CALL, num_prompt_tokens=9, num_tokens=4))
    assert text == "I add."
    calls = [c for p in pieces if p.choices for c in p.choices[0].delta.tool_calls or ()]
    assert [(c.index, c.function.name) for c in calls] == [(0, "add")]
    assert json.loads(calls[0].function.arguments) == {"a": 2, "b": 3}
    assert pieces[-1].usage.total_tokens == 13
    assert [p.choices[0].finish_reason for p in pieces[-2:-1]] == ["tool_calls"]
    agent.abandon()


async def test_responses_serve_openai_s_client_over_several_turns() -> None:
    agent, url = await started()
    client = of_openai(url)
    common: Any = {"model": "any", "instructions": "Be brief.", "store": False}
    free = {"type": "custom", "name": "patch", "description": "Takes a patch."}
    tools: Any = [RESPONSE_TOOL, {"type": "web_search"}, free]
    calls = [*CALL, ("patch", {"input": "*** Begin"})]
    said = Reply("<think>hm</think>\nI add.", calls, num_prompt_tokens=9, num_tokens=4)
    asking = client.responses.create(input=QUESTION, tools=tools, max_output_tokens=50, **common)
    event, found = await answered(agent, asking, said)
    assert [m["role"] for m in event["messages"]] == ["system", "user"]
    names = [schema["function"]["name"] for schema in event["schemas"]]
    assert names == ["add", "patch"], "what the provider runs is not offered"
    assert event["options"]["max_tokens"] == 50
    assert (found.output_text, found.status, found.usage.total_tokens) == (
        "I add.",
        "completed",
        13,
    )
    kinds = [item.type for item in found.output]
    assert kinds == ["reasoning", "message", "function_call", "custom_tool_call"]
    items: Any = [item.model_dump(exclude_none=True) for item in found.output]
    outputs: Any = [
        {"type": "function_call_output", "call_id": found.output[2].call_id, "output": "5"},
        {
            "type": "custom_tool_call_output",
            "call_id": found.output[3].call_id,
            "output": [{"type": "input_text", "text": "done"}],
        },
    ]
    asking = client.responses.create(input=[*QUESTION, *items, *outputs], tools=tools, **common)
    event, found = await answered(agent, asking, Reply("5, it", is_cut=True))
    assert event["conversation"] == 0
    assert [m["content"] for m in event["messages"]] == ["5", "done"]
    assert [m["name"] for m in event["messages"]] == ["add", "patch"]
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    with pytest.raises(openai.BadRequestError, match="previous_response_id must be left out"):
        await client.responses.create(input="Hi", previous_response_id="resp_1", **common)
    agent.abandon()


@pytest.mark.parametrize("streams", [False, True])
async def test_tools_in_a_namespace_are_called_in_it(streams: bool) -> None:
    agent, url = await started()
    client = of_openai(url)
    free = {"type": "custom", "name": "patch", "description": "Takes a patch."}
    space = {"type": "namespace", "name": "math", "description": "", "tools": [RESPONSE_TOOL, free]}
    common: Any = {"model": "any", "store": False, "tools": [RESPONSE_TOOL, space]}

    async def ask(given: Any) -> Any:
        if not streams:
            return await client.responses.create(input=given, **common)
        created = await client.responses.create(input=given, stream=True, **common)
        return [event async for event in created][-1].response

    calls = [*CALL, ("math__add", {"a": 2, "b": 3}), ("math__patch", {"input": "*** Begin"})]
    event, found = await answered(agent, ask(QUESTION), Reply("", calls))
    names = [schema["function"]["name"] for schema in event["schemas"]]
    assert names == ["add", "math__add", "math__patch"]
    items: Any = [item.model_dump(exclude_none=True) for item in found.output]
    told = [(item["type"], item.get("namespace"), item["name"]) for item in items]
    kinds = "function_call", "function_call", "custom_tool_call"
    assert told == [(kinds[0], None, "add"), (kinds[1], "math", "add"), (kinds[2], "math", "patch")]
    outputs = [
        {"type": f"{kind}_output", "call_id": item["call_id"], "output": "5"}
        for kind, item in zip(kinds, items, strict=True)
    ]
    event, _ = await answered(agent, ask([*QUESTION, *items, *outputs]), Reply("5"))
    assert event["conversation"] == 0
    assert [m["name"] for m in event["messages"]] == names
    agent.abandon()


async def test_a_streamed_response_comes_as_it_is_written() -> None:
    agent, url = await started()
    client = of_openai(url)
    texts: list[str] = []

    async def ask() -> Any:
        async with client.responses.stream(
            input=QUESTION, tools=[RESPONSE_TOOL], model="any"
        ) as stream:
            async for event in stream:
                if event.type == "response.output_text.delta":
                    texts.append(event.delta)
            return await stream.get_final_response()

    said = Reply("hm</think>\n\nI add.", CALL, begins_in_thought=True, num_tokens=4)
    _, found = await answered(agent, ask(), said, "h", "m</think>\n\nI", " add")
    assert [item.type for item in found.output] == ["reasoning", "message", "function_call"]
    assert found.output[0].content[0].text == "hm"
    assert (found.output_text, texts) == ("I add.", ["I", " add", "."])
    assert json.loads(found.output[2].arguments) == {"a": 2, "b": 3}
    agent.abandon()


async def test_messages_serve_anthropic_s_client_over_several_turns() -> None:
    agent, url = await started()
    client = of_anthropic(url)
    common: Any = {"model": "any", "max_tokens": 90, "tools": [CLAUDE_TOOL]}
    common |= {"system": [{"type": "text", "text": "Be brief."}], "stop_sequences": ["END"]}
    said = Reply("<think>hm</think>\n\nI add.", CALL, num_prompt_tokens=9, num_tokens=4)
    event, found = await answered(agent, client.messages.create(messages=QUESTION, **common), said)
    assert [m["role"] for m in event["messages"]] == ["system", "user"]
    assert event["options"]["stop_strings"] == ("END",)
    assert event["options"]["max_tokens"] == 90
    assert [block.type for block in found.content] == ["thinking", "text", "tool_use"]
    assert (found.stop_reason, found.usage.input_tokens, found.usage.output_tokens) == (
        *("tool_use", 9),
        4,
    )
    blocks: Any = [block.model_dump(exclude_none=True) for block in found.content]
    told: Any = {"type": "tool_result", "tool_use_id": found.content[2].id, "content": "5"}
    more = [*QUESTION, {"role": "assistant", "content": blocks}]
    more.append({"role": "user", "content": [told, {"type": "text", "text": "So?"}]})
    counting = asyncio.ensure_future(
        client.messages.count_tokens(messages=more, model="any", system="Be brief.")
    )
    event = await event_of(agent)
    assert len(event["messages"]) == 5
    agent.counted(event["count"], 17)
    assert (await counting).input_tokens == 17
    said = Reply("Five", stopped_by="END")
    event, found = await answered(agent, client.messages.create(messages=more, **common), said)
    assert event["conversation"] == 0
    assert [(m["role"], m["content"]) for m in event["messages"]] == [
        ("tool", "5"),
        ("user", "So?"),
    ]
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", "END")
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    shown: Any = [{"role": "user", "content": [image]}]
    with pytest.raises(anthropic.BadRequestError, match="content of a message must be text"):
        await client.messages.create(messages=shown, **common)
    agent.abandon()


async def test_a_streamed_message_comes_as_it_is_written() -> None:
    agent, url = await started()
    client = of_anthropic(url)
    texts: list[str] = []

    async def ask() -> Any:
        async with client.messages.stream(
            messages=QUESTION, tools=[CLAUDE_TOOL], model="any", max_tokens=90
        ) as stream:
            async for text in stream.text_stream:
                texts.append(text)
            return await stream.get_final_message()

    said = Reply("<think>\nhm\n</think>\n\nI add.", CALL, num_prompt_tokens=9, num_tokens=4)
    _, found = await answered(agent, ask(), said, "<th", "ink>\nhm\n</think>\n\nI", " add")
    assert [block.type for block in found.content] == ["thinking", "text", "tool_use"]
    assert found.content[0].thinking.strip() == "hm"
    assert (found.content[1].text, texts) == ("I add.", ["I", " add", "."])
    assert (found.content[2].input, found.stop_reason) == ({"a": 2, "b": 3}, "tool_use")
    assert (found.usage.input_tokens, found.usage.output_tokens) == (9, 4)
    agent.abandon()


@pytest.mark.parametrize("streams", [False, True])
async def test_a_full_context_is_told_in_the_words_of_each_api(streams: bool) -> None:
    agent, url = await started()
    chat = of_openai(url).chat.completions.create
    response = of_openai(url).responses.create
    message = of_anthropic(url).messages.create
    asked = [
        chat(messages=QUESTION, model="any", stream=streams),  # type: ignore[call-overload]
        response(input=QUESTION, model="any", stream=streams),  # type: ignore[call-overload]
        message(messages=QUESTION, model="any", max_tokens=9, stream=streams),
    ]
    errors: list[Any] = []
    for each in asked:
        task = asyncio.ensure_future(each)
        agent.refuse((await event_of(agent))["conversation"], too_long("9 of 8 tokens"))
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as raised:
            await task
        errors.append(raised.value)
    assert [error.code for error in errors[:2]] == ["context_length_exceeded"] * 2
    assert "prompt is too long" in errors[2].message
    agent.abandon()


@pytest.mark.parametrize(
    ("text", "pieces", "begins_in_thought"),
    [
        ("plain", [], False),
        ("", [], False),
        ("<think>a</think>b", ["<think>", "a<", "/think>b"], False),
        ("<think>a", ["<think>a"], False),
        ("a</think>\n b", ["a", "</think>"], True),
        ("<thin", ["<", "thin"], False),
    ],
)
async def test_streams_and_whole_responses_say_the_same(
    text: str, pieces: list[str], begins_in_thought: bool
) -> None:
    agent, url = await started()
    client, claude = of_openai(url), of_anthropic(url)
    said = Reply(text, begins_in_thought=begins_in_thought)

    async def chat() -> str:
        chunks = await client.chat.completions.create(messages=QUESTION, model="m", stream=True)
        return "".join([c.choices[0].delta.content or "" async for c in chunks])

    async def response() -> Any:
        async with client.responses.stream(input=QUESTION, model="m") as stream:
            return (await stream.get_final_response()).output

    async def message() -> Any:
        stream = claude.messages.stream(messages=QUESTION, model="m", max_tokens=9)
        async with stream as events:
            return (await events.get_final_message()).content

    assert (await answered(agent, chat(), said, *pieces))[1] == text
    whole = client.responses.create(input=QUESTION, model="m")
    expected = (await answered(agent, whole, said))[1].output
    found = (await answered(agent, response(), said, *pieces))[1]
    shown = [
        [(item.type, item.content[0].text.strip()) for item in each] for each in (found, expected)
    ]
    assert shown[0] == [pair for pair in shown[1] if pair[1]]
    blocks = claude.messages.create(messages=QUESTION, model="m", max_tokens=9)
    expected = (await answered(agent, blocks, said))[1].content
    found = (await answered(agent, message(), said, *pieces))[1]
    shown = [[(b.type, getattr(b, b.type).strip()) for b in each] for each in (found, expected)]
    assert shown[0] == [pair for pair in shown[1] if pair[1]]
    agent.abandon()


async def raw(url: str, *parts: bytes, waits_s: float = 0.0) -> bytes:
    """What the server sends to a client that sends these bytes, and hangs up after a while."""
    host, port = url.split("/")[2].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for part in parts:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(waits_s)
    try:
        async with asyncio.timeout(0.3):
            return await reader.read(1000)
    except TimeoutError:
        return b""
    finally:
        writer.close()


class Hostile:
    """Random abuse of the server, while a well-behaved episode goes on."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    async def run(self) -> None:
        agent, url = await started()
        other, other_url = await started()
        self.url, self.path = url, "/" + url.split("/", 3)[3]
        acts = [self.half, self.slow, self.garbage, self.large, self.wrong_secret, self.deep]
        for turn in range(4):
            abuse = [asyncio.create_task(act()) for act in self.rng.sample(acts, 3)]
            client = of_openai(other_url)
            asking = client.chat.completions.create(messages=[USER], model="any")  # type: ignore
            _, found = await answered(other, asking, Reply(f"turn {turn}"))
            assert found.choices[0].message.content == f"turn {turn}"
            await asyncio.gather(*abuse)
        asking = of_openai(url).chat.completions.create(messages=[USER], model="any")  # type: ignore
        event, _ = await answered(agent, asking, Reply("x"))
        assert event["conversation"] == 0, "nothing of the abuse was a turn"
        for each in (agent, other):
            each.abandon()

    def head(self, num_bytes: int, path: str = "") -> bytes:
        line = f"POST {path or self.path}/chat/completions HTTP/1.1\r\nHost: x\r\n"
        return f"{line}Content-Length: {num_bytes}\r\n\r\n".encode()

    async def half(self) -> None:
        text = self.head(100) + b'{"messages": ['
        assert await raw(self.url, text[: self.rng.randrange(1, len(text))]) == b""

    async def slow(self) -> None:
        body = b'{"messages": 3}'
        parts = [self.head(len(body)), *(body[i : i + 1] for i in range(len(body)))]
        found = await raw(self.url, *parts, waits_s=0.005)
        assert b"messages must be a list" in found

    async def garbage(self) -> None:
        await raw(self.url, self.rng.randbytes(200) + b"\r\n\r\n")

    async def large(self) -> None:
        body = json.dumps({"messages": "x" * 10_000_000}).encode()
        assert b"400" in (await raw(self.url, self.head(len(body)), body))[:20]
        # More than is read: the connection ends.
        await raw(self.url, self.head(2**30), b"x" * 2**20)

    async def wrong_secret(self) -> None:
        body = json.dumps({"messages": [USER]}).encode()
        path = f"/{self.rng.randbytes(16).hex()}/v1"
        assert b"404" in (await raw(self.url, self.head(len(body), path) + body))[:20]

    async def deep(self) -> None:
        body = b"[" * 100_000
        assert b"the body must be a JSON object" in await raw(self.url, self.head(len(body)) + body)


@searched(10, 100)
def test_hostile_clients_change_nothing_for_others(seeds: Sequence[int]) -> None:
    for seed in seeds:
        with case(seed):
            run(Hostile(seed).run())


async def test_a_client_that_hangs_up_amid_a_stream_ends_nothing() -> None:
    agent, url = await started()
    client = of_openai(url)
    asking = client.chat.completions.create(messages=QUESTION, model="any", stream=True)
    task = asyncio.ensure_future(asking)
    await event_of(agent)
    agent.stream(0, "I ", begins_in_thought=False)
    stream = await task
    await stream.close()
    agent.stream(0, "add", begins_in_thought=False)
    agent.reply(0, Reply("I add."))
    more = [*QUESTION, {"role": "assistant", "content": "I add."}, USER]
    again = client.chat.completions.create(messages=more, model="any")  # type: ignore[arg-type]
    event, _ = await answered(agent, again, Reply("x"))
    assert event == {**event, "conversation": 0, "messages": [USER]}
    agent.abandon()
