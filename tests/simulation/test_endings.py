"""How a run ends ahead of time: the real controller, gate and saver on a virtual clock."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from llamarl.core import checkpoint
from llamarl.core.groups import StepStats
from llamarl.core.records import REWARD, Prompt, StageResult
from llamarl.planner.simulation.clock import run
from llamarl.prompts.stream import PromptStream
from llamarl.recipe.inputs import make_prompts
from llamarl.recipe.prompt_inputs import with_last_step
from tests.fakes import WatchedStorage
from tests.simulation.faults import Faults
from tests.simulation.loop import COSTS, Loop, LoopWorkload, first_error
from tests.simulation.test_loop import STAGES

PROMPTS = [Prompt(prompt_id=i, text=str(i), token_ids=(1, i)) for i in range(1, 30)]


@dataclass(frozen=True, kw_only=True)
class Learning(LoopWorkload):
    """Every other rollout is right until the trainer has made `solved_at`; then all are, but for
    the prompts in `hopeless`, which never are."""

    version: Callable[[], int]
    solved_at: int
    hopeless: frozenset[int]

    def score(self, row_id: int, prompt: Prompt) -> StageResult:
        is_right = self.version() >= self.solved_at or row_id % 2 == 1
        mark = float(is_right and prompt.prompt_id not in self.hopeless)
        return StageResult(row_id=row_id, numbers={REWARD: mark}, correct=mark == 1)


def solving(hopeless: frozenset[int] = frozenset(), solved_at: int = 7, **options: Any) -> Loop:
    workload = Learning(
        lengths=(),
        prompt_tokens=2,
        length_of=lambda request: 4,
        version=lambda: loop.trainer.version,
        solved_at=solved_at,
        hopeless=hopeless,
    )
    loop = Loop(num_held_out=5, num_replicas=2, workload=workload, prompts=PROMPTS, **options)
    return loop


def saved(run_dir: Path) -> dict[str, Any]:
    folder = checkpoint.latest(run_dir)
    assert folder is not None
    return checkpoint.read_state(folder)


@pytest.mark.parametrize("is_colocated", [False, True])
@pytest.mark.parametrize("evaluate_every", [1, pytest.param(0, marks=pytest.mark.long)])
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_run_whose_prompts_are_solved_is_finished(
    max_staleness: int, evaluate_every: int, is_colocated: bool, tmp_path: Path
) -> None:
    loop = solving(
        max_staleness=max_staleness, evaluate_every=evaluate_every, is_colocated=is_colocated
    )
    run(loop.run(tmp_path))
    version = loop.trainer.version
    assert 7 <= version <= 8 + max_staleness
    assert loop.gate.solved.startswith("all of the last 29 groups")
    assert saved(tmp_path)["version"] == version
    assert saved(tmp_path)["solved"] == loop.gate.solved
    versions = [evaluation.version for evaluation in loop.run_logger.evaluations]
    assert versions == (list(range(version + 1)) if evaluate_every else [0, version])
    assert loop.run_logger.versions == list(range(1, version + 1))
    # What was accumulated towards a step that never came is not saved as trained.
    assert loop.storage.count("trained") == version * 4 * 2


SEVERAL = {"num_mini_batches": 2, "max_staleness": 2, "evaluate_every": 3}
"""Steps per batch; every other evaluation falls amid one."""


@pytest.mark.parametrize("options", [{}, {"is_colocated": True}, SEVERAL])
def test_a_run_that_gets_no_better_ends_with_its_best_version_kept(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Of five held-out answers two or three are right, by turns."""
    fixed = {"num_steps": 40, "evaluate_every": 1, "best": "accuracy", "patience": 2, "keep": 1}
    loop = Loop(prompts=PROMPTS, num_held_out=5, exports=True, **(fixed | options))
    run(loop.run(tmp_path))
    evaluations = loop.run_logger.evaluations
    assert all(each.version % loop.num_mini_batches == 0 for each in evaluations[:-1])
    best = max(evaluations[1:], key=lambda each: (each.accuracy, -each.version)).version
    assert loop.gate.ended.startswith("evaluation/accuracy was not above the")
    assert loop.trainer.version < 40
    assert evaluations[-1].version == loop.trainer.version, "the last version is evaluated, too"
    assert [checkpoint.version_of(path) for path in checkpoint.committed(tmp_path)] == sorted(
        {best, loop.trainer.version}
    )
    marked = checkpoint.marked_best(tmp_path)
    assert marked is not None
    assert checkpoint.version_of(marked) == best
    assert saved(tmp_path)["best"]["num_since"] >= 2
    calls = loop.process("trainer").num_calls
    assert (calls["export"], calls["restore"]) == (2, int(best != loop.trainer.version))


def test_a_few_hopeless_prompts_among_solved_ones_end_a_run_well_too(tmp_path: Path) -> None:
    loop = solving(hopeless=frozenset({3, 4, 5}), max_drops_in_row=200)
    run(loop.run(tmp_path))
    assert "of the last 200 groups (the others had equal rewards" in loop.gate.solved
    assert saved(tmp_path)["version"] == loop.trainer.version


def test_a_run_without_signal_fails_but_what_it_learnt_before_is_saved(tmp_path: Path) -> None:
    loop = solving(hopeless=frozenset(range(4, 30)), max_drops_in_row=100)
    with pytest.raises(BaseExceptionGroup) as caught:
        run(loop.run(tmp_path))
    assert "most of them not correct" in str(first_error(caught.value))
    assert loop.trainer.version >= 1
    assert saved(tmp_path)["version"] == loop.trainer.version


OTHERS = [
    *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 4)),
    *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 60)),
]


@pytest.mark.parametrize("is_colocated", [False, True])
@pytest.mark.parametrize("late", ["wait", "mask"])
@pytest.mark.parametrize("seed", [0, *OTHERS])
def test_whenever_a_run_is_cancelled_nothing_learnt_is_lost_and_nothing_is_done_twice(
    seed: int, late: str, is_colocated: bool, tmp_path: Path
) -> None:
    chosen = random.Random(f"{seed} {late} {is_colocated}")
    options = {
        "late": late,
        "max_staleness": chosen.choice([0, 1, 2]),
        "tokens_per_micro_batch": chosen.choice([1, 8]),
        "save_every": chosen.choice([0, 2]),
        "evaluate_every": chosen.choice([0, 2]),
        "num_held_out": 4,
    }

    def make(num_steps: int, state: dict[str, Any] | None = None) -> Loop:
        return Loop(
            num_steps=num_steps,
            state=state or {},
            prompts=PROMPTS,
            num_replicas=2,
            is_colocated=is_colocated,
            costs=replace(COSTS, optimizer_s=0.05, save_s=0.05),
            **options,
        )

    async def train(loop: Loop, limit_s: float) -> None:
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
    assert first.run_logger.versions == list(range(1, version + 1)), "every step is written down"
    second = make(version + 6, state)
    run(train(second, 1e6))
    assert second.trainer.version == version + 6
    rows = [row.row_id for batch in first.batches for row in batch.rows if batch.version < version]
    rows += second.trained_rows()
    assert len(rows) == len(set(rows)) == (version + 6) * 4 * 2
    # The trained prompts, with those open at the end, are the first of the stream, each once.
    of_row = first.prompt_of | second.prompt_of
    trained = [of_row[row_id] for row_id in rows][::2]
    last = saved(tmp_path)
    drawn = trained + [tuple(pair) for pair in (*last["pending"], *last["backlog"])]
    stream = PromptStream(PROMPTS, seed=0, shuffle=True, position=0)
    expected = [next(stream) for _ in range(last["position"])]
    assert sorted(drawn) == sorted((prompt.epoch, prompt.prompt_id) for prompt in expected)
    # What the first run evaluated after its save is cut from the files and done again.
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
    loop = solving(
        hopeless,
        solved_at=10**6,
        save_every=1,
        max_staleness=2,
        max_drops_in_row=10**6,
        storage=WatchedStorage(tmp_path),
        faults={"storage-0": Faults(delays_s={"retire": (0.03, 0.03)})},
    )

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
        num_bytes = state["positions"]["archive/rollouts-0.jsonl"][-1][0]
        lines = [json.loads(line) for line in archive.read_bytes()[:num_bytes].splitlines()]
        rows = [line["row_id"] for line in lines if line["outcome"] in ("trained", "dropped")]
        found = {loop.prompt_of[row_id] for row_id in rows}
        assert any(line["outcome"] == "dropped" for line in lines)
        open_ones = [tuple(pair) for pair in (*state["pending"], *state["backlog"])]
        stream = PromptStream(PROMPTS, seed=0, shuffle=True, position=0)
        drawn = [next(stream) for _ in range(state["position"])]
        expected = sorted((prompt.epoch, prompt.prompt_id) for prompt in drawn)
        assert sorted([*found, *open_ones]) == expected


def test_a_save_that_hangs_is_given_up_and_does_not_hide_the_first_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    faults = Faults(errors={"step": (4, ArithmeticError())}, delays_s={"save": (1e9, 1e9)})
    loop = Loop(faults={"trainer": faults})
    with caplog.at_level(logging.WARNING), pytest.raises(BaseExceptionGroup) as caught:
        run(loop.run(tmp_path))
    assert isinstance(first_error(caught.value), ArithmeticError)
    assert "version 3 could not be saved: it took over 600 s" in caplog.text
    assert checkpoint.latest(tmp_path) is None
    assert not list((tmp_path / "checkpoints").iterdir()), "nothing unfinished is left"


def test_a_version_that_is_saved_is_not_saved_again(tmp_path: Path) -> None:
    loop = Loop(faults={"trainer": Faults(errors={"step": (5, ArithmeticError())})}, save_every=4)
    with pytest.raises(BaseExceptionGroup):
        run(loop.run(tmp_path))
    assert saved(tmp_path)["version"] == 4
    assert loop.process("trainer").num_calls["save"] == 1


def test_saves_that_are_written_beside_training_delay_no_step(tmp_path: Path) -> None:
    ends_s = []
    for save_every, folder in ((0, "without"), (5, "with")):
        loop = Loop(num_steps=20, save_every=save_every, costs=replace(COSTS, save_s=0.3))
        run(loop.run(tmp_path / folder))
        ends_s.append(loop.timeline.step_ends_s)
    assert ends_s[1] == pytest.approx(ends_s[0], rel=0.01)
    folders = checkpoint.committed(tmp_path / "with")
    assert [checkpoint.version_of(folder) for folder in folders] == [15, 20]
    assert loop.process("trainer").num_calls["save"] == 4


def test_a_save_waits_for_the_one_before(tmp_path: Path) -> None:
    loop = Loop(num_steps=4, save_every=1, costs=replace(COSTS, save_s=50.0))
    run(loop.run(tmp_path))
    assert loop.timeline.step_ends_s[-1] > 2 * 50.0
    assert saved(tmp_path)["version"] == 4


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(i, marks=pytest.mark.long) for i in range(2, 8))]
)
def test_what_is_dropped_as_a_run_ends_is_archived_before_it_has_ended(
    seed: int, tmp_path: Path
) -> None:
    loop = Loop(
        num_steps=4 + seed,
        groups_per_step=1,
        max_staleness=3,
        rollouts_per_prompt=6,
        drop_share=0.5,
        stages=STAGES,
        reward_columns=["reward", "blended"],
        stage_drop_share=0.1,
        faults={"storage-0": Faults(delays_s={"retire": (0.0, 0.4)})},
    )
    run(loop.run(tmp_path))
    assert loop.prompt_of.keys() <= loop.storage.outcomes.keys()


def test_a_run_ends_with_the_last_whole_step_of_its_epochs(tmp_path: Path) -> None:
    loop = Loop(num_held_out=3, num_replicas=2, prompts=PROMPTS, num_epochs=2, exports=True)
    run(loop.run(tmp_path))
    assert (loop.trainer.version, loop.gate.ended) == (14, "num_epochs=2"), "58 are 14 times 4"
    assert Counter(loop.prompt_of.values()) == {
        (epoch, prompt.prompt_id): 2 for epoch in (0, 1) for prompt in PROMPTS
    }
    state = saved(tmp_path)
    assert state["version"] == loop.run_logger.evaluations[-1].version == 14
    assert make_prompts(loop.config, loop.inputs, state).num_left == 2
    more = replace(loop.config, num_epochs=3)
    assert make_prompts(more, loop.inputs, state).num_left == 2 + 29, "it could go on"


@pytest.mark.parametrize("is_colocated", [False, True])
@pytest.mark.parametrize(("looks_ahead", "num_steps"), [(False, 7 * 4 + 1), (True, 7 * 4)])
def test_a_batch_of_several_steps_that_is_short_is_trained_once_or_not_at_all(
    looks_ahead: bool, num_steps: int, is_colocated: bool, tmp_path: Path
) -> None:
    loop = Loop(
        prompts=PROMPTS,
        num_epochs=2.1,
        num_mini_batches=2,
        num_passes=2,
        max_staleness=3,
        proximal="recompute" if looks_ahead else "none",
        num_steps=100,
        is_colocated=is_colocated,
    )
    assert with_last_step(loop.config, len(PROMPTS)).num_steps == num_steps, (
        "61 are 7 times 8 and 5"
    )
    run(loop.run(tmp_path))
    assert (loop.trainer.version, loop.gate.ended) == (num_steps, "num_epochs=2.1")


@pytest.mark.parametrize("deadline_s", [0.0, 2.0])
def test_the_step_in_which_the_hours_are_over_is_the_last_one(
    deadline_s: float, tmp_path: Path
) -> None:
    loop = Loop(num_held_out=3, deadline_s=deadline_s)
    made: list[float] = []
    step = loop.trainer.step

    async def timed() -> StepStats:
        stats = await step()
        made.append(asyncio.get_running_loop().time())
        return stats

    loop.trainer.step = timed
    run(loop.run(tmp_path))
    assert loop.gate.ended == loop.saver.limit
    assert len(made) == loop.trainer.version == saved(tmp_path)["version"]
    assert all(time_s < deadline_s for time_s in made[:-1])
    assert made[-1] >= deadline_s
    assert loop.run_logger.evaluations[-1].version == loop.trainer.version


def test_what_was_dropped_after_the_last_save_is_not_asked_again_once_the_epochs_are_over(
    tmp_path: Path,
) -> None:
    loop = solving(save_every=1, num_epochs=1.4)
    run(loop.run(tmp_path))
    assert loop.gate.ended == "num_epochs=1.4"
    assert loop.storage.count("dropped") > 4
    state = saved(tmp_path)
    assert state["version"] == loop.trainer.version
    assert make_prompts(loop.config, loop.inputs, state).num_left < 4
