"""A run's folder with a few rollouts of every kind, written by a storage unit: what `llamarl view`
shows."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llamarl.core.groups import Group, turns_of
from llamarl.core.records import (
    CLIPPED,
    FINISH_CODES,
    GENERATOR_LOGPROBS,
    LOSS_WEIGHTS,
    NO_VERSION,
    PROMPT_IDS,
    RECORD,
    RESPONSE_IDS,
    REWARD,
    SAMPLING,
    TOKEN_VERSIONS,
    TRAINER_LOGPROBS,
    TURNS,
    FinishReason,
    Outcome,
    Prompt,
    StageResult,
)
from llamarl.metrics.span import Spans
from llamarl.model.tokenizer import Tokenizer, keep_tokenizer, load_tokenizer
from llamarl.storage.archive import as_cell, make_record
from llamarl.storage.worker import StorageSpec, StorageWorker
from tests.model.tokenizer_files import write_tokenizer

ATTACK = "</script><img src=x onerror=\"window.hacked=1\"><b id='b'>&amp;{{7*7}}${7*7}"
"""What must stay text."""
ADDED = " (added)"
"""What the environment adds to each prompt."""
DAMAGED_JSON = [
    *("null", "true", "false", "0", "-1", "1.5", "-0.0", "1e400", "-1e400", "NaN", "-Infinity"),
    *(str(2**31), str(2**53), str(-(2**63)), f"1{'0' * 400}", "9" * 5000, "1e308"),
    *('""', '"x"', '"[]"', '"{}"', '"NaN"', r'"\ud800"', r'"\u0000\u2028"', f'"{"a" * 50_000}"'),
    *("[]", "[[]]", "[null]", '[1, "1"]', "{}", '{"": 1}', '{"__proto__": {"a": null}}'),
    *("[" * 900 + "]" * 900, '{"a":' * 5000 + "1" + "}" * 5000),
]
"""What stands where another value should, as JSON texts: not all are what Python would write."""
EPISODE = [("ask: 6*7", 3), ("42", NO_VERSION), (" 42 \u20ac", 4)]
"""(text, version) of each run of tokens of the first rollout."""


@dataclass
class ViewedRun:
    """The folder while it is written."""

    folder: Path
    tokenizer: Tokenizer = field(init=False)
    unit: StorageWorker = field(init=False)
    next_row: int = 0

    def __post_init__(self) -> None:
        write_tokenizer(self.folder / "checkpoint")
        keep_tokenizer(self.folder / "checkpoint", self.folder)
        self.tokenizer = load_tokenizer(self.folder / "tokenizer")
        spec = StorageSpec(unit=0, archive_folder=str(self.folder / "archive"))
        self.unit = StorageWorker(spec, rank=0, num_ranks=1, spans=Spans("storage-0", None))

    async def add(
        self,
        prompt: Prompt,
        rollouts: list[list[tuple[str, int]]],
        outcome: Outcome,
        rewards: list[float],
        group_id: int = -1,
        lacks: tuple[str, ...] = (),
    ) -> None:
        """A group of rollouts, each of runs of (text, version), that had this outcome."""
        row_ids = tuple(range(self.next_row, self.next_row + len(rollouts)))
        self.next_row += len(rollouts)
        group = Group(group_id=group_id, prompt=prompt, row_ids=row_ids, min_version=0, step=2)
        mean = sum(rewards) / len(rewards)
        group.advantages = tuple(reward - mean for reward in rewards)
        for row_id, runs, reward in zip(row_ids, rollouts, rewards, strict=True):
            group.scores[row_id] = StageResult(
                row_id=row_id, parts={"exact": reward}, correct=reward >= 1
            )
            cells = self.cells(runs, reward)
            prompt_ids = self.tokenizer.encode(f"{prompt.text}{ADDED}", special=False)
            cells[PROMPT_IDS] = np.array(prompt_ids, np.int32)
            record = make_record(
                group, row_id, outcome, prompts=["train.jsonl"], held_out={"easy": "test.jsonl"}
            )
            cells[RECORD] = as_cell(record)
            kept = {name: [cell] for name, cell in cells.items() if name not in lacks}
            await self.unit.write([row_id], kept)
        await self.unit.retire([*row_ids], outcome)

    def cells(self, runs: list[tuple[str, int]], reward: float) -> dict[str, np.ndarray]:
        """What storage holds of a rollout that was trained."""
        parts = [self.tokenizer.encode(text, special=False) for text, _ in runs]
        ids = np.array([i for part in parts for i in part], np.int32)
        of_part = [[version] * len(p) for (_, version), p in zip(runs, parts, strict=True)]
        versions = np.array([v for part in of_part for v in part], np.int32)
        is_written = versions != NO_VERSION
        mu = np.where(is_written, -np.arange(len(ids)) / 8, 0).astype(np.float32)
        pi = np.where(is_written, mu + np.where(np.arange(len(ids)) % 3 == 1, 0.7, -0.2), 0)
        finish = FINISH_CODES[FinishReason.STOP]
        return {
            RESPONSE_IDS: ids,
            TOKEN_VERSIONS: versions,
            GENERATOR_LOGPROBS: mu,
            TRAINER_LOGPROBS: pi.astype(np.float32),
            LOSS_WEIGHTS: is_written.astype(np.uint8),
            CLIPPED: (is_written & (np.arange(len(ids)) % 3 == 1)).astype(np.uint8),
            SAMPLING: np.array([1.0, 0, 1.0, 64, 7, finish]),
            REWARD: np.array([reward]),
            TURNS: as_cell(turns_of(ids, versions, self.tokenizer.decode)),
        }


def prompt_of(line: int, text: str, **more: Any) -> Prompt:
    return Prompt(prompt_id=line, text=text, token_ids=(1,), fields={"answer": text}, **more)


async def _write(folder: Path) -> None:
    run = ViewedRun(folder)
    await run.unit.start()
    trained: Mapping[str, Any] = {"outcome": "trained", "oldest_version": 3}
    product = prompt_of(5, "6*7?", is_kept=True)
    runs = [EPISODE, [("41", 4)]]
    await run.add(product, runs, {**trained, "version": 4}, [1.0, 0.0], group_id=11)
    for version in range(5, 9):
        group = prompt_of(version + 1, f"sum {version}?", is_kept=True)
        runs = [[("y" * (2 * version), version)], [("no", version - 1)]]
        await run.add(
            group, runs, {**trained, "version": version}, [0.25, 0.5], group_id=version + 7
        )
    attack = prompt_of(17, ATTACK, is_kept=True)
    dropped: Outcome = {"outcome": "dropped", "reason": "equal_rewards", "group_id": 12}
    without_pass = (TRAINER_LOGPROBS, LOSS_WEIGHTS, CLIPPED)
    await run.add(attack, [[(ATTACK, 2)]], dropped, [0.0], group_id=12, lacks=without_pass)
    for version, rewards in ((0, [0.0, 1.0]), (8, [1.0, 0.0])):
        for line, reward in enumerate(rewards, start=1):
            held_out = prompt_of(line, f"held {line}? {ATTACK}", held_out="easy")
            outcome: Outcome = {"outcome": "evaluated", "version": version}
            await run.add(held_out, [[(f"said {reward:g}", version)]], outcome, [reward])
    await run.unit.close()


def write_run(folder: Path) -> Path:
    """The folder of a run with 15 kept rollouts: two for each of five steps, one dropped, two held
    out prompts of two evaluations, without tokens."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text("evaluation: {sets: {easy: test.jsonl}}\n")
    asyncio.run(_write(folder))
    lines = [
        {"step": 0, "evaluation/accuracy": 0.5},
        *(
            {"step": step, "reward/mean": step / 10, "accuracy/train": 0.05 * step}
            for step in range(1, 10)
        ),
        {"step": 8, "evaluation/accuracy": 0.5},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def change_value(line: dict[str, Any], text: str, rng: random.Random) -> bytes:
    """The line of JSON in which one value, deep or shallow, or its key, is another."""
    mark = "changed here"
    inner: Any = line
    key: Any = rng.choice([*line])
    while isinstance(inner[key], dict | list) and inner[key] and rng.random() < 0.6:
        inner = inner[key]
        key = rng.choice([*inner] if isinstance(inner, dict) else range(len(inner)))
    if rng.random() < 0.1:
        inner.pop(key)
    elif inner is line and key in ("fields", "numbers") and rng.random() < 0.7:
        inner[key] = f'{{"a": {text}}}'  # JSON in a text
    else:
        inner[key] = mark
    return json.dumps(line).replace(json.dumps(mark), text).encode()
