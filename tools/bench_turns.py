"""What a request of an agent's program costs beside the tokens of its turn.

    python tools/bench_turns.py [--json FILE] [--episodes 32] [--turns 8] [--token-ms 25]
        [--rounds 3]

As many programs as there are episodes ask at once, through real HTTP, in the process that plays
them; the environment's executor is the real one, with its socket, tokenizer and chat template. In
place of a replica stands a client that waits for as long as the tokens of a turn would take, from
10 to 30 of them, and answers with a short one.

`agent_turn_ms` is the median over all requests of the time from a request to its response, beyond
that of its tokens, and `agent_turn_p90_ms` what nine of ten do not exceed. `requests_per_s` is what
the programs were served; with `--token-ms 0` all time is that of the way from program to replica
and back, so it is the most that they can be served.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path

from harness import ROOT, Bench

from llamarl.core.config import DataConfig, EnvironmentConfig
from llamarl.core.records import EpisodeState, Prompt, TurnItem, TurnResult
from llamarl.metrics.span import Spans
from llamarl.model.tokenizer import load_tokenizer
from llamarl.scoring.environment import EnvironmentLink, EnvironmentSpec, EnvironmentWorker
from llamarl.scoring.sandbox.containers import ProgramLimits
from llamarl.scoring.stages import check_task

CHECKPOINT = ROOT / "recipes" / "quickstart_tools" / "checkpoint"
ROOM = 100_000
PROGRAM = """
import asyncio, json, random, time
from urllib.parse import urlsplit

from llamarl.scoring.agent import AgentEnvironment


class Agent(AgentEnvironment):
    async def play(self, url, number, num_turns, token_s, out, **row):
        parts, times = urlsplit(url), []
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        messages = [{"role": "user", "content": "1*2"}]
        lengths = random.Random(number)
        for _ in range(num_turns):
            tokens_s = token_s * lengths.randint(10, 30)
            body = json.dumps({"messages": messages}).encode()
            head = f"POST {parts.path}/chat/completions HTTP/1.1\\r\\nHost: x\\r\\n"
            start = time.perf_counter()
            writer.write(f"{head}Content-Length: {len(body)}\\r\\n\\r\\n".encode() + body)
            head = await reader.readuntil(b"\\r\\n\\r\\n")
            times.append(time.perf_counter() - start - tokens_s)
            assert b" 200 " in head, head
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\\r\\n")[0])
            found = json.loads(await reader.readexactly(length))
            messages.append(found["choices"][0]["message"])
            messages.append({"role": "user", "content": "3"})
        writer.close()
        with open(out, "a") as file:
            file.write("".join(f"{each}\\n" for each in times))
        return 1.0


environment = Agent
"""


async def play(
    link: EnvironmentLink, row: int, prompt: Prompt, turn: tuple[int, ...], token_s: float
) -> None:
    """Be the replica of one episode: answer every question, after as many tokens as the program
    knows."""
    lengths = random.Random(row)
    begun = await link.answer(TurnItem(row_id=row, attempt=0, prompt=prompt, room=ROOM))
    end = asyncio.create_task(
        link.answer(TurnItem(row_id=row, attempt=0, conversation=1, room=ROOM))
    )
    result: TurnResult = begun
    place = 0
    while result.state is EpisodeState.GOES_ON:
        await asyncio.sleep(token_s * lengths.randint(10, 30))
        question = TurnItem(row_id=row, attempt=0, ids=turn, room=ROOM, start=place)
        result = await link.answer(question)
        place += len(turn) + len(result.observation)
    ended = await end
    assert ended.state is EpisodeState.DONE, ended


async def measure(num_episodes: int, num_turns: int, token_s: float) -> dict[str, float]:
    """The times of one round."""
    with tempfile.TemporaryDirectory() as folder:
        task, out = {"task.py": PROGRAM}, f"{folder}/times"
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
        times = sorted(map(float, Path(out).read_text().split()))
    return {
        "agent_turn_ms": 1000 * statistics.median(times),
        "agent_turn_p90_ms": 1000 * times[int(0.9 * len(times))],
        "requests_per_s": len(times) / elapsed_s,
    }


def main() -> None:
    """Measure."""
    bench = Bench(__doc__, {"agent_turn_ms": "<= 20"})
    bench.option("--episodes", type=int, default=32)
    bench.option("--turns", type=int, default=8)
    bench.option("--token-ms", type=float, default=25.0, help="of the model")
    bench.option("--rounds", type=int, default=3)
    arguments = bench.parse()
    shape = arguments.episodes, arguments.turns, arguments.token_ms / 1000
    found = [asyncio.run(measure(*shape)) for _ in range(arguments.rounds)]
    for name in found[0]:
        values = [each[name] for each in found]
        bench.add(name, statistics.median(values), f"{arguments.episodes} at once", values)
    bench.write()


if __name__ == "__main__":
    main()
