"""How a run ends ahead of time: on fake executors and a virtual clock, the real controller, gate
and saver."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llamarl.checkpoints import checkpoint
from llamarl.environments.prompts import PromptStream
from llamarl.environments.resumable_prompts import ResumablePrompts
from llamarl.loop.colocation import Colocated
from llamarl.metrics.span import Spans
from llamarl.planner.simulation.clock import run
from llamarl.types import Outcome, Prompt, Score, ScoreStatus
from tests.loop.fakes import FakeReplica, FakeScorer, FakeStorage, FakeTrainer
from tests.loop.loop import Loop, heavy_tail

PROMPTS = [Prompt(prompt_id=i, text=str(i), token_ids=(1, i)) for i in range(1, 30)]


@dataclass
class LearningScorer(FakeScorer):
    """Every other rollout is right until the trainer has made `solved_at`; then all are, but for
    the prompts in `hopeless`, which never are."""

    trainer: FakeTrainer | None = None
    solved_at: int = 0
    hopeless: frozenset[int] = frozenset()

    async def score(self, rollouts: list[tuple[int, Prompt]]) -> list[Score]:
        await asyncio.sleep(self.score_s)
        assert self.trainer is not None
        is_solved = self.trainer.version >= self.solved_at
        marks = [
            float((is_solved or row_id % 2) and prompt.prompt_id not in self.hopeless)
            for row_id, prompt in rollouts
        ]
        return [
            Score(row_id=row_id, status=ScoreStatus.OK, reward=mark, parts={"fake": mark})
            for (row_id, _), mark in zip(rollouts, marks, strict=True)
        ]


def solving(**options: Any) -> Loop:
    trainer = FakeTrainer()
    scorer = LearningScorer(trainer=trainer, solved_at=7, hopeless=options.pop("hopeless", set()))
    replicas = {i: FakeReplica(i, length=lambda request: 4) for i in range(2)}
    return Loop(
        num_held_out=5,
        trainer=trainer,
        scorer=scorer,
        replicas=replicas,
        prompts=backlog(),
        **options,
    )


def backlog(state: dict[str, Any] | None = None) -> ResumablePrompts:
    state = state or {}
    stream = PromptStream(PROMPTS, seed=1, shuffle=True, position=state.get("position", 0))
    first = [tuple(pair) for pair in (*state.get("pending", []), *state.get("backlog", []))]
    return ResumablePrompts(stream, PROMPTS, first)


def saved(run_dir: Path) -> dict[str, Any]:
    folder = checkpoint.latest(run_dir)
    assert folder is not None
    return checkpoint.read_state(folder)


@pytest.mark.parametrize("is_colocated", [False, True])
@pytest.mark.parametrize("evaluate_every", [0, 1])
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_run_whose_prompts_are_solved_is_finished(
    max_staleness: int, evaluate_every: int, is_colocated: bool, tmp_path: Path
) -> None:
    async def train() -> Loop:
        loop = solving(max_staleness=max_staleness, evaluate_every=evaluate_every)
        if is_colocated:
            spans = Spans("controller", None)
            loop.colocation = Colocated(loop.trainer, dict(loop.replicas), spans)
        await loop.run(tmp_path)
        return loop

    loop = run(train())
    version = loop.trainer.version
    assert 7 <= version <= 8 + max_staleness
    assert loop.gate.solved.startswith("all of the last 29 groups")
    assert saved(tmp_path)["version"] == version
    assert saved(tmp_path)["solved"] == loop.gate.solved
    versions = [evaluation.version for evaluation in loop.run_logger.evaluations]
    assert versions == (list(range(version + 1)) if evaluate_every else [0, version])
    assert loop.run_logger.steps == list(range(1, version + 1))
    # What was accumulated towards a step that never came is not saved as trained.
    trained = [
        row for row, outcome in loop.storage.outcomes.items() if outcome["outcome"] == "trained"
    ]
    assert len(trained) == version * 4 * 2


def test_a_few_hopeless_prompts_among_solved_ones_end_a_run_well_too(tmp_path: Path) -> None:
    loop = solving(hopeless=frozenset({3, 4, 5}), max_drops_in_row=200)
    run(loop.run(tmp_path))
    assert "of the last 200 groups (the others had equal rewards" in loop.gate.solved
    assert saved(tmp_path)["version"] == loop.trainer.version


def test_a_run_without_signal_fails_but_what_it_learnt_before_is_saved(tmp_path: Path) -> None:
    loop = solving(hopeless=frozenset(range(4, 30)), max_drops_in_row=100)
    with pytest.raises(BaseExceptionGroup) as caught:
        run(loop.run(tmp_path))
    assert "most of them without full marks" in str(first_error(caught.value))
    assert loop.trainer.version >= 1
    assert saved(tmp_path)["version"] == loop.trainer.version


def first_error(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


MANY = pytest.mark.slow


@pytest.mark.parametrize("is_colocated", [False, True])
@pytest.mark.parametrize("late", ["wait", "mask"])
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(i, marks=MANY) for i in range(4, 60))])
def test_whenever_a_run_is_cancelled_nothing_learnt_is_lost_and_nothing_is_done_twice(
    seed: int, late: str, is_colocated: bool, tmp_path: Path
) -> None:
    chosen = random.Random(f"{seed} {late} {is_colocated}")
    options = {
        "late": late,
        "max_staleness": chosen.choice([0, 1, 2]),
        "groups_per_part": chosen.choice([0, 1, 2]),
        "save_every": chosen.choice([0, 2]),
        "evaluate_every": chosen.choice([0, 2]),
        "num_held_out": 4,
    }

    def make(num_steps: int, state: dict[str, Any] | None = None) -> Loop:
        version = (state or {}).get("version", 0)
        return Loop(
            num_steps=num_steps,
            state=state or {},
            prompts=backlog(state),
            trainer=SlowTrainer(version=version),
            replicas={i: FakeReplica(i, length=heavy_tail) for i in range(2)},
            **options,
        )

    async def train(loop: Loop, limit_s: float) -> None:
        if is_colocated:
            spans = Spans("controller", None)
            loop.colocation = Colocated(loop.trainer, dict(loop.replicas), spans)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await loop.run(tmp_path)

    first = make(50)
    run(train(first, chosen.uniform(0.5, 6.0)))
    version = first.trainer.version
    if version == 0:
        assert checkpoint.latest(tmp_path) is None, "nothing was learnt"
        return
    state = saved(tmp_path)
    assert state["version"] == version < 50
    assert first.run_logger.steps == list(range(1, version + 1)), "every step is written down"
    second = make(version + 6, state)
    run(train(second, 1e6))
    assert second.trainer.version == version + 6
    steps = [*first.trainer.batches, *second.trainer.batches]
    asked = {row_id for loop in (first, second) for row_id in loop.written}
    rows = [row.row_id for batch in steps for row in batch.rows if batch.version < version]
    rows += [row.row_id for batch in second.trainer.batches for row in batch.rows]
    assert len(rows) == len(set(rows)) == (version + 6) * 4 * 2
    assert set(rows) <= asked
    # The trained prompts, with those open at the end, are the first of the stream, each once.
    of_row = first.prompt_of | second.prompt_of
    trained = [of_row[row_id] for row_id in rows][::2]
    last = saved(tmp_path)
    drawn = trained + [tuple(pair) for pair in (*last["pending"], *last["backlog"])]
    stream = PromptStream(PROMPTS, seed=1, shuffle=True, position=0)
    expected = [next(stream) for _ in range(last["position"])]
    assert sorted(drawn) == sorted((prompt.epoch, prompt.prompt_id) for prompt in expected)
    # What the first run evaluated after its save is cut from the records and done again.
    versions = [each.version for each in first.run_logger.evaluations]
    versions = [version for version in versions if version <= state["evaluated"]]
    versions += [each.version for each in second.run_logger.evaluations]
    assert len(versions) == len(set(versions)), "no version is evaluated twice"
    assert versions[-1] == version + 6
    if not options["evaluate_every"]:
        assert versions in ([0, version + 6], [version, version + 6]), "the first was cut off"


@pytest.mark.parametrize("seed", range(4))
def test_a_group_that_is_dropped_amid_a_save_is_either_open_in_it_or_archived(
    seed: int, tmp_path: Path
) -> None:
    hopeless = frozenset(range(1, 30, 2))
    loop = solving(hopeless=hopeless, save_every=1, max_staleness=2, max_drops_in_row=10**6)
    loop.scorer.solved_at = 10**6
    loop.storage = SlowArchive(tmp_path)

    async def train() -> None:
        await loop.storage.start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(random.Random(seed).uniform(0.5, 2.0)):
                await loop.run(tmp_path)

    run(train())
    states = [checkpoint.read_state(folder) for folder in checkpoint.committed(tmp_path)]
    assert states
    archive = tmp_path / "archive" / "rollouts-0.jsonl"
    for state in states:
        num_bytes = state["records"]["archive/rollouts-0.jsonl"][-1][0]
        lines = [json.loads(line) for line in archive.read_bytes()[:num_bytes].splitlines()]
        rows = [line["row_id"] for line in lines if line["outcome"] in ("trained", "dropped")]
        found = {loop.prompt_of[row_id] for row_id in rows}
        assert any(line["outcome"] == "dropped" for line in lines)
        open_ones = [tuple(pair) for pair in (*state["pending"], *state["backlog"])]
        stream = PromptStream(PROMPTS, seed=1, shuffle=True, position=0)
        drawn = [next(stream) for _ in range(state["position"])]
        expected = sorted((prompt.epoch, prompt.prompt_id) for prompt in drawn)
        assert sorted([*found, *open_ones]) == expected


class SlowArchive(FakeStorage):
    """Writes an archive; a call takes time, and goes on though its caller is cancelled."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self._path = run_dir / "archive" / "rollouts-0.jsonl"

    async def retire(self, row_ids: list[int], outcome: Outcome) -> None:
        async def work() -> None:
            await asyncio.sleep(0.03)
            await super(SlowArchive, self).retire(row_ids, outcome)

        await asyncio.shield(asyncio.create_task(work()))


class SlowTrainer(FakeTrainer):
    """Takes time for steps and saves, so that an end comes amid them too."""

    async def step(self) -> Any:
        stats = await super().step()
        await asyncio.sleep(0.05)
        return stats

    async def save(self, folder: str) -> None:
        version = self.version
        await asyncio.sleep(0.05)
        assert Path(folder).is_dir()
        assert (self.returned.is_set(), version) == (True, self.version)


def test_a_save_that_hangs_is_given_up_and_does_not_hide_the_first_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class HungTrainer(FakeTrainer):
        async def save(self, folder: str) -> None:
            await asyncio.sleep(1e9)

    loop = Loop(trainer=HungTrainer(fails_at=3), save_s=40.0)
    with caplog.at_level(logging.WARNING), pytest.raises(BaseExceptionGroup) as caught:
        run(loop.run(tmp_path))
    assert isinstance(first_error(caught.value), ArithmeticError)
    assert "version 3 could not be saved: it took over 40 s" in caplog.text
    assert checkpoint.latest(tmp_path) is None
    assert not list((tmp_path / "checkpoints").iterdir()), "nothing unfinished is left"


def test_a_version_that_is_saved_is_not_saved_again(tmp_path: Path) -> None:
    class CountingTrainer(FakeTrainer):
        saves = 0

        async def save(self, folder: str) -> None:
            self.saves += 1

    loop = Loop(trainer=CountingTrainer(fails_at=4), save_every=4)
    with pytest.raises(BaseExceptionGroup):
        run(loop.run(tmp_path))
    assert saved(tmp_path)["version"] == 4
    assert loop.trainer.saves == 1
