"""A stage of the recipe's own in real processes, over a storage unit in this one."""

import asyncio
import logging
import time
from itertools import pairwise

import numpy as np
import pytest

from llamarl.core.errors import UserCodeError
from llamarl.core.records import (
    GENERATOR_LOGPROBS,
    RESPONSE_IDS,
    REWARD,
    TOKEN_VERSIONS,
    Prompt,
    StageStatus,
)
from llamarl.metrics.span import Spans
from llamarl.model.tokenizer import load_tokenizer
from llamarl.scoring.stage_worker import StageSpec, StageWorker
from llamarl.scoring.stages import Stage
from llamarl.storage.client import Store
from llamarl.storage.columns import Column
from tests.fakes import WatchedStorage
from tests.json_lines import read_lines
from tests.model.tokenizer_files import write_tokenizer

pytestmark = pytest.mark.full

OK, RAISED, HUNG, INVALID = StageStatus
PROMPT = Prompt(prompt_id=7, text="what?", token_ids=(1, 2), fields={"word": "cat"})
# What `judge` does is chosen by the completion, so that one text serves many tests.
TASK = """
import math, os, sys, time
from llamarl.scoring.stages import Drop

def judge(prompt, completion):
    if completion == "raise":
        raise LookupError("no such word")
    if completion == "hang":
        time.sleep(100)
    if completion == "exit":
        sys.exit(3)
    if completion == "leave":
        os._exit(7)
    values = {"nan": math.nan, "none": None, "huge": [1] * 3_000_000, "drop": Drop("too_bad")}
    return values.get(completion, float(prompt.fields["word"] in completion))

def brief(completion):
    return Drop("rambling") if len(completion) > 10 else None

def weigh(completion, ids, logprobs, reward):
    if completion == "wrong":
        return [1.0]
    entries = [i * reward + logprob for i, logprob in zip(ids, logprobs)]
    return [math.nan, *entries[1:]], list(ids), len(ids)

def rank(prompts, rewards, ids):
    assert [prompt.text for prompt in prompts] == ["what?"] * len(rewards)
    if sum(rewards) < 0:
        raise ArithmeticError("hopeless")
    if sum(rewards) > 100:
        return [Drop("greedy") if reward > 50 else reward for reward in rewards]
    return [sum(other < reward for other in rewards) / len(rewards) for reward in rewards]

def heavy(reward):
    return "torch" in sys.modules or "transformers" in sys.modules
"""


def stored(folder, texts, rewards=()):
    """Storage with rollouts of these completions, and rewards of the first of them."""
    tokenizer = load_tokenizer(folder)
    cells = {}
    for row_id, text in enumerate(texts):
        ids = np.array(tokenizer.encode(text, special=False), np.int32)
        cells[row_id] = {RESPONSE_IDS: ids, TOKEN_VERSIONS: np.zeros_like(ids)}
    for row_id, reward in enumerate(rewards):
        cells[row_id][REWARD] = np.array([reward], np.float64)
    return WatchedStorage(cells=cells)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def with_stage(folder, storage, stage, work, *, task_source=TASK, spans=None):
    """What `work(executor)` returns, with an executor that is started and closed."""
    spec = StageSpec(
        stage=stage,
        numbers=frozenset({REWARD}),
        tokenizer=folder,
        task_source={"task.py": task_source},
        storage=Store([storage]),
    )

    async def run():
        recorder = spans or Spans("stage-0", None)
        executor = StageWorker(spec, rank=0, num_ranks=1, spans=recorder)
        await executor.start()
        try:
            return await work(executor)
        finally:
            await executor.close()

    return asyncio.run(run())


def run_stage(folder, storage, stage, calls, **fields):
    """Each call, a list of items that are tuples of rows, after the one before."""

    async def work(executor):
        return [await executor.process([(rows, PROMPT) for rows in call]) for call in calls]

    return with_stage(folder, storage, stage, work, **fields)


def judge(**fields):
    return Stage("judge", "judge", ["prompt", "completion"], ["quality"], **fields)


def judged(folder, texts):
    """Storage and results of judging these completions one by one, in one call."""
    storage = stored(folder, texts)
    (results,) = run_stage(folder, storage, judge(), [[(row,) for row in storage.rows]])
    assert [result.row_id for result in results] == [*storage.rows]
    return storage, results


def test_a_number_is_computed_from_prompt_and_completion_and_written(folder):
    storage, results = judged(folder, ["a cat", "drop", "a dog", "cat"])
    assert [result.reason for result in results] == ["", "too_bad", "", ""]
    assert [result.numbers for result in results[::2]] == [{"quality": 1.0}, {"quality": 0.0}]
    assert all((result.status, result.error) == (OK, "") for result in results)
    assert results[1].numbers == {}
    assert storage.writes == [([0, 2, 3], ["quality"])]
    assert storage.rows[0]["quality"].tolist() == [1.0]
    assert storage.rows[0]["quality"].dtype == np.float64


# completion -> how its call fails and what the error says; nothing: it does not fail
HOSTILE = {
    "raise": (RAISED, "judge: Traceback (most recent call last):\n"),
    "exit": (RAISED, "SystemExit: 3"),
    "leave": (RAISED, "the stage judge process ended by itself (exit code 7)"),
    "nan": (INVALID, "what stage judge returns must be a finite number for quality, got nan"),
    "none": (INVALID, "got None"),
    "huge": (INVALID, "got [1, 1, 1, 1, 1, 1, ...]"),
}


def test_each_kind_of_failure_has_its_error_and_writes_nothing_and_the_others_go_on(folder):
    texts = [text for hostile in HOSTILE for text in (hostile, "a cat")]
    storage, results = judged(folder, texts)
    for text, result in zip(HOSTILE, results[::2], strict=True):
        status, error = HOSTILE[text]
        assert (text, result.status) == (text, status)
        assert error in result.error
        assert result.error.startswith("on the prompt of line 7 ('what?'):\n")
        assert len(result.error) < 1000
        assert "quality" not in storage.rows[result.row_id]
    assert all(result.numbers == {"quality": 1.0} for result in results[1::2])
    raised = results[0].error
    assert 'File "task.py", line 7, in judge\n    raise LookupError' in raised
    assert "stage_function" not in raised


def test_a_call_that_hangs_is_ended_and_holds_up_no_call_of_the_other_processes(folder):
    storage = stored(folder, ["hang", *["a cat"] * 3])

    async def work(executor):
        hanging = asyncio.create_task(executor.process([((0,), PROMPT)]))
        start_s = time.monotonic()
        await asyncio.sleep(0.1)
        others = [(await executor.process([((row,), PROMPT)]))[0] for row in (1, 2, 3)]
        took_s = time.monotonic() - start_s
        return (await hanging)[0], others, took_s

    stage = judge(workers=2, timeout_s=1.5)
    hung, others, took_s = with_stage(folder, storage, stage, work)
    assert (hung.status, hung.numbers) == (HUNG, {})
    assert (
        "each stage judge call must end within 1.5 s (its timeout_s), got no answer" in hung.error
    )
    assert 'File "task.py", line 9 in judge' in hung.error
    assert "stage_function" not in hung.error
    assert [result.status for result in others] == [OK] * 3
    assert took_s < 1.4


def test_calls_that_wait_when_the_stage_is_closed_end_without_a_warning(folder, caplog):
    storage = stored(folder, ["hang", "a cat"])

    async def work(executor):
        calls = [asyncio.create_task(executor.process([((row,), PROMPT)])) for row in (0, 1)]
        await asyncio.sleep(0.1)
        await executor.close()
        return await asyncio.gather(*calls, return_exceptions=True)

    ended = with_stage(folder, storage, judge(), work)
    assert [str(error) for error in ended] == [
        "the stage judge pool was closed while it worked"
    ] * 2
    assert caplog.text == ""


def test_a_filter_drops_with_a_reason_and_writes_nothing(folder):
    storage = stored(folder, ["short", "quite a long one"])
    stage = Stage("brief", "brief", ["completion"])
    ((kept, dropped),) = run_stage(folder, storage, stage, [[(0,), (1,)]])
    assert (kept.status, kept.reason) == (OK, "")
    assert (dropped.status, dropped.reason) == (OK, "rambling")
    assert storage.writes == []


def test_columns_per_token_are_written_together_in_their_dtypes(folder):
    storage = stored(folder, ["abc", "wrong", "", "z" * 60_000], rewards=[2.0, 1.0, 0.0, 0.5])
    for row_id, row in storage.rows.items():
        logprobs = np.linspace(-2, 0, len(row[RESPONSE_IDS]), dtype=np.float32)
        storage.put({row_id: {GENERATOR_LOGPROBS: logprobs}})
    columns = [
        Column("weights", "float32", "response"),
        Column("ranks", "int64", "response"),
        "length",
    ]
    reads = ["completion", RESPONSE_IDS, GENERATOR_LOGPROBS, REWARD]
    stage = Stage("weigh", "weigh", reads, columns)
    ((first, wrong, empty, long),) = run_stage(folder, storage, stage, [[(0,), (1,), (2,), (3,)]])
    assert [r.status for r in (first, wrong, long)] == [OK, INVALID, OK]
    assert "must be a tuple with an entry for each of weights, ranks, length" in wrong.error
    assert empty.status is INVALID
    assert "be 0 numbers for weights, one per response token, got 1" in empty.error
    assert (first.numbers, long.numbers) == ({"length": 3.0}, {"length": 60_000.0})
    assert storage.writes == [([0, 3], ["length", "ranks", "weights"])]
    for row_id in (0, 3):
        row = storage.rows[row_id]
        assert row["ranks"].dtype == np.int64
        np.testing.assert_array_equal(row["ranks"], row[RESPONSE_IDS])
        expected = row[RESPONSE_IDS] * row[REWARD] + row[GENERATOR_LOGPROBS].astype(np.float64)
        expected[0] = np.nan
        assert row["weights"].dtype == np.float32
        np.testing.assert_array_equal(row["weights"], expected.astype(np.float32))


def test_a_group_is_one_call_whose_rollouts_are_dropped_or_written_each(folder):
    storage = stored(folder, "abcdefgh", rewards=[1, 3, 2, 99, 1, 2, -5, 1])
    stage = Stage("rank", "rank", ["prompt", REWARD, RESPONSE_IDS], ["ranked"], per="group")
    (results,) = run_stage(folder, storage, stage, [[(0, 1, 2), (3, 4, 5), (7, 6)]])
    assert [result.row_id for result in results] == [0, 1, 2, 3, 4, 5, 7, 6]
    assert [result.numbers.get("ranked") for result in results] == [
        *(0, 2 / 3, 1 / 3),
        *(None, 1, 2),
        *(None, None),
    ]
    assert [result.reason for result in results] == ["", "", "", "greedy", "", "", "", ""]
    assert [result.status for result in results] == [OK] * 6 + [RAISED] * 2
    assert all("ArithmeticError: hopeless" in result.error for result in results[6:])
    assert storage.writes == [([0, 1, 2, 4, 5], ["ranked"])]


def test_too_many_failed_calls_end_the_run_and_a_failed_group_is_one_of_them(folder, caplog):
    storage = stored(folder, "abc", rewards=[-1, -1, 1])
    fields = {"per": "group", "max_failure_rate": 0.1}
    stage = Stage("rank", "rank", ["prompt", REWARD, RESPONSE_IDS], ["ranked"], **fields)

    async def work(executor):
        good = [((2,), PROMPT)]
        for _ in range(44):
            await executor.process(good)
            await storage.erase([2], ["ranked"])
        await executor.process([((0, 1), PROMPT)] * 5)
        with pytest.raises(UserCodeError) as error:
            await executor.process([((0, 1), PROMPT)])
        return str(error.value)

    with caplog.at_level(logging.WARNING):
        error = with_stage(folder, storage, stage, work)
    assert error.startswith(
        "at most 10% of stage rank calls may fail (its max_failure_rate), got 6 of the "
        "last 50 (6 raised, 0 hung, 0 invalid); the last one:\non the prompt of line 7"
    )
    assert caplog.text.count("stage rank of row 0: raised: ") == 1


def test_a_stage_whose_function_does_not_load_ends_the_start_in_one_line(folder, tmp_path):
    source = "import nowhere\n" + TASK
    for task_source, must in ((source, "stage judge must load, got"), (TASK, "folder must exist")):
        where = str(tmp_path / "none") if task_source is TASK else folder
        with pytest.raises(ValueError, match=must) as error:
            run_stage(where, WatchedStorage(), judge(), [], task_source=task_source)
        assert "\n" not in str(error.value)


def test_the_processes_of_a_stage_load_no_torch_and_no_tokenizer_unless_they_must(folder, tmp_path):
    storage = stored(folder, ["a"], rewards=[1.0])
    stage = Stage("heavy", "heavy", [REWARD], ["loaded"])
    ((result,),) = run_stage(str(tmp_path / "none"), storage, stage, [[(0,)]])
    assert result.numbers == {"loaded": 0.0}


def test_a_stage_records_when_it_worked_and_when_it_waited(folder, tmp_path):
    storage = stored(folder, ["short"] * 4)
    spans = Spans("brief-0", tmp_path)
    stage = Stage("brief", "brief", ["completion"])
    run_stage(folder, storage, stage, [[(0,), (1,)], [(2,), (3,)]], spans=spans)
    spans.close()
    lines = read_lines(tmp_path / "brief-0.jsonl")
    lines = [line for line in lines if line.get("cat") in ("busy", "wait")]
    assert [(line["name"], line.get("rows")) for line in lines] == [
        ("rollouts", None),
        ("brief", 2),
    ] * 2
    assert all(a["end_ns"] == b["start_ns"] for a, b in pairwise(lines))
