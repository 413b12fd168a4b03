"""The program that plays an episode, and the conversations that it holds with the model.

A request that extends what was said in a conversation goes on with it, after a turn that nothing
has followed yet; any other opens a conversation: one that branches off after an earlier turn, if
it extends what was said up to there, else one that begins with the request's own messages."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from llamarl.core.errors import mark_seen
from llamarl.core.groups import END_OF_THOUGHT
from llamarl.core.records import as_json
from llamarl.scoring.agent.environment import AgentEnvironment
from llamarl.scoring.agent.server import start_server, url_of
from llamarl.scoring.agent.turns import (
    ID_CHARS,
    AgentRequest,
    Asked,
    Begun,
    Body,
    Message,
    Refused,
    Reply,
    invalid,
    too_long,
    with_tool_name,
)
from llamarl.scoring.user_code.calls import (
    InvalidReturnError,
    Overdue,
    Raised,
    Runner,
    checked_number,
    shown,
    user_traceback,
)
from llamarl.scoring.user_code.watchdog import IT_WAS_AT

SECRET_BYTES = 16
MAX_THREADS = 1024  # programs that are no coroutines, and run at once
CANCEL_S = 1.0  # for a program to end once it is cancelled
PLAY = "play"
USED_UP = "the episode's tokens or turns are used up"

_servers: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Server] = WeakKeyDictionary()
_played: dict[str, AgentEpisode] = {}  # by the secret in the URL of its server
runner = Runner(MAX_THREADS, "agent")
"""Runs all programs in this process."""


@dataclass(slots=True, eq=False)
class Conversation:
    """A conversation as the program knows it: its `messages` so far, with those of the request that
    waits for its `reply`, of which `num_before` are older. `ends` has the number of messages after
    each turn that the model wrote in it, and `last_reply` is the last of these."""

    key: int
    messages: list[Message]
    schemas: list[Body]
    reply: asyncio.Future[Reply]
    num_before: int = 0
    ends: list[int] = field(default_factory=list)
    last_reply: asyncio.Future[Reply] | None = None
    begun: Begun = field(default_factory=Begun)

    @property
    def last_request(self) -> list[Message]:
        """The messages of the last request."""
        return self.messages if not self.reply.done() else self.messages[: self.ends[-1] - 1]

    @property
    def is_idle(self) -> bool:
        """Whether its last turn is answered, and nothing has followed."""
        return self.reply.done() and self.ends[-1:] == [len(self.messages)]

    def find_turn(self, messages: Sequence[Message]) -> int:
        """Return the number of its turns after the last one of which these messages say all that
        was said so far; 0 if there is none."""
        num_same = 0
        for before, now in zip(self.messages, messages, strict=False):
            if not _is_same(before, now):
                break
            num_same += 1
        return sum(end <= num_same for end in self.ends)


class AgentEpisode:
    """One episode, which the program of `environment` plays, once it may run (`places`)."""

    def __init__(
        self, environment: AgentEnvironment, places: AbstractAsyncContextManager[Any] | None = None
    ) -> None:
        self._environment, self._places = environment, places or nullcontext()
        self._conversations: list[Conversation] = []
        self._num_opened = 0
        self._counting: dict[int, asyncio.Future[int]] = {}
        self._keys: dict[str, int] = {}  # of conversations, by the ids of their replies
        self._events: list[Body] = []
        self._news = asyncio.Event()
        self._playing: asyncio.Task[Any] | None = None
        self._secret = ""
        self._is_over = self._was_refused = False
        self._invalid = ""  # why the last request was refused, if it was none that can be served
        self._num_waiting = 0  # requests that the model is to answer
        self._since_s: float | None = None  # when the program began to work, and waits for none
        self._working_s = 0.0  # that it did so before, and that was not told yet

    @property
    def conversations(self) -> list[list[Message]]:
        """The messages of each conversation, as far as the program knows them."""
        return [each.messages for each in self._conversations]

    async def start(self, row: Mapping[str, Any]) -> None:
        """Start the program for an episode of this prompt's row."""
        loop = asyncio.get_running_loop()
        if loop not in _servers:
            _servers[loop] = await start_server(_played)
        self._secret = secrets.token_hex(SECRET_BYTES)
        _played[self._secret] = self
        url = url_of(_servers[loop], self._secret)
        self._since_s = None
        self._playing = loop.create_task(self._play(url, row))
        self._playing.add_done_callback(self._ended)

    async def _play(self, url: str, row: Mapping[str, Any]) -> Any:
        async with self._places:
            self._since_s = time.monotonic()
            self._news.set()  # its time counts from now on
            return await runner.run(self._environment.play, url, **row)

    async def wait(self, timeout_s: float) -> Body:
        """Wait for events, and return them: {"events": [...], "working_s": the time for which the
        program had worked, before its latest request, while none waited for the model}. It returns
        after half of `timeout_s` in any case. Raises Overdue if the program has worked for longer
        than that without an event.

        An event has the key of a "conversation", the new "messages" in it, "options" of the turn
        and, if it begins, its "schemas", and the conversation and the number of turns "after" which
        it branches off, or None. With "count" in place of a conversation it asks for the number of
        tokens of these messages. Or it is {"end": True}."""
        until_s = time.monotonic() + timeout_s / 2
        while not self._events and (now_s := time.monotonic()) < until_s:
            since_s = self._since_s
            end_s = until_s if since_s is None else min(until_s, since_s + timeout_s)
            if end_s <= now_s:
                raise Overdue(await self._interrupt())
            self._news.clear()
            try:
                async with asyncio.timeout(end_s - now_s):
                    await self._news.wait()
            except TimeoutError:
                continue
        events, self._events = self._events, []
        working_s, self._working_s = self._working_s, 0.0
        return {"events": events, "working_s": working_s}

    def stream(self, key: int, text: str, *, begins_in_thought: bool) -> None:
        """Add text to the turn that the model writes in this conversation."""
        begun = self._find(key).begun
        begun.text, begun.begins_in_thought = begun.text + text, begins_in_thought
        begun.news.set()

    def counted(self, number: int, found: int | str) -> None:
        """Answer the question of this number for a number of tokens, or refuse it."""
        counting = self._counting.pop(number, None)
        if counting is not None and not counting.done():
            if isinstance(found, int):
                counting.set_result(found)
            else:
                counting.set_exception(invalid(found))

    def reply(self, key: int, reply: Reply) -> None:
        """Answer the request that waits in this conversation."""
        conversation = self._find(key)
        if conversation.reply.done():
            return  # it was refused meanwhile, as the episode is over
        begun = conversation.begun
        begun.begins_in_thought = reply.begins_in_thought
        reply = replace(reply, reply_id=begun.reply_id)
        conversation.messages.append(reply.message())
        conversation.ends.append(len(conversation.messages))
        self._keys[reply.reply_id] = key
        self._settle()
        conversation.reply.set_result(reply)
        conversation.last_reply = conversation.reply

    def refuse(self, key: int, error: Refused) -> None:
        """Refuse the request that waits in this conversation, which stays as it was before."""
        conversation = self._find(key)
        self._was_refused |= error.code == too_long("").code
        _refuse(conversation, error)
        self._settle()
        del conversation.messages[conversation.num_before :]
        if conversation.last_reply is None:
            self._conversations.remove(conversation)
        else:
            conversation.reply = conversation.last_reply

    async def get_reward(self, *, is_cut: bool) -> tuple[float, dict[int, float]]:
        """Return the program's reward, and those of single conversations by key. If a limit has cut
        the episode, its open requests fail first; should the program raise after requests were
        refused for a limit, the reward is 0, as the model has used up its tokens."""
        assert self._playing is not None, "an episode is started first"
        self._was_refused |= is_cut
        self._refuse_requests()
        try:
            found = await self._playing
        except Raised as error:
            if not self._was_refused:
                raise error.error from None
            return 0.0, {}
        finally:
            _played.pop(self._secret, None)
        failure = self._environment.program_failure
        if self._invalid and (failure or not self._num_opened):
            raise RuntimeError(f"play must ask for what can be served: {self._invalid}")
        if not self._num_opened:
            why = f", and ended with {failure}" if failure else ""
            raise RuntimeError(
                f"play must ask for at least one message, it has asked for none{why}"
            )
        own: object = {}
        if isinstance(found, tuple) and len(found) == 2:
            found, own = found
        reward = checked_number(found, PLAY)
        if not isinstance(own, Mapping):
            raise InvalidReturnError(f"be rewards by ids of responses for {PLAY}, got {shown(own)}")
        keys = {name: self._keys.get(str(name)[-ID_CHARS:]) for name in own}
        if unknown := [name for name, key in keys.items() if key is None]:
            must = f"have ids of responses of its episode beside the reward of {PLAY}"
            raise InvalidReturnError(f"{must}, got {shown(unknown[0])}")
        return reward, {keys[name] or 0: checked_number(each, PLAY) for name, each in own.items()}

    def abandon(self) -> None:
        """End the program and its open requests, because the episode does not go on."""
        if self._playing is not None:
            self._playing.cancel()
        self._refuse_requests()
        _played.pop(self._secret, None)

    def ask(self, request: AgentRequest) -> Asked:
        """Ask the model for a turn. Raises Refused if the request cannot be served."""
        messages = self._checked(request)
        self._invalid = ""
        conversation = self._find_repeated(request) if request.is_repeated else None
        if conversation is None:
            conversation = self._place(messages, request.schemas, as_json(request.options))
        return Asked(conversation.begun, conversation.reply)

    def note_refused(self, error: Refused) -> None:
        """Note that a request was refused with this error."""
        self._invalid = str(error) if error.code == invalid("").code else ""

    async def count(self, request: AgentRequest) -> int:
        """Return the number of tokens of a request's messages."""
        messages = self._checked(request)
        number = len(self._keys) + len(self._counting) + self._num_opened
        while number in self._counting:
            number += 1
        counting = self._counting[number] = asyncio.get_running_loop().create_future()
        shown = [with_tool_name(message, messages) for message in messages]
        self._events.append({"count": number, "messages": shown, "schemas": request.schemas})
        self._news.set()
        return await counting

    def _checked(self, request: AgentRequest) -> list[Message]:
        if self._is_over:
            raise too_long(USED_UP)
        messages = request.messages
        if not messages or messages[-1]["role"] == "assistant":
            raise invalid("messages must end with one that is not the assistant's")
        return messages

    def _place(self, messages: list[Message], schemas: list[Body], options: Body) -> Conversation:
        """Go on with the conversation that these messages extend, or open one."""
        before, num_turns = self._find_longest(messages, schemas)
        start = 0 if before is None else before.ends[num_turns - 1]
        if any(each["role"] == "assistant" for each in messages[start:]):
            before, start = None, 0  # turns that the model did not write are read, as a prompt is
        waiting: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        new = [with_tool_name(message, messages) for message in messages[start:]]
        event: Body = {"messages": new, "options": options}
        if before is not None and before.is_idle and start == len(before.messages):
            conversation = before
            conversation.num_before, conversation.reply = start, waiting
            conversation.begun = Begun()
            conversation.messages = [*before.messages, *messages[start:]]
        else:
            said = [*before.messages[:start], *messages[start:]] if before else [*messages]
            conversation = Conversation(self._num_opened, said, schemas, waiting, start)
            self._num_opened += 1
            self._conversations.append(conversation)
            after = None if before is None else [before.key, num_turns]
            event |= {"schemas": schemas, "after": after}
        self._events.append(event | {"conversation": conversation.key})
        self._stop_clock()
        self._num_waiting += 1
        self._news.set()
        return conversation

    def _find_longest(
        self, messages: Sequence[Message], schemas: list[Body]
    ) -> tuple[Conversation | None, int]:
        """Return the conversation with the longest beginning that these messages extend, up to one
        of its own turns, and the number of that turn; of equal ones, one that can go on."""
        found: tuple[Conversation | None, int] = None, 0
        best = 0, False
        for conversation in self._conversations:
            if conversation.schemas != schemas:
                continue
            if num_turns := conversation.find_turn(messages):
                end = conversation.ends[num_turns - 1]
                rank = end, conversation.is_idle and end == len(conversation.messages)
                if rank > best:
                    found, best = (conversation, num_turns), rank
        return found

    def _find_repeated(self, request: AgentRequest) -> Conversation | None:
        """Return the conversation whose last request this is: rather one that waits for its reply,
        and the newest of them."""
        same = [
            each
            for each in reversed(self._conversations)
            if each.schemas == request.schemas and each.last_request == request.messages
        ]
        return min(same, key=lambda each: each.reply.done(), default=None)

    def _find(self, key: int) -> Conversation:
        return next(each for each in self._conversations if each.key == key)

    def _settle(self) -> None:
        """Note that the model has answered a request, or will not."""
        self._num_waiting -= 1
        if not self._num_waiting:
            self._since_s = time.monotonic()

    def _stop_clock(self) -> None:
        if self._since_s is not None:
            self._working_s += time.monotonic() - self._since_s
            self._since_s = None

    def _refuse_requests(self) -> None:
        """Refuse the requests that wait, and all further ones."""
        self._is_over = True
        for conversation in self._conversations:
            _refuse(conversation, too_long(USED_UP))
        for number in [*self._counting]:
            self.counted(number, USED_UP)

    def _ended(self, playing: asyncio.Task[Any]) -> None:
        mark_seen(playing)
        self._events.append({"end": True})
        self._stop_clock()
        self._news.set()

    async def _interrupt(self) -> str:
        """End the program, and return the stack where it was."""
        playing = self._playing
        assert playing is not None
        self.abandon()
        await asyncio.wait({playing}, timeout=CANCEL_S)
        try:
            if playing.done():
                playing.result()
        except (asyncio.CancelledError, Raised) as error:
            return user_traceback(error).rpartition(IT_WAS_AT)[2]
        return "(it went on when cancelled)"


def _refuse(conversation: Conversation, error: Refused) -> None:
    if not conversation.reply.done():
        conversation.reply.set_exception(error)
        conversation.reply.exception()  # it may be that nothing waits for it


def _is_same(before: Message, now: Message) -> bool:
    """Return whether both are the same message. White space around an assistant's message, and its
    thinking, may be missing from the second: the ids stay those that were generated."""
    if before["role"] != "assistant":
        return before == now
    same = [
        (
            each["role"],
            each.get("tool_calls"),
            each["content"].rpartition(END_OF_THOUGHT)[2].strip(),
        )
        for each in (before, now)
    ]
    return same[0] == same[1]
