"""The service of an environment's processes, each of which plays many episodes.

Coroutines run beside each other, and one that blocks the others is interrupted
(`scoring/user_code/watchdog.py`); functions run in threads, and one that never ends is left
behind. A process that has left too many exits, and the episodes that it played begin again. The
model is told what a tool raises; a failure of the environment itself ends its episode as failed,
and never counts as a reward."""

import asyncio
import inspect
import os
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from llamarl.core.config.inputs import AGENT
from llamarl.core.extensions import load_module
from llamarl.core.groups import Opening, wrong_opening
from llamarl.core.records import Prompt, StageStatus
from llamarl.scoring.agent import AgentEnvironment
from llamarl.scoring.agent.command import AgentCommand, CommandEnvironment
from llamarl.scoring.agent.episode import AgentEpisode
from llamarl.scoring.agent.episode import runner as agent_runner
from llamarl.scoring.agent.turns import TOO_LONG, Reply, invalid, too_long
from llamarl.scoring.definition import (
    EPISODE,
    RESET,
    REWARD,
    STEP,
    Defined,
    find_defined,
    is_stepped,
    kind_of,
    methods_of,
)
from llamarl.scoring.sandbox.containers import ProgramLimits
from llamarl.scoring.tool_calls import READY
from llamarl.scoring.user_code.calls import (
    InvalidReturnError,
    Overdue,
    Raised,
    Runner,
    checked_number,
    shown,
    user_traceback,
)

Answer = dict[str, Any]
Message = dict[str, Any]
MAX_THREADS = 256  # functions that run at once
MAX_LEFT = 32  # threads of calls that never ended, until the process exits
LEAVE_S = 0.1  # for a process that is spent to answer, and for threads to end after all
TASK = "task"  # in `environment.tools`: the recipe's own task.py
UNKNOWN: Answer = {"unknown": True}  # an episode that this process does not play


@dataclass(slots=True)
class Episode:
    """An episode in progress: its instance, the tools that may be called, its prompt, the
    conversation so far if a reward function reads it, the sum of the rewards of its turns, and the
    episode of an agent."""

    kind: str
    instance: Any
    tools: Mapping[str, Callable[..., Any]]
    prompt: Prompt | None = None
    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    agent: AgentEpisode | None = None


class Episodes:
    """The episodes of one process. An instance is used again, after its `reset`."""

    agent_kind = AgentEpisode
    """The class of episodes that a program plays."""

    def __init__(
        self, defined: Defined, rewards: Sequence[str] = (), max_programs: int = 0
    ) -> None:
        """`rewards` names the `episode_rewards` that the recipe uses; at most `max_programs` of
        agents run at once, unless that is 0."""
        self._defined = defined
        self._rewards = [defined.episode_rewards[name] for name in rewards]
        self._is_read = defined.episode_reward is not None or bool(defined.episode_rewards)
        self._plain = Episode("", None, defined.tools)  # all episodes, if nothing of them is kept
        self._playing: dict[int, Episode] = {}
        self._free: dict[str, list[Any]] = defaultdict(list)  # instances by kind
        self._runner = Runner(MAX_THREADS, "tool")
        self._places = asyncio.Semaphore(max_programs) if max_programs else None

    async def begin(self, prompt: Prompt, row_id: int, messages: list[Message]) -> Answer:
        """Reset an environment for this rollout. Returns {"messages": the messages that replace the
        prompt's, or None, "schemas": the tools that replace those of its kind, or None}."""
        await self.forget([row_id])
        if not self._defined.makers:
            tools = self._defined.tools
            self._playing[row_id] = Episode("", None, tools, prompt, [*messages])
            return {"messages": None, "schemas": None}
        kind = kind_of(prompt.fields, self._defined.makers)
        maker = self._defined.makers[kind]
        instance = self._free[kind].pop() if self._free[kind] else await self._runner.run(maker)
        if isinstance(instance, AgentEnvironment):
            agent = self.agent_kind(instance, self._places)
            await agent.start(prompt.fields)
            self._playing[row_id] = Episode(kind, instance, {}, prompt, agent=agent)
            return {"messages": None, "schemas": None}
        found = await self._runner.run(getattr(instance, RESET), **prompt.fields)
        is_opening = isinstance(found, Opening) and is_stepped(instance)
        if not (found is None or isinstance(found, str) or is_opening):
            raise InvalidReturnError(f"be None or a text for {RESET}, got {shown(found)}")
        if isinstance(found, Opening) and (must := wrong_opening(found.messages, found.schemas)):
            raise InvalidReturnError(f"{must} for {RESET}")
        if isinstance(found, str):
            last = {**messages[-1], "content": f"{messages[-1]['content']}{found}"}
            found = Opening([*messages[:-1], last])
        tools = {**self._defined.tools, **methods_of(instance)}
        shown_first = messages if found is None else found.messages
        self._playing[row_id] = Episode(kind, instance, tools, prompt, [*shown_first])
        return {
            "messages": None if found is None else found.messages,
            "schemas": [*found.schemas] if is_opening else None,
        }

    async def take_turn(self, row_id: int, text: str, calls: list[list[Any]]) -> Answer:
        """Answer a turn. Returns {"messages": [...], "calls": [[tool, seconds, whether it failed],
        ...]}; without messages the episode ends."""
        is_kept = self._defined.makers or self._is_read
        episode = self._playing.get(row_id) if is_kept else self._plain
        if episode is None:
            return UNKNOWN
        if is_stepped(episode.instance):
            said = await self._step(episode, text, calls)
            return {"messages": said, "calls": [[name, 0.0, bool(e)] for name, _, e in calls]}
        # No call raises; if this is cancelled, the error of `gather` says where a call was.
        in_turn = asyncio.Lock()
        results = await asyncio.gather(*(self._run(episode, in_turn, *call) for call in calls))
        pairs = [*zip((name for name, *_ in calls), results, strict=True)]
        said = [{"role": "tool", "name": name, "content": found[0]} for name, found in pairs]
        told = [[name, *found[1:]] for name, found in pairs]
        if self._is_read:
            episode.messages += [_written(text, calls), *said]
        return {"messages": said, "calls": told}

    async def wait(self, row_id: int, timeout_s: float) -> Answer:
        """Return the next events of an agent's episode, as `AgentEnvironment.wait` does."""
        if (agent := self.agent_of(row_id)) is None:
            return UNKNOWN
        return await agent.wait(timeout_s)

    async def reply(self, row_id: int, conversation: int, reply: dict[str, Any]) -> Answer:
        """Answer the request that waits in this conversation of an agent."""
        if (agent := self.agent_of(row_id)) is None:
            return UNKNOWN
        agent.reply(conversation, Reply(**reply))
        return {}

    async def stream(
        self, row_id: int, conversation: int, text: str, begins_in_thought: bool
    ) -> Answer:
        """Add text to a turn of an agent's that the model goes on with."""
        if (agent := self.agent_of(row_id)) is None:
            return UNKNOWN
        agent.stream(conversation, text, begins_in_thought=begins_in_thought)
        return {}

    async def counted(self, row_id: int, number: int, found: int | str) -> Answer:
        """Answer an agent's question for a number of tokens."""
        if (agent := self.agent_of(row_id)) is None:
            return UNKNOWN
        agent.counted(number, found)
        return {}

    async def refuse(self, row_id: int, conversation: int, code: str, why: str) -> Answer:
        """Refuse the request that waits in this conversation of an agent."""
        if (agent := self.agent_of(row_id)) is None:
            return UNKNOWN
        agent.refuse(conversation, too_long(why) if code == TOO_LONG else invalid(why))
        return {}

    async def end(self, row_id: int, is_cut: bool) -> Answer:
        """End an agent's episode, which a limit has cut or its program has ended, as `finish` does.
        Returns "own_rewards" too, as [conversation, reward]."""
        if (agent := self.agent_of(row_id)) is None:
            return UNKNOWN
        reward, own = await agent.get_reward(is_cut=is_cut)
        episode = self._playing[row_id]
        episode.instance.conversations = agent.conversations
        episode.reward, episode.messages = reward, [*next(iter(agent.conversations), [])]
        found = await self.finish(row_id)
        return found | {"own_rewards": [*own.items()]}

    async def finish(
        self, row_id: int, text: str | None = None, calls: Sequence[list[Any]] = ()
    ) -> Answer:
        """End an episode, with its last turn if that has not been answered. Returns {"reward": its
        reward, or None if its environment gives none}, and "rewards" if any are asked for."""
        episode = self._playing.get(row_id)
        if episode is None:
            return UNKNOWN
        instance, read = episode.instance, self._defined.episode_reward
        is_agent = episode.agent is not None  # which has given its reward
        reward = episode.reward if is_agent or is_stepped(instance) else None
        get_reward = None if is_agent else getattr(instance, REWARD, None)
        if get_reward is not None:
            reward = (reward or 0.0) + checked_number(await self._runner.run(get_reward), REWARD)
        if self._is_read and text is not None:
            episode.messages.append(_written(text, calls))
        if read is not None:
            found = await self._runner.run(read, episode.prompt, episode.messages, instance)
            reward = (reward or 0.0) + checked_number(found, EPISODE)
        several = []
        for function in self._rewards:
            found = await self._runner.run(function, episode.prompt, episode.messages, instance)
            several.append(checked_number(found, function.__name__))
        if instance is not None:
            self._free[episode.kind].append(instance)
        del self._playing[row_id]
        return {"reward": reward} | ({"rewards": several} if self._rewards else {})

    async def forget(self, row_ids: Sequence[int]) -> Answer:
        """Drop episodes that do not go on. Calls in progress are left alone, so their instances are
        not used again."""
        for row_id in row_ids:
            episode = self._playing.pop(row_id, None)
            if episode is not None and episode.agent is not None:
                episode.agent.abandon()
        return {}

    def agent_of(self, row_id: int) -> AgentEpisode | None:
        """Return the episode of an agent, if this process plays it."""
        episode = self._playing.get(row_id)
        return None if episode is None else episode.agent

    async def _step(self, episode: Episode, text: str, calls: list[list[Any]]) -> list[Message]:
        """Return the messages with which the environment answers a turn."""
        episode.messages.append(_written(text, calls))
        found = await self._runner.run(getattr(episode.instance, STEP), [*episode.messages])
        if isinstance(found, tuple):
            if len(found) != 2:
                raise InvalidReturnError(f"be (messages, reward) for {STEP}, got {shown(found)}")
            found, reward = found
            episode.reward += checked_number(reward, STEP)
        messages = [] if found is None else [found] if isinstance(found, str | dict) else found
        if not isinstance(messages, list):
            raise InvalidReturnError(f"be a text, messages or None for {STEP}, got {shown(found)}")
        said = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
        for message in said:
            if not isinstance(message, dict) or not isinstance(message.get("content"), str):
                must = "be a text or have a role and content"
                raise InvalidReturnError(f"{must} for each message of {STEP}, got {shown(message)}")
        said = [{"role": "user", **message} for message in said]
        episode.messages += said
        return said

    async def _run(
        self, episode: Episode, in_turn: asyncio.Lock, name: str, arguments: Answer, error: str
    ) -> tuple[str, float, bool]:
        """Return the content of a call, its seconds, and whether it failed. Functions run one after
        the other, as they hold `in_turn`, and coroutines beside them."""
        tool, content = episode.tools.get(name), ""
        async with nullcontext() if inspect.iscoroutinefunction(tool) else in_turn:
            start_s = time.monotonic()
            if tool is None and not error:
                error = f"Tool {name} not found."
            elif tool is not None and not error:
                try:
                    content = _text(await self._runner.run(tool, **arguments))
                except Raised as failure:  # the model is told
                    error = str(failure)
        if error:
            content = str({"error": error})
        return content, time.monotonic() - start_s, bool(error)

    @property
    def is_spent(self) -> bool:
        """Whether too many threads were left behind."""
        return self._runner.num_left + agent_runner.num_left >= MAX_LEFT


def _text(value: Any) -> str:
    """Return a tool's result as the text that the model sees. Raises Raised if it cannot be
    converted to text."""
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        raise Raised(TypeError("a tool must return what it says, got a generator"))
    try:
        return str(value)
    except BaseException as error:  # noqa: BLE001 - a user's __str__ may do anything
        raise Raised(error) from None


def _written(text: str, calls: Sequence[list[Any]]) -> Message:
    """Return a turn of the model as a chat message, with those of its calls that can be run."""
    good = [{"name": name, "arguments": arguments} for name, arguments, error in calls if not error]
    written: Message = {"role": "assistant", "content": text}
    if good:
        written["tool_calls"] = [{"type": "function", "function": each} for each in good]
    return written


def load(
    setup: dict[str, Any], kind: type[Episodes] = Episodes
) -> Callable[..., Coroutine[Any, Any, Answer]]:
    """Return the worker's service: (prompt, name of a method of this kind of Episodes, its
    arguments) -> the method's result, or {"status": str, "error": str} if the environment failed.
    `setup` names tools as `environment.tools` does: those of the task.py `task_source`, and ready
    ones, whose programs have `limits`."""
    tools, limits = setup["tools"], ProgramLimits(**setup["limits"])
    module = load_module(setup["task_source"]) if TASK in tools else None
    if AGENT in tools:
        played = partial(CommandEnvironment, AgentCommand(**setup["agent"]))
        defined = Defined({}, {"": played})
    else:
        defined = find_defined(module, [READY[name](limits) for name in tools if name != TASK])
    max_programs = setup["agent"]["max_programs"] if AGENT in tools else 0
    episodes = kind(defined, setup.get("rewards", ()), max_programs)

    async def serve(prompt: Prompt | None, method: str, arguments: list[Any]) -> Answer:
        given = arguments if prompt is None else [prompt, *arguments]
        try:
            found: Answer = await getattr(episodes, method)(*given)
            return found
        except Overdue as error:
            return {"status": StageStatus.HUNG, "error": str(error)}
        except InvalidReturnError as error:
            return {"status": StageStatus.INVALID, "error": f"what it returns must {error}"}
        except BaseException as error:  # noqa: BLE001 - user code may raise anything
            cause = error.error if isinstance(error, Raised) else error
            return {"status": StageStatus.RAISED, "error": user_traceback(cause)}
        finally:
            if episodes.is_spent:
                asyncio.get_running_loop().call_later(LEAVE_S, _leave, episodes)

    return serve


def _leave(episodes: Episodes) -> None:
    """Exit the process, unless enough of its threads have ended after all."""
    if episodes.is_spent:
        os._exit(1)
