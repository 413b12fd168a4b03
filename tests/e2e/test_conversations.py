"""Random trees of conversations in real runs, token by token: what the program has asked and was
told, replayed as text, and by transformers."""

from __future__ import annotations

import os
import shutil
import signal
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
from tests.e2e.commands import (
    executors,
    finish,
    read_rollouts,
    reward_workers,
    start,
    told_of,
    wait_for_restart,
    wait_for_step,
)
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
    """A turn as it stands in the archive: the ids before it, and its own, with their log-probs."""

    row_id: int
    before: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]

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
            logprobs = tuple(line["generator_logprobs"][place:end])
            found.append(Turn(line["row_id"], before, tuple(ids[place:end]), logprobs))
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
            turn = self.take(contexts, each)
            check_turn(turn, each)
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

    def take(self, contexts: set[str], exchange: Mapping[str, Any]) -> Turn:
        """The turn of the archive that was written after one of these contexts."""
        usage, logprobs = exchange["usage"], exchange["logprobs"]
        sizes = usage["prompt_tokens"], usage["completion_tokens"]
        for turn in self.left:
            is_it = (len(turn.before), len(turn.ids)) == sizes
            is_it = is_it and np.allclose(turn.logprobs, logprobs, atol=1e-6)
            if is_it and TOKENIZER.decode_raw(turn.before) in contexts:
                self.left.remove(turn)
                return turn
        raise AssertionError(f"no turn of {sizes} tokens follows {contexts}")


def check_turn(turn: Turn, exchange: Mapping[str, Any]) -> None:
    """The program was told what the model wrote, and the options of its request were kept."""
    said, options = exchange["reply"]["content"] or "", exchange["options"]
    assert said.strip() in turn.raw
    assert len(turn.ids) <= options.get("max_tokens", 1000)
    for stop in options.get("stop", ()):
        assert stop not in said
        assert stop not in TOKENIZER.decode(turn.ids[:-1]), "the turn ends where it comes"


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
        for name in ("trainer_logprobs", "ref_logprobs"):
            if name in line:
                others = np.array(line[name])
                assert np.abs(others - expected)[is_written].max() < 1e-4, (line["row_id"], name)


def write_recipe(folder: Path, seed: int) -> Path:
    """The recipe with the program of conversations_task.py, which writes to log.jsonl here."""
    recipe, log = folder / "recipe", folder / "log.jsonl"
    shutil.copytree(TOOLS_RECIPE, recipe)
    log.touch()
    text = (Path(__file__).parent / "conversations_task.py").read_text()
    head = f"import os\nos.environ['LLAMARL_TEST_LOG'] = {str(log)!r}\n"
    head += f"os.environ['LLAMARL_TEST_SEED'] = '{seed}'\n"
    (recipe / "task.py").write_text(head + text)
    return recipe


Episodes = Mapping[int, Sequence[dict[str, Any]]]
"""Rows of the archive by the id of their rollout."""


def check_run(folder: Path) -> Episodes:
    """Check the episodes of a run in this folder, and return them."""
    rows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in read_rollouts(folder / "run"):
        if line["outcome"] in ("trained", "evaluated", "dropped"):
            rows[line.get("episode", line["row_id"])].append(line)
    played = {each["reward"]: each for each in read_lines(folder / "log.jsonl")}
    for row_id, of_episode in rows.items():
        of_episode.sort(key=lambda line: line["row_id"])
        first = of_episode[0]
        assert first["row_id"] == row_id
        episode = played[first["reward"]]
        turns = [turn for line in of_episode for turn in turns_of(line)]
        replay = Replay(episode["exchanges"], turns)
        assert len(replay.left) <= episode["ends_early"], "each turn was asked for, and came once"
        if not episode["is_parallel"] and not episode["ends_early"]:
            assert len(of_episode) == replay.num_rows
        check_episode(of_episode, episode)
    check_logprobs([line for of_episode in rows.values() for line in of_episode])
    return rows


def check_episode(lines: Sequence[dict[str, Any]], episode: Mapping[str, Any]) -> None:
    """Each conversation has the episode's outcome, and its advantage unless it has its own."""
    assert len({(line["outcome"], line.get("version")) for line in lines}) == 1
    for number, line in enumerate(lines):
        assert line["num_tokens"] == len(line["response_ids"]) > 0
        assert line["token_versions"][-1] != NO_VERSION, "nothing is observed that no turn follows"
        assert line["prompt_id"] == lines[0]["prompt_id"]
        if number:
            assert line["conversation"] > 0
    assert len({line["sampling"]["seed"] for line in lines}) == len(lines)
    assert len({line["sampling"]["max_tokens"] for line in lines}) == 1, "a run's, not a turn's"
    if lines[0]["outcome"] == "trained" and not episode["own"]:
        assert len({line["advantage"] for line in lines}) == 1


def check_metrics(run_dir: Path, rows: Episodes) -> None:
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


PATHS = [
    [],
    ["sampling.segment_tokens=4"],
    [
        *("generator.num_replicas=2", "generator.max_num_seqs=2", "num_steps=3"),
        "algorithm.kl_coefficient=0.01",
    ],
    ["staleness.late=mask", "generator.kv_after_commit=recompute", "trainer=transformers"],
]


@searched(1, 30)
def test_each_turn_is_trained_once_after_the_ids_that_the_program_s_request_stands_for(
    forks: Forks, tmp_path: Path, seeds: Sequence[int]
) -> None:
    for seed in seeds:
        folder = tmp_path / str(seed)
        folder.mkdir()
        recipe = write_recipe(folder, seed)
        common = f"--config-dir={recipe}", f"run_dir={folder / 'run'}", *OPTIONS
        with case(seed):
            done = forks.run("train", *common, *PATHS[seed % len(PATHS)])
            assert done.returncode == 0, done.stderr
            rows = check_run(folder)
            check_metrics(folder / "run", rows)
            assert sum(len(of_episode) > 1 for of_episode in rows.values()) > 10


@pytest.mark.long
def test_what_is_killed_amid_conversations_is_started_again_and_no_turn_is_lost_or_wrong(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    recipe = f"--config-dir={write_recipe(tmp_path, 1)}"
    options = [each for each in OPTIONS if not each.startswith(("cluster", "num_steps"))]
    options += ["num_steps=100000", "cluster.max_restarts=100", "algorithm.kl_coefficient=0.01"]
    command = start("train", recipe, f"run_dir={run_dir}", *options)
    wait_for_step(command, run_dir, 1)

    def restarts() -> float:
        lines = read_lines(run_dir / "metrics.jsonl")
        return sum(line.get("episode/restarts", 0) for line in lines)

    for name in ("program", "environment-0", "generator-0", "reference"):
        before = restarts()
        if name == "program":
            workers = reward_workers(command.family())
            (pid, *_) = [pid for pid in workers if "environment" in told_of(pid, "cmdline")]
        else:
            (pid,) = executors(command, name)
        os.kill(pid, signal.SIGKILL)
        if name != "program":
            wait_for_restart(command, run_dir, name)
        wait_for_step(command, run_dir, len(read_lines(run_dir / "metrics.jsonl")) + 3)
        if name != "reference":
            assert restarts() > before, name
    command.process.send_signal(signal.SIGINT)
    code, _, err = finish(command)
    assert code == 130, err
    assert command.wait_until_gone(5.0) == []
    check_run(tmp_path)
