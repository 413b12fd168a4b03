"""A taskset as users of verifiers write one: the model guesses n, and is told whether it is larger.

Its harness asks for messages in this process; the package's own start a program for each turn.
"""

import random
import re
from collections.abc import Iterator
from itertools import count
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire

COST = 0.1  # of each guess after the first


def guess_in(text: str) -> int | None:
    """The last number that the model has written."""
    found = re.findall(r"\d+", text)
    return int(found[-1]) if found else None


class GuessData(vf.TaskData):
    secret: int


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def found(self, task: GuessData, trace: vf.Trace) -> float:
        guesses = [
            guess_in(m.content) for m in trace.branches[-1].messages if m.role == "assistant"
        ]
        return max(0.0, 1.0 - COST * (len(guesses) - 1)) * (guesses[-1] == task.secret)


class GuessConfig(vf.TasksetConfig):
    largest: int = 9
    seed: int = 0


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    INFINITE = True

    def load(self) -> Iterator[GuessTask]:
        draw = random.Random(self.config.seed)
        for _ in count():
            asked = f"What is n? 0<n<{self.config.largest}"
            secret = draw.randrange(1, self.config.largest)
            yield GuessTask(GuessData(prompt=asked, secret=secret), self.config.task)


class ClientHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += map(message_to_wire, prompt or ())
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"})


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task: GuessTask, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as talk:
            part = await talk.turn()
            while not part.terminated and (guess := guess_in(part.last_reply)) != task.data.secret:
                is_larger = guess is None or guess < task.data.secret
                part = await talk.turn(f"n{'>' if is_larger else '<'}{guess or 0}")


__all__ = ["ClientHarness", "GuessEnv", "GuessTaskset"]
