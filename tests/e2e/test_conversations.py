"""Random trees of conversations in real runs, token by token: what the program has asked and was
told, replayed as text, and by transformers."""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamarl.core.records import NO_VERSION
from llamarl.model.tokenizer import load_tokenizer
from tests.conversation_oracle import Replay, Template, check_logprobs, turns_of
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

CHECKPOINT = TOOLS_RECIPE / "checkpoint"
OPTIONS = [
    *("cluster=inline", "num_steps=2", "trainer.groups_per_step=4", "trainer.warmup_steps=0"),
    *("trainer.lr=0", "evaluation.max_prompts=3", "evaluation.every_steps=0"),
    *("checkpoint.export=false", "experience.keep_rollouts=1", "reward.functions=[environment]"),
    *("environment.max_turns=100", "generator.max_num_seqs=8", "sampling.rollouts_per_prompt=4"),
]


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


TEMPLATE = Template(load_tokenizer(CHECKPOINT))
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
        replay = Replay(episode["exchanges"], turns, TEMPLATE)
        assert len(replay.left) <= episode["ends_early"], "each turn was asked for, and came once"
        if not episode["is_parallel"] and not episode["ends_early"]:
            assert len(of_episode) == replay.num_rows
        check_episode(of_episode, episode)
    check_logprobs([line for of_episode in rows.values() for line in of_episode], CHECKPOINT)
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
