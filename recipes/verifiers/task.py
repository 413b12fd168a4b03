"""Environments of the package verifiers, which `data.options.env` describes as its own config does.

An episode of verifiers is an episode here: its harness asks for messages through a server of the
package, which passes them on to ours, and its rewards are the reward.
"""

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from llamarl.scoring.agent import AgentEnvironment

KEY = "LLAMARL_NO_KEY"  # an environment variable that is not set: our server asks for none
_opened: dict[str, asyncio.Task[tuple[Any, list[Any]]]] = {}  # by config
_serving = AsyncExitStack()  # until the process ends


def prompts(
    held_out: bool, env: dict[str, Any], num_prompts: int, num_held_out: int
) -> Iterator[dict[str, Any]]:
    """The first tasks of the taskset are held out."""
    size = num_held_out + num_prompts
    for index, task in enumerate(load(env).taskset.take(size)):
        if (index < num_held_out) == held_out:
            question = task.data.prompt_text.strip() or f"task {index}"
            yield {"question": question, "env": env, "size": size, "index": index}


class Verifiers(AgentEnvironment):
    """An episode of an environment of verifiers."""

    async def play(self, url: str, env: dict[str, Any], size: int, index: int, **row: Any) -> float:
        """Run it with the policy as the model of all agents that have no client of their own."""
        key = json.dumps([env, size])
        if key not in _opened:
            _opened[key] = asyncio.create_task(serve(env, size))
        environment, tasks = await asyncio.shield(_opened[key])
        client = vf.EvalClientConfig(base_url=url, api_key_var=KEY)
        context = vf.ModelContext(model="policy", client=client)
        episode = await environment.run_episode(tasks[index], context)
        if not episode.ok:
            errors = [*episode.errors, *(each for trace in episode.traces for each in trace.errors)]
            raise RuntimeError("; ".join(f"{each.type}: {each.message}" for each in errors))
        return sum(trace.reward for trace in episode.traces if trace.agent.trainable)


environment = Verifiers


async def serve(env: dict[str, Any], size: int) -> tuple[Any, list[Any]]:
    """The environment, with what its episodes share running, and its first tasks."""
    environment = load(env)
    tasks = await asyncio.to_thread(lambda: [*environment.taskset.take(size)])
    await _serving.enter_async_context(environment.serving())
    return environment, tasks


def load(env: dict[str, Any]) -> Any:
    """The environment of this config. ValueError, in one line, for one that does not load."""
    try:
        return load_environment(resolve_env_config(env))
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        why = "; ".join(wrong)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        why = str(error)
    raise ValueError(f"data.options.env must be an environment of verifiers, got {env}: {why}")
