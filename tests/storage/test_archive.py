"""Which rollouts are kept whole, and what a storage unit records of the rows that are retired."""

from __future__ import annotations

import asyncio
import datetime
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.json
import pytest

from llamarl.core.groups import Group
from llamarl.core.records import (
    CLIPPED,
    GENERATOR_LOGPROBS,
    LOSS_WEIGHTS,
    NO_VERSION,
    PROMPT_IDS,
    PROXIMAL_LOGPROBS,
    RECORD,
    REF_LOGPROBS,
    RESPONSE_IDS,
    TOKEN_VERSIONS,
    TRAINER_LOGPROBS,
    TURNS,
    Columns,
    Outcome,
    Prompt,
    StageResult,
    StageStatus,
)
from llamarl.prompts.stream import PromptStream
from llamarl.storage.archive import TOKEN_COLUMNS, as_cell, is_kept, make_record
from tests.json_lines import read_lines
from tests.storage.stored_rows import new_unit, opened, rows

PATH = "rollouts-0.jsonl"


KEPT = "kept-0.jsonl"
RECORDED = {"step": 4, "is_kept": True, "prompt": "q\ud800", "prompt_id": 9, "reason": None}
SAID = [
    {"role": "assistant", "content": "a call"},
    {"role": "observation", "content": " its answer\n"},
    {"role": "assistant", "content": "\u0000 </script> \u2028 \U0001f600"},
]


def recorded(rng: np.random.Generator, num_tokens: int, is_kept: bool) -> Columns:
    """A row with everything, of two versions and an observation."""
    wide = rng.integers(0, 2**32, (4, num_tokens), np.uint32).view(np.float32)
    versions = np.sort(rng.integers(2, 5, num_tokens)).astype(np.int32)
    versions[num_tokens // 2] = NO_VERSION
    return {
        PROMPT_IDS: [np.arange(3, dtype=np.int32)],
        RESPONSE_IDS: [rng.integers(0, 2**31 - 1, num_tokens).astype(np.int32)],
        TOKEN_VERSIONS: [versions],
        GENERATOR_LOGPROBS: [wide[0]],
        REF_LOGPROBS: [wide[1]],
        TRAINER_LOGPROBS: [wide[2]],
        PROXIMAL_LOGPROBS: [wide[3]],
        LOSS_WEIGHTS: [(versions != NO_VERSION).astype(np.uint8)],
        CLIPPED: [rng.integers(0, 2, num_tokens).astype(np.uint8)],
        TURNS: [as_cell(SAID)],
        RECORD: [as_cell(RECORDED | {"is_kept": is_kept})],
    }


def archive_rows(folder: Path, columns: Sequence[Columns], outcome: Outcome) -> None:
    async def scenario() -> None:
        async with opened("inline", folder, archive_folder=str(folder)) as (_, store):
            for row_id, each in enumerate(columns):
                await store.write([row_id], each)
            await store.retire([*range(len(columns))], outcome)

    asyncio.run(scenario())


def test_the_line_of_a_kept_rollout_has_every_number_as_it_was(tmp_path: Path) -> None:
    cells = recorded(np.random.default_rng(3), 4000, True)
    archive_rows(tmp_path, [cells], {"outcome": "trained", "version": 6, "oldest_version": 3})
    (line,) = read_lines(tmp_path / KEPT)
    for name in TOKEN_COLUMNS:
        (cell,) = cells[name]
        found = np.array([math.nan if each is None else each for each in line[name]], cell.dtype)
        is_number = np.isfinite(cell)
        assert found[is_number].tobytes() == cell[is_number].tobytes(), name
        assert not np.isfinite(found[~is_number]).any(), name
    assert not np.isfinite(cells[GENERATOR_LOGPROBS][0]).all(), "some are no numbers"
    assert line["turns"] == SAID
    assert line["completion"] == f"a call\n[its answer]\n{SAID[2]['content']}"
    assert (line["prompt"], line["prompt_id"], line["step"]) == ("q?", 9, 4)
    assert (line["version_min"], line["version_max"]) == (2, 4)
    assert line["staleness"] == 3, "of the oldest version that had weight"


def test_the_prompt_of_a_kept_line_is_what_the_environment_made_of_it(tmp_path: Path) -> None:
    cells = recorded(np.random.default_rng(3), 9, True)
    opening = {"role": "opening", "content": "q? Guess a number."}
    archive_rows(
        tmp_path,
        [cells | {TURNS: [as_cell([opening, *SAID])]}],
        {"outcome": "trained", "version": 6, "oldest_version": 3},
    )
    (line,) = read_lines(tmp_path / KEPT)
    assert (line["prompt"], line["turns"]) == ("q? Guess a number.", SAID)


def test_every_kept_line_has_the_same_keys_and_types(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    whole, text_alone = recorded(rng, 9, True), recorded(rng, 5, False)
    never_scored = {RECORD: whole[RECORD], **rows([1], 3)}
    outcome: Outcome = {"outcome": "evaluated", "version": 6, "correct": 1}
    archive_rows(tmp_path, [whole, text_alone, never_scored, rows([7], 2)], outcome)
    kept = read_lines(tmp_path / KEPT)
    assert [line["row_id"] for line in kept] == [0, 1, 2], "those with a record"
    assert len({tuple(line) for line in kept}) == 1
    assert kept[1]["completion"] == kept[0]["completion"]
    assert {kept[1][name] for name in TOKEN_COLUMNS} == {None}
    assert (kept[2]["completion"], kept[2]["turns"], kept[2]["clipped"]) == (None, None, None)
    assert len(kept[2][RESPONSE_IDS]) == 4
    assert len(read_lines(tmp_path / PATH)) == 4
    table = pyarrow.json.read_json(tmp_path / KEPT)
    assert table.num_rows == 3
    assert table["turns"].to_pylist() == [SAID, SAID, None]


def test_no_row_is_archived_twice_and_a_row_id_may_start_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened("inline", tmp_path, archive_folder=str(tmp_path)) as (_, store):
            await store.retire([1], {"outcome": "unused"})  # never written
            await store.write([1], rows([1], 2))
            await store.retire([1], {"outcome": "lost"})
            await store.retire([1], {"outcome": "lost"})
            await store.write([1], rows([1], 3))
            await store.retire([1, 1], {"outcome": "trained"})

    asyncio.run(scenario())
    lines = read_lines(tmp_path / PATH)
    assert [(line["outcome"], line["num_tokens"]) for line in lines] == [
        ("lost", 3),
        ("trained", 4),
    ]


def test_a_line_mixed_by_a_kill_is_cut_off_at_the_next_start(tmp_path: Path) -> None:
    (tmp_path / PATH).write_text('{"row_id": 1}\n{"row_id": 2, "fa')

    async def scenario() -> None:
        async with opened("inline", tmp_path, archive_folder=str(tmp_path)) as (_, store):
            await store.write([3], rows([3]))
            await store.retire([3], {"outcome": "trained"})

    asyncio.run(scenario())
    lines = read_lines(tmp_path / PATH)
    assert [line["row_id"] for line in lines] == [1, 3]


def test_a_unit_must_be_started_before_it_archives(tmp_path: Path) -> None:
    unit = new_unit(tmp_path, archive_folder=str(tmp_path))
    asyncio.run(unit.write([1], rows([1])))
    with pytest.raises(RuntimeError, match="must be started"):
        asyncio.run(unit.retire([1], {"outcome": "trained"}))


PROMPTS = [Prompt(prompt_id=i, text="", token_ids=(1,)) for i in range(1, 21)]


def chosen(share: float, seed: int = 0) -> set[int]:
    prompts = [Prompt(prompt_id=i, text="", token_ids=(1,)) for i in range(5000)]
    return {each.prompt_id for each in prompts if is_kept(each, share, seed)}


def test_the_share_that_is_kept_is_the_share_that_was_asked_for() -> None:
    assert chosen(0.0) == set()
    assert len(chosen(1.0)) == 5000
    assert len(chosen(0.01)) == pytest.approx(50, abs=25)
    assert len(chosen(0.3)) == pytest.approx(1500, abs=150)
    assert chosen(0.01) < chosen(0.3), "a larger share keeps what a smaller one does"
    assert chosen(0.3, seed=1) != chosen(0.3)


def test_a_stream_that_goes_on_elsewhere_keeps_the_same_prompts() -> None:
    def draw(number: int, **options: object) -> list[tuple[int, int, bool]]:
        stream = PromptStream(PROMPTS, seed=3, shuffle=True, keep=0.4, **options)  # type: ignore[arg-type]
        drawn = [next(stream) for _ in range(number)]
        return [(each.epoch, each.prompt_id, each.is_kept) for each in drawn]

    whole = draw(60)
    assert {is_chosen for _, _, is_chosen in whole} == {True, False}
    by_epoch = [{p for e, p, k in whole if k and e == epoch} for epoch in range(3)]
    assert by_epoch[0] != by_epoch[1], "other prompts in each epoch"
    pending = [whole[33][:2], whole[38][:2]]
    assert draw(22, position=40, first=pending) == [whole[33], whole[38], *whole[40:]]


def test_a_record_says_what_became_of_a_rollout() -> None:
    day = datetime.date(2026, 1, 2)
    prompt = Prompt(prompt_id=5, text="2+2=", token_ids=(1,), fields={"answer": "4", "day": day})
    group = Group(group_id=8, prompt=prompt, row_ids=(3, 4), min_version=0, step=6)
    group.scores[3] = StageResult(row_id=3, parts={"exact": 1.0, "brief": 0.5}, correct=True)
    group.scores[4] = StageResult(row_id=4, status=StageStatus.RAISED, error="KeyError: 'answer'")
    group.numbers[3], group.episodes[3] = {"quality": 2.0}, {"turns": 3.0}
    group.advantages = (0.75, -0.75)
    names = {
        "prompts": ["train.jsonl"],
        "held_out": {"test": "test.jsonl"},
        "functions": ["exact", "brief"],
    }
    right = make_record(group, 3, {"outcome": "trained", "version": 6}, **names)
    assert (right["step"], right["group_id"], right["advantage"]) == (7, 8, 0.75)
    assert (right["prompt_file"], right["prompt_id"], right["prompt"]) == ("train.jsonl", 5, "2+2=")
    assert right["question"] == "2+2="
    assert json.loads(right["fields"]) == {"answer": "4", "day": "2026-01-02"}
    assert json.loads(right["numbers"]) == {"quality": 2.0, "turns": 3.0}
    assert (right["rewards"], right["correct"]) == ({"exact": 1.0, "brief": 0.5}, True)
    failed = make_record(group, 4, {"outcome": "dropped", "reason": "failed_reward"}, **names)
    assert (failed["step"], failed["reason"]) == (7, "failed_reward"), "it was meant for"
    assert (failed["rewards"], failed["correct"]) == ({"exact": None, "brief": None}, None)
    assert failed["error"] == "KeyError: 'answer'"
    assert failed.keys() == right.keys()


def test_of_a_text_that_is_no_utf8_all_else_is_kept() -> None:
    assert json.loads(as_cell({"text": "a\ud800b"}).tobytes()) == {"text": "a?b"}
