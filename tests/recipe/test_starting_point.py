"""Where a run begins: a checkpoint's state is accepted only if a run could have saved it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llamarl.controller.wiring import Wiring
from llamarl.core import checkpoint, files
from llamarl.core.config import Config
from llamarl.recipe.inputs import Inputs, identity, read_inputs
from llamarl.recipe.starting_point import starting_point
from tests.fakes import SHARD, SavingTrainer
from tests.places import RECIPE
from tests.recipe.composing import compose_recipe

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    return read_inputs(resume("off"))


def resume(how: str = "auto") -> Config:
    return compose_recipe(RECIPE, [f"recipe_dir={RECIPE}", f"checkpoint.resume={how}"])


def save(run_dir: Path, inputs: Inputs, version: int = 1) -> Path:
    state = {
        "version": version,
        "position": 4,
        "pending": [[0, 3], [0, 1]],
        "backlog": [[0, 2]],
        "walks": [[4, 4]],
        "next_group_id": 5,
        "next_row_id": 40,
        "identity": identity(resume(), inputs),
    }
    return asyncio.run(checkpoint.save(run_dir, SavingTrainer(), state, keep=0))


def state(**values: Any) -> Damage:
    """A state that differs from a sound one in `values` (None: is not there)."""

    def damage(folder: Path) -> None:
        path = folder / checkpoint.STATE_FILE
        written = json.loads(path.read_text()) | values
        path.write_text(json.dumps({k: v for k, v in written.items() if v is not None}))
        files.write(folder)

    return damage


def piece(content: bytes) -> Damage:
    return lambda folder: (folder / SHARD).write_bytes(content)


def test_a_sound_state_comes_back_with_its_folder(tmp_path: Path, inputs: Inputs) -> None:
    folder = save(tmp_path, inputs)
    state, found = starting_point(resume(), inputs, str(tmp_path))
    assert (state["version"], found) == (1, str(folder))
    assert starting_point(resume(str(folder)), inputs, "/elsewhere") == (state, found)
    assert starting_point(resume("off"), inputs, str(tmp_path)) == ({}, None)


WRONG: dict[str, tuple[Damage, str]] = {
    "negative": (state(next_row_id=-7), "next_row_id .* must be a whole number from 0 .*got -7"),
    "huge": (state(position=10**30), "position in .* must be a whole number"),
    "true": (state(next_group_id=True), "next_group_id in .* must be a whole number"),
    "text": (state(position="4"), "position in .* must be a whole number"),
    "missing": (state(pending=None), "pending in .* must list pairs"),
    "no pairs": (state(backlog=[3]), "backlog in .* must list pairs"),
    "long pairs": (state(backlog=[[0, 1, 2]]), "backlog in .* must list pairs"),
    "twice": (state(backlog=[[0, 3]]), "open prompts in .* must differ, got '1 that are"),
    "unknown": (state(backlog=[[0, 10**9]]), "must be among data.prompts, got line 1000000000"),
    "no walks": (state(walks=None), "walks in .* must list pairs of prompts passed and drawn"),
    "walks of others": (state(walks=[[4, 3]]), "walks in .* must list pairs"),
    "more drawn than passed": (state(walks=[[3, 4]]), "walks in .* must list pairs"),
    "walks of text": (state(walks=[["4", 4]]), "walks in .* must list pairs"),
    "a walk too many": (state(walks=[[2, 2], [2, 2]]), "state must list 1 walks, one per weight"),
    "silent": (state(silent=3), "silent in .* must be text"),
    "too far": (state(position=6, walks=[[6, 6]]), "position in .* must fit the open prompts"),
    "too near": (state(position=2, walks=[[2, 2]]), "position in .* must fit the open prompts"),
    "evaluated later": (state(evaluated=2), "evaluated in .* must be a version, got 2"),
    "evaluated never": (state(evaluated=[]), "evaluated in .* must be a version"),
    "solved": (state(solved=True), "solved in .* must be text"),
    "best without value": (state(best={"version": 1}), "best in .* must be a version, its value"),
    "best later": (
        state(best={"metric": "accuracy", "version": 2, "value": 0.5, "num_since": 0}),
        "best in .* must be a version, its value",
    ),
    "best of none": (state(best=[1]), "best in .* must be a version, its value"),
    "no identity": (state(identity=None), "identity in .* must be an object"),
    "empty identity": (state(identity={}), "must say what seed was"),
    "positions": (state(positions={"metrics.jsonl": 7}), "positions in .* must list parts, got"),
    "a piece cut": (piece(b""), r"__0_0\.distcp must be 100 bytes long, got 0"),
    "a piece changed": (piece(b"y" * 100), r"__0_0\.distcp must hold the bytes that"),
}


@pytest.mark.parametrize(("damage", "words"), WRONG.values(), ids=WRONG)
def test_what_no_run_saves_is_refused_in_one_line_each_time(
    damage: Damage, words: str, tmp_path: Path, inputs: Inputs
) -> None:
    folder = save(tmp_path, inputs)
    damage(folder)
    for how in ("auto", "auto", str(folder)):
        with pytest.raises(ValueError, match=words) as caught:
            starting_point(resume(how), inputs, str(tmp_path))
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 300 + len(str(folder))


@pytest.mark.parametrize("name", ["summary.json", "spans/trainer-0.jsonl", "archive/a.jsonl"])
def test_what_stands_in_the_way_must_be_a_file(name: str, tmp_path: Path, inputs: Inputs) -> None:
    save(tmp_path, inputs)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} must be a file, got "):
        starting_point(resume(), inputs, str(tmp_path))


def test_damaged_records_are_named_with_the_way_out(tmp_path: Path, inputs: Inputs) -> None:
    archive = tmp_path / "archive" / "rollouts-0.jsonl"
    archive.parent.mkdir()
    archive.write_text('{"outcome": "trained"}\n' * 5)
    folder = save(tmp_path, inputs)
    archive.write_bytes(archive.read_bytes().replace(b"rained", b"ra\xffned", 1))
    with pytest.raises(ValueError, match=r"rollouts-0\.jsonl:1 must be as the run wrote it"):
        starting_point(resume(), inputs, str(tmp_path))
    state, _ = starting_point(resume(str(folder)), inputs, str(tmp_path / "other"))
    assert state["version"] == 1


def test_a_resumed_run_evaluates_no_version_again(inputs: Inputs) -> None:
    nothing: Any = None
    wiring = Wiring(resume(), inputs, nothing, "", nothing)  # evaluation.every_steps is 10
    for evaluated, due in ({"evaluated": 10}, False), ({"evaluated": 0}, True), ({}, True):
        evaluator = replace(wiring, state=evaluated).make_evaluator(nothing)
        assert evaluator.is_due(12, last=30) == due
