"""Runs in which an agent plays the episodes, and what it and the model said to each other there."""

from __future__ import annotations

import json
import shutil
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingMixIn, UnixStreamServer
from typing import Any

import yaml

from llamarl.model.tokenizer import load_tokenizer
from llamarl.scoring.agent.server import PROTOCOLS
from tests.agents import writing_checkpoint
from tests.agents.writing_checkpoint import Table, rendered, rendered_tools
from tests.conversation_oracle import Replay, Template, turns_of
from tests.e2e.commands import read_rollouts
from tests.e2e.forks import Forks
from tests.json_lines import read_lines
from tests.places import ROOT, TOOLS_RECIPE

AGENTS = ROOT / ".venv-agents"
HERE = Path(__file__).parent
TASK = "Write a file done.txt."
CHECK = """
from pathlib import Path
print((int(Path("number.txt").read_text()) + Path("done.txt").exists()) / 2**25)
"""
CONFIG: dict[str, Any] = {
    "defaults": ["config", {"override /algorithm": "aipo"}, "_self_"],
    "num_steps": 1,
    "model": {"checkpoint": "checkpoint"},
    "data": {"prompts": "prompts.jsonl", "chat": True, "max_prompt_tokens": 60000},
    "environment": {
        "tools": ["agent"],
        "calls": "hermes",
        "files": "agent",
        "check_command": ["{python}", "-c", CHECK.replace("{", "{{").replace("}", "}}")],
        "max_programs": 2,
        "max_turns": 60,
        "timeout_s": 300,
    },
    "reward": {"functions": ["environment"]},
    "sampling": {"rollouts_per_prompt": 4, "max_tokens": 30000},
    "algorithm": {"filters": []},
    "staleness": {"max_staleness": 0},
    "generator": {"max_num_seqs": 16, "max_model_len": 100000},
    "trainer": {"groups_per_step": 1, "tokens_per_micro_batch": 100000, "lr": 0, "warmup_steps": 0},
    "experience": {"keep_rollouts": 1},
    "checkpoint": {"export": False},
}


@dataclass
class Episode:
    """What was said in an episode, in the order in which requests were answered; `refused` has
    those that were not, and `num_open` counts those for whose answer the agent has not waited.
    `done` is how the agent ended, `lines` what the archive has."""

    exchanges: list[dict[str, Any]] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)
    num_open: int = 0
    done: dict[str, Any] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)

    @property
    def has_file(self) -> bool:
        """Whether the check found the file."""
        return bool(number_of(self.lines[0]) % 2)

    @property
    def calls(self) -> list[str]:
        """The names of the tools that the model has called."""
        replies = [each["reply"] for each in self.exchanges]
        calls = [call for reply in replies for call in reply.get("tool_calls", ())]
        return [call["function"]["name"] for call in calls]

    @property
    def results(self) -> list[str]:
        """What the tools have told the model, each once."""
        messages = [m for each in self.exchanges for m in each["messages"]]
        return [*dict.fromkeys(m["content"] for m in messages if m["role"] == "tool")]

    @property
    def shown(self) -> str:
        return f"{self.done.get('out')}\n{self.done.get('err')}\n{self.refused}"


@contextmanager
def listening(place: Path) -> Iterator[list[dict[str, Any]]]:
    """Collect what recorders tell at this socket."""
    told: list[dict[str, Any]] = []

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            told.append(json.loads(self.rfile.read()))

    class Server(ThreadingMixIn, UnixStreamServer):
        daemon_threads = True
        request_queue_size = 64

    with Server(str(place), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield told
        server.shutdown()


def play(
    forks: Forks,
    folder: Path,
    command: Sequence[str],
    table: Table | None,
    *overrides: str,
    files: Mapping[str, str] | None = None,
) -> list[Episode]:
    """Let this command play the episodes of a run with a model that writes what the table says, or
    with that of the quickstart, and return them, once they are what the oracle says that they must
    be."""
    recipe, place = folder / "recipe", folder / "place"
    for path in (recipe / "agent", place):
        path.mkdir(parents=True)
    shutil.copy(HERE / "recorder.py", recipe / "agent")
    for name, text in (files or {}).items():
        (recipe / "agent" / name).parent.mkdir(exist_ok=True)
        (recipe / "agent" / name).write_text(text)
    template = write_model(recipe / "checkpoint", table)
    (recipe / "prompts.jsonl").write_text(json.dumps({"question": TASK}) + "\n")
    own = {"command": ["{python}", "recorder.py", str(place / "socket"), *command]}
    own["readable"] = [str(AGENTS), str(place)]
    config = CONFIG | {"environment": {**CONFIG["environment"], **own}}
    (recipe / "run.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    run_dir = folder / "run"
    with listening(place / "socket") as told:
        common = f"--config-dir={recipe}", f"run_dir={run_dir}", "cluster=inline"
        done = forks.run("train", *common, *overrides)
    assert done.returncode == 0, done.stderr
    episodes = read_episodes(run_dir, told)
    for episode in episodes:
        turns = [turn for line in episode.lines for turn in turns_of(line)]
        replay = Replay(episode.exchanges, turns, template)
        assert len(replay.left) <= episode.num_open, "each turn was asked for"
        num_more = len(episode.lines) - replay.num_rows
        assert 0 <= num_more <= len(replay.left)
    (line,) = read_lines(run_dir / "metrics.jsonl")
    assert line["trained/ratio_max"] < 1.01
    return episodes


def write_model(folder: Path, table: Table | None) -> Template:
    """Write the checkpoint, that of the quickstart with room for the prompts of agents, and return
    its template."""
    if table is not None:
        writing_checkpoint.write(folder, table)
        return Template(load_tokenizer(folder), rendered, rendered_tools)
    shutil.copytree(TOOLS_RECIPE / "checkpoint", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    return Template(load_tokenizer(folder))


def read_episodes(run_dir: Path, told: Sequence[Mapping[str, Any]]) -> list[Episode]:
    """The episodes of a run, of which this was told: all were trained on."""
    found: dict[int, Episode] = defaultdict(Episode)
    for each in told:
        episode = found[each["episode"]]
        episode.num_open += ("asked" in each) - ("status" in each)
        if "exit" in each:
            episode.done = dict(each)
        elif "asked" in each:
            continue
        elif each["status"] != 200:
            episode.refused.append(dict(each))
        elif (route := route_of(each["path"])) in PROTOCOLS:
            episode.exchanges.append(exchange(route, json.loads(each["body"]), each["response"]))
    lines = [line for line in read_rollouts(run_dir) if line["outcome"] != "logprob_check"]
    assert {line["outcome"] for line in lines} == {"trained"}
    by_id = {line["row_id"]: line for line in lines}
    for line in sorted(lines, key=lambda line: line["row_id"]):
        first = by_id[line.get("episode", line["row_id"])]
        found[number_of(first) // 2 * 2].lines.append(line)
    assert all(episode.lines and episode.done for episode in found.values())
    return [*found.values()]


def number_of(line: Mapping[str, Any]) -> int:
    """The number that the recorder gave this line's episode, with 1 more if the file was there."""
    return int(line["reward"] * 2**25)


def route_of(path: str) -> str:
    return path.partition("/v1/")[2].partition("?")[0]


def exchange(route: str, body: dict[str, Any], response: str) -> dict[str, Any]:
    """An exchange as the oracle takes it."""
    request = PROTOCOLS[route].read(body)
    read = {"chat/completions": of_chat, "responses": of_responses, "messages": of_messages}[route]
    said, (num_before, num_tokens) = read(response)
    reply = PROTOCOLS[route].read(said).messages[-1]
    options: dict[str, Any] = {"stop": request.options.stop_strings}
    if request.options.max_tokens:
        options["max_tokens"] = request.options.max_tokens
    return {
        "messages": request.messages,
        "tools": request.schemas,
        "reply": reply,
        "usage": {"prompt_tokens": num_before, "completion_tokens": num_tokens},
        "logprobs": [],
        "options": options,
    }


Said = tuple[dict[str, Any], tuple[int, int]]
"""A request that holds nothing but what the model said, and the tokens that it had and wrote."""


def events_of(response: str) -> list[dict[str, Any]]:
    lines = response.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def of_chat(response: str) -> Said:
    found = json.loads(response)
    usage = found["usage"]
    message = found["choices"][0]["message"]
    return {"messages": [message]}, (usage["prompt_tokens"], usage["completion_tokens"])


def of_responses(response: str) -> Said:
    is_whole = response.startswith("{")
    found = json.loads(response) if is_whole else events_of(response)[-1]["response"]
    usage = found["usage"]
    return {"input": found["output"]}, (usage["input_tokens"], usage["output_tokens"])


def of_messages(response: str) -> Said:
    blocks: list[dict[str, Any]] = []
    usage: dict[str, int] = {}
    for event in events_of(response):
        delta = event.get("delta", {})
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif delta.get("type") == "text_delta":
            blocks[-1]["text"] += delta["text"]
        elif delta.get("type") == "input_json_delta":
            blocks[-1]["input"] = json.loads(delta["partial_json"])
        elif event["type"] == "message_delta":
            usage = event["usage"]
    message = {"role": "assistant", "content": blocks}
    return {"messages": [message]}, (usage["input_tokens"], usage["output_tokens"])
