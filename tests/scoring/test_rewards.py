"""Reward functions: what they give, what of that is a reward, and what is refused at the start."""

import asyncio
import json
import math
import subprocess
import sys
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from llamarl.core.config import RewardConfig
from llamarl.core.extensions import FILE
from llamarl.core.records import EXTRA, FINISH_CODES, FinishReason, Prompt, StageStatus
from llamarl.scoring import math_reward
from llamarl.scoring.reward_functions import normal_form, reward_exact, reward_format
from llamarl.scoring.rewards import (
    ANSWER,
    NO_ANSWER,
    check_answer,
    check_pattern,
    load_functions,
    make_score,
)
from llamarl.scoring.stage_function import answer, run_now
from llamarl.scoring.stages import SCORE, Stage
from llamarl.storage.columns import TEXT, Column

CONFIG = RewardConfig(functions=["exact"])
OTHERS = Column(EXTRA, "uint8", TEXT)
STOPPED = [1.0, 0, 1.0, 64, 7, FINISH_CODES[FinishReason.STOP]]


def grade(functions, prompt, completion):
    """What the service answers for the stage `score` with these functions."""
    names = [name for name in functions if name != ANSWER]
    config = RewardConfig(functions=names, weights=[0.5] * len(names))
    reads, writes = ["prompt", "completion", "sampling"], ["reward", *names, ANSWER, OTHERS]
    stage = Stage(SCORE, "x", reads, writes)
    score = make_score(functions, config)
    return read(run_now(answer(score, stage, prompt, [None, completion, STOPPED], [1])))


def read(answered):
    """The answer with the further numbers of rewards read, or left out where there are none."""
    for row in answered.get("rows", ()):
        others = json.loads(row.pop())
        row += [others] * bool(others)
    return answered


def prompt(**fields):
    return Prompt(prompt_id=3, text="q", token_ids=(1,), fields=fields)


@pytest.mark.parametrize(
    "spellings",
    [
        ("42", " 42 ", "42.0", "42.", "+42", "$42", "042", "4.2e1"),
        ("1,234.5", "1234.50", "$1,234.5", "1234.5"),
        ("-7", "-7.0", "-$7"),
        ("0", "-0", "0.0", ".0"),
        ("0.5", ".5", "0.50", "5e-1"),
        ("a b", " a\n b "),
        ("123456789012345678901234567890123", "123456789012345678901234567890123.0"),
    ],
)
def test_spellings_of_one_answer_have_one_normal_form(spellings):
    assert len({normal_form(spelling) for spelling in spellings}) == 1


def test_different_answers_keep_different_normal_forms():
    answers = ["42", "-42", "4.2", "420", "42 a", "1,23", "123", "a", "A", "1/2", "0.5", "50%"]
    answers += ["123456789012345678901234567890123", "123456789012345678901234567890124"]
    assert len({normal_form(answer) for answer in answers}) == len(answers)


@pytest.mark.parametrize(
    ("answer", "completion", "finished", "expected"),
    [
        ("42", "6*7=42. Answer: 42", True, 1.0),
        ("42", "6*7=42. Answer: 42", False, 0.0),
        ("42", "Answer: 41. Answer: 42", True, 1.0),
        ("42", "Answer: 42. Answer: 41", True, 0.0),
        ("42", "6*7=42", True, 0.0),
        ("42", "Answer: 42 or 43", True, 0.0),
        (42, "Answer: 42", True, 1.0),
        ("so 40+2=42\n#### 42", "Answer: 42\n", True, 1.0),
        ("1,234", "Answer: 1234", True, 1.0),
        ("42", "", True, 0.0),
    ],
)
def test_exact_compares_the_answer_the_pattern_finds(answer, completion, finished, expected):
    assert reward_exact(prompt(answer=answer), completion, finished, CONFIG) == expected


def test_exact_and_format_ask_for_the_pattern_and_an_end_unless_it_is_not_required():
    for completion, finished, expected in (("a", True, 0), ("Answer: a", True, 1)):
        assert reward_format(prompt(), completion, finished, CONFIG) == expected
    assert reward_format(prompt(), "Answer: a", False, CONFIG) == 0
    config = RewardConfig(functions=["exact"], require_stop=False)
    assert reward_exact(prompt(answer="42"), "Answer: 42", False, config) == 1
    assert reward_format(prompt(), "Answer: 42", False, config) == 1
    config = RewardConfig(functions=["exact"], pattern=r"(\d+)?!")
    assert reward_exact(prompt(answer="None"), "!", True, config) == 0, "its group has no match"


@pytest.mark.parametrize("answer", [None, "", "  ", "####", True, ["42"], {"a": 1}])
@pytest.mark.parametrize("name", ["exact", "math"])
def test_an_unusable_expected_answer_raises_and_is_no_zero(name, answer):
    function = load_functions(RewardConfig(functions=[name]), None)[name]
    with pytest.raises((TypeError, ValueError), match="line 3"):
        function(prompt(answer=answer), "Answer: 42", True, CONFIG)
    with pytest.raises(KeyError, match="line 3: the row must have the field 'answer'"):
        function(prompt(solution="42"), "Answer: 42", True, CONFIG)


@pytest.mark.parametrize("answer", ["1/0", r"\frac{1}{0}", "3/00", float("nan"), float("inf")])
def test_an_expected_answer_without_a_finite_value_is_refused_at_the_start(answer):
    with pytest.raises(ValueError, match=r"'answer' must (have|be) a finite"):
        check_answer(RewardConfig(functions=["math"]), prompt(answer=answer))
    with pytest.raises(ValueError, match="finite"):
        math_reward.reward(prompt(answer=answer), "1", CONFIG)


VOTE = (
    "def reward(prompt, completion):\n    return 1.0\n"
    "def majority_answer(prompt, completion):\n    return completion[-1]\n"
)


@pytest.mark.parametrize(
    ("name", "alike", "other", "silent"),
    [
        ("exact", ["so Answer: 1,000", "Answer: 1000.0"], "Answer: 10", "no idea"),
        ("math", ["it is $\\frac{1}{2}$", "$0.5$", "1/2"], "$0.25$", "no idea"),
        ("task", ["it is 4", "now 4"], "it is 5", None),
    ],
)
def test_equal_answers_of_held_out_rollouts_have_equal_numbers(name, alike, other, silent):
    functions = load_functions(RewardConfig(functions=[name]), {FILE: VOTE})

    def number(completion, held_out="test"):
        asked = replace(prompt(answer="4"), held_out=held_out)
        return grade(functions, asked, completion)["rows"][0][-1]

    assert len({number(completion) for completion in alike}) == 1
    assert number(alike[0]) >= 0
    assert number(alike[0]) != number(other)
    assert silent is None or number(silent) == NO_ANSWER
    assert number(alike[0], held_out="") == NO_ANSWER, "training pays nothing for it"


def test_a_first_function_without_answers_has_none():
    functions = load_functions(RewardConfig(functions=["format", "exact"], weights=[1, 1]), None)
    assert ANSWER not in functions


GROUP_TASK = """
import asyncio
calls = []

def reward(prompt, completion):
    return len(completion)

def group_reward(prompt, completions):
    calls.append(completions)
    longest = max(map(len, completions))
    return [len(each) == longest for each in completions]
"""


def grade_group(source, functions, completions, of_episodes=(), is_async=False):
    """What the service answers for a group with these functions of the task, weighted 10, 1, ..."""
    weights = [10.0 / 10**i for i in range(len(functions))]
    config = RewardConfig(functions=functions, weights=weights)
    score = make_score(load_functions(config, {FILE: source}), config)
    reads = ["prompt", "completion", "sampling", *(["episode_reward"] * bool(of_episodes))]
    stage = Stage(SCORE, "x", reads, ["reward", *functions, ANSWER, OTHERS], per="group")
    count = len(completions)
    columns = [[None] * count, completions, [STOPPED] * count, *([of_episodes] * bool(of_episodes))]
    answering = answer(score, stage, prompt(word="a"), columns, [1] * count)
    return read(asyncio.run(answering) if is_async else run_now(answering))


def test_a_group_reward_sees_all_completions_of_a_prompt_beside_rewards_of_each():
    got = grade_group(GROUP_TASK, ["group", "task"], ["aa", "a", "bb"])
    assert got == {"rows": [[12.0, 1.0, 2.0, -1.0], [1.0, 0.0, 1.0, -1.0], [12.0, 1.0, 2.0, -1.0]]}
    assert sys.modules["task"].calls == [["aa", "a", "bb"]]
    got = grade_group(GROUP_TASK, ["environment", "group"], ["aa", "a"], [0.5, 0.25])
    assert got == {"rows": [[6.0, 0.5, 1.0, -1.0], [2.5, 0.25, 0.0, -1.0]]}


def test_group_rewards_and_rewards_of_each_may_be_coroutines_that_run_side_by_side():
    met = GROUP_TASK.replace("def ", "async def ").replace(
        "    return len", "    await meet()\n    return len"
    )
    met += "\nall_there = asyncio.Barrier(2)\n"
    met += "async def meet():\n    await asyncio.wait_for(all_there.wait(), 60)\n"
    got = grade_group(met, ["group", "task"], ["aa", "a"], is_async=True)
    assert got["rows"] == [[12.0, 1.0, 2.0, -1.0], [1.0, 0.0, 1.0, -1.0]]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ("[1, 2, 3]", "return one number, or a dict with 'score', per completion (2), got [1, 2,"),
        ("0.5", "return one number, or a dict with 'score', per completion (2), got 0.5"),
        ("{'score': 1}", "per completion (2), got {'score': 1}"),
        ("[1, float('nan')]", "return a finite number, at most 1e+09 either way, got nan"),
        ("[1, None]", "return a number or a dict with 'score', which is one, got None"),
        ("[1, {'scores': 2}]", "return a number or a dict with 'score', which is one, got {'sc"),
    ],
)
def test_what_is_no_number_for_each_completion_is_invalid(found, message):
    source = f"def group_reward(prompt, completions):\n    return {found}\n"
    got = grade_group(source, ["group"], ["a", "b"])
    assert got["status"] == StageStatus.INVALID
    assert got["error"].startswith("group_reward in task.py must ")
    assert message in got["error"]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_reward_may_be_a_dict_of_its_score_and_further_numbers(is_async):
    source = (
        "import numpy as np\n"
        "def reward(prompt, completion):\n"
        "    return {'score': 2, 'acc': True, 'words': np.float32(3), 'pred': 'x', 'none': None,\n"
        "            'nan': float('nan'), 'rows': [1], 'more': {'a': 1}, 'huge': 10**400,\n"
        "            'right': np.bool_(True), 'share': np.array(0.5)}\n"
        "def group_reward(prompt, completions):\n"
        "    return [{'score': 0.5, 'place': i} if i else 0.25 for i in range(len(completions))]\n"
    )
    source = source.replace("def ", "async def ") if is_async else source
    got = grade_group(source, ["task", "group"], ["a", "b"], is_async=is_async)
    each = {"acc": 1.0, "words": 3.0, "right": 1.0, "share": 0.5}
    assert got["rows"] == [
        [20.25, 2.0, 0.25, -1.0, each],
        [20.5, 2.0, 0.5, -1.0, each | {"place": 1.0}],
    ]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ("{'acc': 1}", "return a number or a dict with 'score', which is one, got {'acc': 1}"),
        ("{'score': 'high'}", "return a number or a dict with 'score', which is one, got {'score"),
        ("{'score': float('inf')}", "return a finite number, at most 1e+09 either way, got {'sc"),
        ("{'score': 1, 2: 3}", "name its numbers by texts of up to 100 characters, got 2"),
        ("{'score': 1, 'a\\n': 3}", "name its numbers by texts of up to 100 characters, got 'a"),
        ("{'score': 1, '\\ud800': 3}", "name its numbers by texts of up to 100 characters, got"),
        ("{'score': 1, **{str(i): i for i in range(65)}}", "return at most 64 numbers besides"),
    ],
)
def test_a_dict_that_is_no_reward_is_refused_in_one_plain_line(found, message):
    source = f"def reward(prompt, completion):\n    return {found}\n"
    got = grade(load_functions(RewardConfig(functions=["task"]), {FILE: source}), prompt(), "")
    assert got["status"] is StageStatus.INVALID
    assert got["error"].startswith(f"reward in task.py must {message}")
    assert "\n" not in got["error"]


def test_a_reward_may_return_a_coroutine_that_returns_one():
    source = "async def inner(): return 2\nasync def outer(): return inner()\n"
    source += "async def reward(prompt, completion): return outer()\n"
    source += "async def group_reward(prompt, completions): return [1]\n"
    got = grade_group(source, ["task", "group"], ["a"], is_async=True)
    assert got["rows"] == [[21.0, 2.0, 1.0, -1.0]]


def test_two_rewards_may_not_give_numbers_of_one_name():
    source = "def reward(prompt, completion):\n    return {'score': 1, 'acc': 1}\n"
    source += "def group_reward(prompt, completions):\n    return [{'score': 1, 'acc': 1}]\n"
    got = grade_group(source, ["task", "group"], ["a"])
    assert got["error"].endswith(
        "give numbers that no other reward function gives, got 'acc' again"
    )


@pytest.mark.parametrize("is_async", [False, True])
def test_one_failure_is_that_of_the_group(is_async):
    source = GROUP_TASK.replace("return len(completion)", "return 1 / (len(completion) - 1)")
    if is_async:
        source = source.replace("def ", "async def ")
    got = grade_group(source, ["group", "task"], ["aa", "a"], is_async=is_async)
    assert got["status"] == StageStatus.RAISED
    assert "ZeroDivisionError" in got["error"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(True, 1), (2, 2), (np.float32(0.5), 0.5), (np.int64(3), 3), (Fraction(1, 4), 0.25)]
    + [(np.bool_(True), 1), (np.array(0.5), 0.5), (torch.tensor(2), 2), (Decimal("0.5"), 0.5)],
)
def test_any_real_number_is_a_reward(value, expected):
    found = grade({"f": lambda *_: value}, prompt(), "")
    assert found == {"rows": [[expected / 2, expected, NO_ANSWER]]}


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, None, "1", [1.0], 1j, np.ones(1), 1e300, -3e38]
)
def test_what_is_no_finite_number_is_invalid_and_shown(value):
    found = grade({"f": lambda *_: value}, prompt(), "")
    assert found["status"] is StageStatus.INVALID
    number = "a finite number, at most 1e+09 either way"
    must = number if type(value) is float else "a number or a dict with 'score', which is one"
    assert found["error"] == f"reward f must return {must}, got {value!r}"


@pytest.mark.parametrize("error", [ValueError("oh"), SystemExit(3), KeyboardInterrupt()])
def test_whatever_a_reward_raises_becomes_raised_with_its_traceback(error):
    def fail(*_):
        raise error

    functions = {"good": lambda *_: 1.0, "bad": fail}
    found = grade(functions, prompt(), "")
    assert found["status"] is StageStatus.RAISED
    assert found["error"].startswith("score: Traceback")
    assert "raise error" in found["error"]
    assert type(error).__name__ in found["error"]


def test_a_failure_shows_the_lines_of_the_task_and_none_of_ours():
    source = (
        "def check(text):\n"
        "    return int(text)\n"
        "\n"
        "def reward(prompt, completion):\n"
        "    try:\n"
        "        return check(completion)\n"
        "    except ValueError as error:\n"
        "        raise LookupError('no number') from error\n"
    )
    functions = load_functions(RewardConfig(functions=["task"]), {FILE: source})
    error = grade(functions, prompt(), "x")["error"]
    assert [line.strip() for line in error.splitlines() if "line" in line or "Error:" in line] == [
        'File "task.py", line 6, in reward',
        'File "task.py", line 2, in check',
        "ValueError: invalid literal for int() with base 10: 'x'",
        'File "task.py", line 8, in reward',
        "LookupError: no number",
    ]


SPELLINGS = [
    "<think>(.*)",
    r"\<think\>(.*)",
    r"<(think)>(.*?)</\1>",
    "[<]think[>]",
    r"\[INST\] (.)",
    "(?i)<THINK>(.*)",
    "(?is)<Think>.*",
    r"\x3cthink\x3E(.*)",
    r"\u003cthink>(.*)",
]


@pytest.mark.parametrize("pattern", SPELLINGS)
def test_a_pattern_that_asks_for_a_special_token_is_refused(pattern):
    with pytest.raises(ValueError, match=r"reward\.pattern must hold no special token"):
        check_pattern(RewardConfig(functions=["format"], pattern=pattern), ["[INST]", "<think>"])
    others = [r"\boxed\{(.+)\}", "<answer>(.*?)</answer>", "<[^>]+>(.*)", "<thinking>"]
    for other in (*others, "<THINK>(.*)", "(?i)<Answer>(.*)"):
        check_pattern(RewardConfig(functions=["format"], pattern=other), ["[INST]", "<think>"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"solution": "1"}, "must have the field 'answer'.* got 'solution'"),
        ({}, "must have the field 'answer'.* got no field"),
        ({"answer": None}, "must be text or a number, got NoneType"),
        ({"answer": ""}, "must hold an answer, got ''"),
    ],
)
@pytest.mark.parametrize("name", ["exact", "math"])
def test_a_prompt_without_an_answer_is_named_before_the_run(name, fields, message):
    config = RewardConfig(functions=["format", name], weights=[1.0, 1.0])
    check_answer(config, prompt(answer=1))
    with pytest.raises(ValueError, match=message) as error:
        check_answer(config, prompt(**fields))
    assert "\n" not in str(error.value)
    check_answer(RewardConfig(functions=["format"]), prompt(**fields))


def test_math_verify_is_loaded_with_the_functions_that_need_it_and_before_their_first_call():
    code = (
        "import sys\n"
        "from llamarl.core.config import RewardConfig\n"
        "from llamarl.scoring.rewards import load_functions\n"
        "for name in ('exact', 'math'):\n"
        "    load_functions(RewardConfig(functions=[name]), None)\n"
        "    assert ('math_verify' in sys.modules) == (name == 'math')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
