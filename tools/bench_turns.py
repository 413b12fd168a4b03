"""What a request of an agent's program costs beside the tokens of its turn.

    python tools/bench_turns.py [--json FILE] [--episodes 32] [--turns 8] [--token-ms 25]
        [--rounds 3] [--quick]

As many programs as there are episodes ask at once, through real HTTP, in the process that plays
them; the environment's executor is the real one, with its socket, tokenizer and chat template. In
place of a replica stands a client that waits for as long as the tokens of a turn would take, from
10 to 30 of them, and answers with a short one.

The rival is TRL's way for agents that own their loop, in the environment of `make rivals`:
OpenEnv's capture proxy, which stands before vLLM's server. That server is left out: one of ours
answers in its place. It renders no chat template and tokenizes nothing; llamarl's side does both.
Each has its turn in each round; `--quick` measures our side only.

`agent_turn_ms` is the median over all requests of the time from a request to its response, beyond
that of its tokens, and `agent_turn_p90_ms` what nine of ten do not exceed. `requests_per_s` is what
the programs were served; with `--token-ms 0` all time is that of the way from program to replica
and back, so it is the most that they can be served. The rival's begin with `trl_`.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

import rivals
from harness import ROOT, Bench, turns
from turns_bench import rival
from turns_bench.program import ask

from llamarl.core.config import DataConfig, EnvironmentConfig
from llamarl.core.records import EpisodeState, Prompt, TurnItem, TurnResult
from llamarl.metrics.span import Spans
from llamarl.model.tokenizer import load_tokenizer
from llamarl.scoring.environment import EnvironmentLink, EnvironmentSpec, EnvironmentWorker
from llamarl.scoring.sandbox.containers import ProgramLimits
from llamarl.scoring.stages import check_task

CHECKPOINT = ROOT / "recipes" / "quickstart_tools" / "checkpoint"
ROOM = 100_000
Round = tuple[list[float], float]
NAMES = {"llamarl": ("agent", ""), "trl": ("trl", "trl_")}  # beginnings of figures' names
AGENT = """
from llamarl.scoring.agent import AgentEnvironment


class Agent(AgentEnvironment):
    async def play(self, url, number, num_turns, token_s, out, **row):
        times = await ask(url, "any", number, num_turns, token_s)
        with open(out, "a") as file:
            file.write("".join(f"{each}\\n" for each in times))
        return 1.0


environment = Agent
"""


async def play(
    link: EnvironmentLink, row: int, prompt: Prompt, turn: tuple[int, ...], token_s: float
) -> None:
    """Be the replica of one episode: answer every question, after as many tokens as the program
    has asked for."""
    begun = await link.answer(TurnItem(row_id=row, attempt=0, prompt=prompt, room=ROOM))
    end = asyncio.create_task(
        link.answer(TurnItem(row_id=row, attempt=0, conversation=1, room=ROOM))
    )
    result: TurnResult = begun
    place = 0
    while result.state is EpisodeState.GOES_ON:
        assert result.options is not None
        await asyncio.sleep(token_s * result.options.max_tokens)
        question = TurnItem(row_id=row, attempt=0, ids=turn, room=ROOM, start=place)
        result = await link.answer(question)
        place += len(turn) + len(result.observation)
    ended = await end
    assert ended.state is EpisodeState.DONE, ended


async def measure(num_episodes: int, num_turns: int, token_s: float) -> Round:
    """Seconds of each request, and of all together."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(ask.__code__.co_filename).read_text()
        task, out = {"task.py": program + AGENT}, f"{folder}/times"
        limit = num_turns + 1
        spec = EnvironmentSpec(
            config=EnvironmentConfig(tools=["task"], calls="tagged", max_turns=limit),
            kinds=check_task(task, [], [], tools=["task"])[1],
            limits=ProgramLimits(),
            task_source=task,
            data=DataConfig(prompts="x", chat=True, max_prompt_tokens=4096),
            tokenizer=str(CHECKPOINT),
            socket=f"{folder}/socket",
        )
        executor = EnvironmentWorker(spec, rank=0, num_ranks=1, spans=Spans("environment-0", None))
        await executor.start()
        link = EnvironmentLink("environment-0", executor, spec.socket)
        tokenizer = load_tokenizer(CHECKPOINT)
        turn = tuple(tokenizer.encode("Answer: 2<|end|>", special=False))
        row = {"question": "q", "num_turns": num_turns, "token_s": token_s, "out": out}
        prompts = [
            Prompt(prompt_id=1, text="q", token_ids=(1,), fields={**row, "number": number})
            for number in range(num_episodes)
        ]
        start_s = time.perf_counter()
        await asyncio.gather(
            *(play(link, i, each, turn, token_s) for i, each in enumerate(prompts))
        )
        elapsed_s = time.perf_counter() - start_s
        link.close()
        await executor.close()
        return [*map(float, Path(out).read_text().split())], elapsed_s


def figures(way: str, times: Sequence[float], elapsed_s: float) -> dict[str, float]:
    """Those of one round."""
    times, (agent, head) = sorted(times), NAMES[way]
    return {
        f"{agent}_turn_ms": 1000 * statistics.median(times),
        f"{agent}_turn_p90_ms": 1000 * times[int(0.9 * len(times))],
        f"{head}requests_per_s": len(times) / elapsed_s,
    }


def main() -> None:
    """Measure."""
    bench = Bench(__doc__, {"agent_turn_ms": "<= 20"})
    bench.option("--episodes", type=int, default=32)
    bench.option("--turns", type=int, default=8)
    bench.option("--token-ms", type=float, default=25.0, help="of the model")
    bench.option("--rounds", type=int, default=3)
    bench.option("--quick", action="store_true", help="without the rival")
    arguments = bench.parse()
    shape = arguments.episodes, arguments.turns, arguments.token_ms / 1000
    case = f"{arguments.episodes} at once"
    ways: dict[str, Callable[..., Coroutine[None, None, Round]]] = {"llamarl": measure}
    reason = "--quick measures our side only" if arguments.quick else rivals.why_not("openenv")
    if reason is None:
        ways["trl"] = rival.measure
    else:
        print(f"without the rival: {reason}")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _, name in turns(ways, arguments.rounds):
        found[name].append(figures(name, *asyncio.run(ways[name](*shape))))
    for rounds in found.values():
        bench.add_medians({case: rounds})
    bench.write()


if __name__ == "__main__":
    main()
