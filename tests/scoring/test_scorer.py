"""The stage `score` with real reward processes, over a storage unit in this one."""

import asyncio
import json
import logging
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from llamarl.core.config import RewardConfig
from llamarl.core.records import (
    EPISODE_ROWS,
    FINISH_CODES,
    PROMPT_ID,
    PROMPT_IDS,
    RESPONSE_IDS,
    REWARD,
    SAMPLING,
    TOKEN_VERSIONS,
    TURNS,
    FinishReason,
    Prompt,
    StageStatus,
    conversation_row,
)
from llamarl.metrics.span import Spans
from llamarl.model.tokenizer import load_tokenizer
from llamarl.scoring.stage_worker import StageSpec, StageWorker
from llamarl.scoring.stages import SCORE, make_graph
from llamarl.storage.client import Store
from tests.fakes import WatchedStorage
from tests.model.tokenizer_files import write_tokenizer
from tests.planner.planner_recipes import make_recipe

pytestmark = pytest.mark.full

EOS = 1
PROMPT = Prompt(prompt_id=1, text="q", token_ids=(1, 2), fields={"answer": "42"})
TASK = """
def reward(prompt, completion):
    if completion.startswith("bad"):
        raise LookupError(completion)
    return float("nan") if completion == "nan" else 0.0
"""


tokenizer_of = cache(load_tokenizer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def put(storage, folder, row_id, text, finish=FinishReason.STOP):
    ids = tokenizer_of(folder).encode(text, special=False)
    ends = [EOS] if finish is FinishReason.STOP else []
    cells = {
        RESPONSE_IDS: np.array([*ids, *ends], np.int32),
        TOKEN_VERSIONS: np.zeros(len(ids) + len(ends), np.int32),
        SAMPLING: np.array([1.0, 0, 1.0, 64, 7, FINISH_CODES[finish]]),
    }
    storage.put({row_id: cells})


def run_scorer(
    folder,
    storage,
    config,
    calls,
    *,
    task_source=None,
    spans=None,
    prompt=PROMPT,
    has_openings=False,
):
    """Start, make the calls (lists of items: row ids, or tuples of a group's) one after another,
    close."""

    async def run():
        scorer = StageWorker(
            StageSpec(
                stage=make_graph(make_recipe(reward=config)).stages[SCORE],
                reward=config,
                numbers=frozenset(),
                tokenizer=folder,
                task_source=None if task_source is None else {"task.py": task_source},
                storage=Store([storage]),
                has_openings=has_openings,
            ),
            rank=0,
            num_ranks=1,
            spans=spans or Spans("scorer-0", None),
        )
        await scorer.start()
        try:
            items = [[(i if isinstance(i, tuple) else (i,), prompt) for i in ids] for ids in calls]
            return [await scorer.process(each) for each in items]
        finally:
            await scorer.close()

    return asyncio.run(run())


def test_completions_are_decoded_scored_and_their_rewards_written(folder):
    storage = WatchedStorage()
    put(storage, folder, 7, "6*7=42. Answer: 42")
    put(storage, folder, 3, "Answer: 41")
    put(storage, folder, 5, "Answer: 42", FinishReason.LENGTH)
    put(storage, folder, 9, "")
    config = RewardConfig(functions=["exact", "format"], weights=[1.0, 0.25])
    (scores,) = run_scorer(folder, storage, config, [[7, 3, 5, 9]])
    assert [score.row_id for score in scores] == [7, 3, 5, 9]
    assert [score.reward for score in scores] == [1.25, 0.25, 0.0, 0.0]
    assert [score.correct for score in scores] == [True, False, False, False]
    assert list(scores[0].parts) == ["exact", "format"]
    for score in scores:
        cell = storage.rows[score.row_id][REWARD]
        assert cell.dtype == np.float64
        assert cell.shape == (1,)
        assert cell[0] == score.reward


def test_further_numbers_of_a_reward_go_to_the_controller_and_into_no_column(folder):
    storage = WatchedStorage()
    put(storage, folder, 0, "two words")
    name = "\u6b63" * 90
    text = f"""
def reward(prompt, completion):
    more = {{f"{name}{{i}}": i for i in range(63)}}
    return {{"score": 0.5, "words": len(completion.split()), "text": completion, **more}}
"""
    config = RewardConfig(functions=["task"])
    ((score,),) = run_scorer(folder, storage, config, [[0]], task_source=text)
    assert score.status is StageStatus.OK
    assert score.reward == 0.5
    assert len(score.extra) == 64
    assert score.extra["words"] == 2.0
    assert REWARD in storage.rows[0]
    assert not {"words", "task", "reward_extra"} & storage.rows[0].keys()


@pytest.mark.parametrize("extra", ["3", "'[' * 10**5", "'{\"a\": NaN}'"])
def test_a_reward_that_forges_its_further_numbers_fails_alone(folder, extra):
    storage = WatchedStorage()
    put(storage, folder, 0, "words")
    put(storage, folder, 1, "words")
    forging = f"""
import sys
def reward(prompt, completion):
    async def forged(*_):
        return {{"rows": [[1.0, 1.0, -1.0, {extra}]]}}
    sys.modules["llamarl.scoring.stage_function"].answer = forged
    return 1.0
"""
    config = RewardConfig(functions=["task"], num_workers=1)
    _, (score,) = run_scorer(folder, storage, config, [[0], [1]], task_source=forging)
    assert score.status is not StageStatus.OK
    assert "must leave the answers of its process alone" in score.error


def test_a_failed_reward_writes_no_cell_and_is_logged_with_its_traceback(folder, caplog):
    storage = WatchedStorage()
    for row_id, text in enumerate(["bad", "fine", "nan", "bad", "bad"]):
        put(storage, folder, row_id, text)
    with caplog.at_level(logging.WARNING):
        (scores,) = run_scorer(
            folder, storage, RewardConfig(functions=["task"]), [range(5)], task_source=TASK
        )
    raised, ok, invalid = StageStatus.RAISED, StageStatus.OK, StageStatus.INVALID
    assert [score.status for score in scores] == [raised, ok, invalid, raised, raised]
    assert [REWARD in storage.rows[row] for row in range(5)] == [False, True, False, False, False]
    assert math.isnan(scores[0].reward)
    once = caplog.text.count('File "task.py", line 4, in reward')
    assert once == 1, "the same warning is written again with the tenth"


def test_with_on_failure_zero_a_failed_reward_is_a_zero_that_counts_as_failed(folder, caplog):
    storage = WatchedStorage()
    for row_id, text in enumerate(["bad", "fine", "nan"]):
        put(storage, folder, row_id, text)
    config = RewardConfig(functions=["task"], on_failure="zero")
    with caplog.at_level(logging.WARNING):
        (scores,) = run_scorer(folder, storage, config, [range(3)], task_source=TASK)
    assert [score.reward for score in scores] == [0.0, 0.0, 0.0]
    raised, ok, invalid = StageStatus.RAISED, StageStatus.OK, StageStatus.INVALID
    assert [score.status for score in scores] == [raised, ok, invalid]
    assert [storage.rows[row][REWARD][0] for row in range(3)] == [0.0, 0.0, 0.0]
    assert "LookupError: bad" in caplog.text
    assert not any(score.correct for score in scores)


@pytest.mark.parametrize(("correct_at", "correct"), [(1.0, [True, True]), (10.0, [False, True])])
def test_correct_is_on_the_scale_that_the_recipe_says(folder, correct_at, correct):
    storage = WatchedStorage()
    for row_id, text in enumerate(["seven..", "ten letters"]):
        put(storage, folder, row_id, text)
    config = RewardConfig(functions=["task"], correct_at=correct_at)
    source = "def reward(prompt, completion):\n    return len(completion)\n"
    (scores,) = run_scorer(folder, storage, config, [range(2)], task_source=source)
    assert [score.correct for score in scores] == correct


@pytest.mark.parametrize(
    ("is_kept", "held_out", "is_written"),
    [(False, "", False), (True, "", True), (False, "test", True)],
)
def test_the_texts_of_rollouts_that_are_recorded_are_written_beside_the_prompt_id(
    folder, is_kept, held_out, is_written
):
    storage = WatchedStorage()
    for row_id, text in enumerate(["gr\u00fcn", "bad"]):
        put(storage, folder, row_id, text)
    prompt = replace(PROMPT, held_out=held_out, is_kept=is_kept)
    run_scorer(
        folder,
        storage,
        RewardConfig(functions=["task"]),
        [range(2)],
        task_source=TASK,
        prompt=prompt,
    )
    for row_id, text in enumerate(["gr\u00fcn", "bad"]):
        row = storage.rows[row_id]
        assert row[PROMPT_ID].tolist() == [1.0]
        assert (TURNS in row) == is_written
        if is_written:
            assert json.loads(bytes(row[TURNS])) == [{"role": "assistant", "content": text}]


def test_what_an_environment_showed_in_place_of_the_prompt_is_recorded(folder):
    """Rollouts of one prompt may have begun alike or not."""
    storage = WatchedStorage()
    tokenizer = load_tokenizer(folder)
    for row_id, text in enumerate(["Guess 1 to 9.", "Guess 1 to 5."]):
        put(storage, folder, row_id, "7")
        ids = np.array([*PROMPT.token_ids, *tokenizer.encode(text, special=False)], np.int32)
        storage.put({row_id: {PROMPT_IDS: ids}})
    put(storage, folder, 2, "7")
    storage.put({2: {PROMPT_IDS: np.array(PROMPT.token_ids, np.int32)}})
    run_scorer(
        folder,
        storage,
        RewardConfig(functions=["task"]),
        [range(3)],
        task_source=TASK,
        prompt=replace(PROMPT, is_kept=True),
        has_openings=True,
    )
    turns = [json.loads(bytes(storage.rows[row_id][TURNS])) for row_id in range(3)]
    own = tokenizer.decode_raw(PROMPT.token_ids)
    said = [turn.pop(0) if len(turn) > 1 else None for turn in turns]
    assert said == [
        {"role": "opening", "content": f"{own}Guess 1 to 9."},
        {"role": "opening", "content": f"{own}Guess 1 to 5."},
        None,
    ]
    assert turns == [[{"role": "assistant", "content": "7"}]] * 3


def test_of_a_further_conversation_the_turns_are_stored_and_no_reward_is_asked_for(folder):
    storage = WatchedStorage()
    rows = [0, conversation_row(0, 1), 1]
    for row_id in rows:
        put(storage, folder, row_id, "7")
        storage.put({row_id: {PROMPT_IDS: np.array(PROMPT.token_ids, np.int32)}})
    (results,) = run_scorer(
        folder,
        storage,
        RewardConfig(functions=["task"]),
        [rows],
        task_source=TASK,
        prompt=replace(PROMPT, is_kept=True),
        has_openings=True,
    )
    assert [result.row_id for result in results] == rows
    assert [result.has_reward for result in results] == [True, False, True]
    for row_id in rows:
        turns = json.loads(bytes(storage.rows[row_id][TURNS]))
        assert turns == [{"role": "assistant", "content": "7"}]
        assert (REWARD in storage.rows[row_id]) == (row_id < EPISODE_ROWS)
