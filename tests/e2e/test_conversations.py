"""Random trees of conversations in real runs, token by token: what the program has asked and was
told, replayed as text, and by transformers."""

from __future__ import annotations

import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from llamarl.core.records import NO_VERSION
from llamarl.model.tokenizer import load_tokenizer
from tests.e2e.commands import read_rollouts
from tests.e2e.forks import Forks
from tests.json_lines import read_lines
from tests.places import TOOLS_RECIPE
from tests.random_search import case, searched

TOKENIZER = load_tokenizer(TOOLS_RECIPE / "checkpoint")
END = "<|end|>"
OPTIONS = [
    *("cluster=inline", "num_steps=2", "trainer.groups_per_step=4", "trainer.warmup_steps=0"),
    *("trainer.lr=0", "evaluation.max_prompts=3", "evaluation.every_steps=0"),
    *("checkpoint.export=false", "experience.keep_rollouts=1", "reward.functions=[environment]"),
    *("environment.max_turns=100", "generator.max_num_seqs=8", "sampling.rollouts_per_prompt=4"),
]


@dataclass(frozen=True)
class Turn:
    """A turn as it stands in the archive: the ids before it, and its own."""

    row_id: int
    before: tuple[int, ...]
    ids: tuple[int, ...]

    @property
    def raw(self) -> str:
        return TOKENIZER.decode_raw(self.ids)


def turns_of(line: Mapping[str, Any]) -> list[Turn]:
    ids, versions = line["response_ids"], line["token_versions"]
    found, place = [], 0
    for is_observed, run in groupby(versions, key=lambda version: version == NO_VERSION):
        end = place + len([*run])
        if not is_observed:
            before = (*line["prompt_ids"], *ids[:place])
            found.append(Turn(line["row_id"], before, tuple(ids[place:end])))
        place = end
    return found


def rendered(messages: Sequence[Mapping[str, Any]]) -> str:
    return "".join(f"<|{m['role']}|>{m['content'] or ''}{END}" for m in messages)


class Replay:
    """The oracle: an exchange follows the longest earlier one that it extends, without a turn that
    the model did not write; its context is that one's, its turn, and the new messages."""

    def __init__(self, exchanges: Sequence[Mapping[str, Any]], turns: Sequence[Turn]) -> None:
        self.exchanges, self.left = exchanges, [*turns]
        self.texts: list[str] = []  # of each exchange: context and turn
        self.num_rows = 0
        tips: set[int] = set()  # exchanges that are the last of their row
        for number, each in enumerate(exchanges):
            parents = self.parents(number)
            new = each["messages"][self.length(parents[0]) :] if parents else each["messages"]
            heads = [self.texts[parent] for parent in parents] or ["<bos>"]
            contexts = {f"{head}{rendered(new)}<|assistant|>" for head in heads}
            turn = self.take(contexts, each["usage"])
            context = TOKENIZER.decode_raw(turn.before)
            raw = turn.raw
            self.texts.append(context + raw + END * (not raw.endswith(END)))
            free = [parent for parent in parents if parent in tips]
            tips.difference_update(free[:1])
            self.num_rows += not free
            tips.add(number)

    def length(self, number: int) -> int:
        return len(self.exchanges[number]["messages"]) + 1

    def parents(self, number: int) -> list[int]:
        """Earlier exchanges of equal messages that this one follows."""
        messages, tools = (self.exchanges[number][key] for key in ("messages", "tools"))
        found: dict[int, list[int]] = defaultdict(list)
        for place, each in enumerate(self.exchanges[:number]):
            said, size = [*each["messages"], each["reply"]], self.length(place)
            is_start = each["tools"] == tools and messages[:size] == said
            if is_start and not any(m["role"] == "assistant" for m in messages[size:]):
                found[size].append(place)
        return found[max(found)] if found else []

    def take(self, contexts: set[str], usage: Mapping[str, int]) -> Turn:
        """The turn of the archive that was written after one of these contexts."""
        sizes = usage["prompt_tokens"], usage["completion_tokens"]
        for turn in self.left:
            is_size = (len(turn.before), len(turn.ids)) == sizes
            if is_size and TOKENIZER.decode_raw(turn.before) in contexts:
                self.left.remove(turn)
                return turn
        raise AssertionError(f"no turn of {sizes} tokens follows {contexts}")


def same_reply(turn: Turn, reply: Mapping[str, Any]) -> bool:
    calls = [json.loads(c["function"]["arguments"]) for c in reply.get("tool_calls", ())]
    return not calls or all(str(call["expression"]) in turn.raw for call in calls)


@torch.no_grad()
def check_logprobs(lines: Sequence[Mapping[str, Any]]) -> None:
    """Those of every written token are what transformers computes after its exact ids."""
    model = AutoModelForCausalLM.from_pretrained(TOOLS_RECIPE / "checkpoint", dtype=torch.float32)
    for line in lines:
        ids = torch.tensor([line["prompt_ids"] + line["response_ids"]])
        logprobs = model(ids).logits[0].log_softmax(-1)
        start = len(line["prompt_ids"])
        expected = logprobs[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0].numpy()
        is_written = np.array(line["token_versions"]) != NO_VERSION
        found = np.array(line["generator_logprobs"])
        assert np.abs(found - expected)[is_written].max() < 1e-4, line["row_id"]
        if "trainer_logprobs" in line:
            trained = np.array(line["trainer_logprobs"])
            assert np.abs(trained - expected)[is_written].max() < 1e-4, line["row_id"]


def play(forks: Forks, folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch, *more: str) -> int:
    """Run the recipe with the program, and check its episodes. Returns how many had several
    conversations."""
    recipe, run_dir, log = folder / "recipe", folder / "run", folder / "log.jsonl"
    shutil.copytree(TOOLS_RECIPE, recipe)
    log.touch()
    text = (Path(__file__).parent / "conversations_task.py").read_text()
    head = f"import os\nos.environ['LLAMARL_TEST_LOG'] = {str(log)!r}\n"
    head += f"os.environ['LLAMARL_TEST_SEED'] = '{seed}'\n"
    (recipe / "task.py").write_text(head + text)
    done = forks.run("train", f"--config-dir={recipe}", f"run_dir={run_dir}", *OPTIONS, *more)
    assert done.returncode == 0, done.stderr
    rows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in read_rollouts(run_dir):
        if line["outcome"] in ("trained", "evaluated", "dropped"):
            rows[line.get("episode", line["row_id"])].append(line)
    played = {each["reward"]: each for each in read_lines(log)}
    lines, num_several = [], 0
    for row_id, of_episode in rows.items():
        of_episode.sort(key=lambda line: line["row_id"])
        first = of_episode[0]
        assert first["row_id"] == row_id
        lines += of_episode
        episode = played[first["reward"]]
        turns = [turn for line in of_episode for turn in turns_of(line)]
        replay = Replay(episode["exchanges"], turns)
        assert len(replay.left) <= episode["ends_early"], "each turn was asked for, and came once"
        if not episode["is_parallel"] and not episode["ends_early"]:
            assert len(of_episode) == replay.num_rows
        check_episode(of_episode, episode)
        num_several += len(of_episode) > 1
    check_logprobs(lines)
    check_metrics(run_dir, rows)
    return num_several


def check_episode(lines: Sequence[dict[str, Any]], episode: Mapping[str, Any]) -> None:
    """Each conversation has the episode's outcome, and its advantage unless it has its own."""
    assert len({(line["outcome"], line.get("version")) for line in lines}) == 1
    for number, line in enumerate(lines):
        assert line["num_tokens"] == len(line["response_ids"]) > 0
        assert line["token_versions"][-1] != NO_VERSION, "nothing is observed that no turn follows"
        assert line["prompt_id"] == lines[0]["prompt_id"]
        if number:
            assert line["conversation"] > 0
    if lines[0]["outcome"] == "trained" and not episode["own"]:
        assert len({line["advantage"] for line in lines}) == 1


def check_metrics(run_dir: Path, rows: Mapping[int, Sequence[Mapping[str, Any]]]) -> None:
    scalars: dict[str, list[float]] = defaultdict(list)
    for line in read_lines(run_dir / "metrics.jsonl"):
        for name, value in line.items():
            scalars[name].append(value)
    trained = {row: lines for row, lines in rows.items() if lines[0]["outcome"] == "trained"}
    assert sum(scalars["rollouts/trained"]) == len(trained)
    whole = [line for lines in trained.values() for line in lines]
    written = sum(count for line in whole for _, count in line["spans"])
    assert sum(scalars["tokens/trained"]) + sum(scalars["tokens/masked"]) == written
    assert max(scalars["trained/ratio_max"]) < 1.01
    finished = [lines for lines in rows.values() if lines[0]["outcome"] in ("trained", "dropped")]
    counts = Counter(map(len, finished))
    mean = sum(size * count for size, count in counts.items()) / sum(counts.values())
    assert np.mean(scalars["episode/conversations"]) == pytest.approx(mean, rel=0.1)


@searched(1, 30)
def test_each_turn_is_trained_once_after_the_ids_that_the_program_s_request_stands_for(
    forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seeds: Sequence[int]
) -> None:
    num_several = 0
    for seed in seeds:
        with case(seed):
            folder = tmp_path / str(seed)
            folder.mkdir()
            more = ["sampling.segment_tokens=4"] * (seed % 2)
            num_several += play(forks, folder, seed, monkeypatch, *more)
    assert num_several > 10 * len(seeds)
