"""The list `stages` of a task.py is read in a process of its own; each mistake is one line."""

import os
import re
import sys

import pytest

from llamarl.scoring.stages import FrozenModel, Stage, check_task, load
from llamarl.scoring.user_code.watchdog import descendants
from llamarl.storage.columns import Column

pytestmark = pytest.mark.full

TASK = """from functools import cache, partial
from llamarl.scoring.stages import Column, Drop, FrozenModel, Stage
import json

def brief(completion):
    return Drop("rambling") if len(completion) > 400 else None

def judge(prompt, completion, scale=1.0):
    return float(completion.endswith("."))

@cache
def cached(completion):
    return 1.0

half = partial(judge, scale=0.5)

stages = [
    Stage("brief", brief, reads=["completion"]),
    Stage("judge", judge, reads=["prompt", "completion"], writes=["quality"], workers=2,
          timeout_s=2.5, max_failure_rate=0.5, per="group"),
    Stage("cached", cached, ["completion"], ["a"]),
    Stage("half", half, ["prompt", "completion"], ["b"]),
    Stage("parse", json.loads, ["completion"], ["c"]),
    Stage("teacher", FrozenModel("../teacher"), writes=[Column("logprobs", "float32", "response")]),
    Stage("lambda", lambda completion: 1.0, ["completion"], ["d"]),
]
"""


def test_the_named_stages_come_back_as_data_in_the_order_of_the_names() -> None:
    before = descendants(os.getpid())
    sys.modules.pop("task", None)
    found, _ = check_task({"task.py": TASK}, [], ["teacher", "judge", "brief", "cached", "half"])
    assert found == [
        Stage(
            "teacher", FrozenModel("../teacher"), writes=[Column("logprobs", "float32", "response")]
        ),
        Stage(
            "judge",
            "judge",
            reads=["prompt", "completion"],
            writes=["quality"],
            workers=2,
            timeout_s=2.5,
            max_failure_rate=0.5,
            per="group",
        ),
        Stage("brief", "brief", reads=["completion"]),
        Stage("cached", "cached", ["completion"], ["a"]),
        Stage("half", "half", ["prompt", "completion"], ["b"]),
    ]
    assert "task" not in sys.modules
    assert descendants(os.getpid()) <= before


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nowhere", r"got ModuleNotFoundError: .* \(task\.py, line 1: import nowhere\)"),
        ("import sys\nsys.exit(3)", r"got SystemExit: 3 \(task\.py, line 2: sys\.exit\(3\)\)"),
        ("import os\nos._exit(3)", r"got the task\.py process ended by itself \(exit code 3\)"),
        (
            "from llamarl.scoring.stages import Stage\nstages = [Stage('A', print)]",
            r"got ValueError: the name of a stage must .* \(task\.py, line 2: stages",
        ),
        ("stages = 3", r"^task\.py: stages must be a list of Stage, got 3$"),
    ],
)
def test_a_text_that_gives_no_stages_is_refused_in_one_line(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        check_task({"task.py": source}, [], ["judge"])
    assert str(error.value).startswith("task.py")
    assert len(str(error.value).splitlines()) == 1


HEAD = "from llamarl.scoring.stages import Stage\n"


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("x = 1", "judge", "task.py: stages must be a list of Stage, got none"),
        ("\nstages = [print]", "judge", "task.py: stages must be a list of Stage, got ["),
        (
            TASK,
            "jugde",
            "task.py: experience.stages must name stages of task.py (brief, judge, cached, "
            "half, parse, teacher, lambda), got 'jugde' (did you mean judge?)",
        ),
        ("stages = []", "judge", "(none), got 'judge'"),
        (TASK + "stages.append(stages[0])", "brief", "task.py: stages must have one brief, got 2"),
        (
            TASK,
            "lambda",
            "task.py: stage lambda must run a FrozenModel, External or a function task.py "
            "defines by name at its top level, got the function <lambda>",
        ),
        (TASK, "parse", "at its top level, got the function loads"),
        (
            HEAD
            + "def make():\n  def inner(): pass\n  return inner\nstages = [Stage('a', make())]",
            "a",
            "task.py: stage a must run a FrozenModel, External or a function task.py "
            "defines by name at its top level, got the function make.<locals>.inner",
        ),
        (HEAD + "stages = [Stage('a', 'b')]", "a", "at its top level, got 'b'"),
        (HEAD + "class A: pass\nstages = [Stage('a', A)]", "a", "got <class 'task.A'>"),
        (
            HEAD + "def a(x, y): pass\nstages = [Stage('b', a, ['reward'])]",
            "b",
            "task.py:2: a of stage b must take one argument for each thing that the stage reads "
            "(reward), got a(x, y): missing a required argument: 'y'",
        ),
        (
            HEAD + "def a(x): pass\nstages = [Stage('b', a)]",
            "b",
            "must take one argument for each thing that the stage reads (none), got a(x): missing",
        ),
    ],
)
def test_a_stage_that_cannot_run_is_named_with_its_line(
    source: str, name: str, message: str
) -> None:
    described = load({"task_source": {"task.py": source}})(None, [], [name])
    assert re.search(re.escape(message), described["mistake"]), described
    assert described["mistake"].startswith("task.py")
    assert len(described["mistake"].splitlines()) == 1


def test_only_the_named_stages_are_judged() -> None:
    (stage,) = load({"task_source": {"task.py": TASK}})(None, [], ["brief"])["stages"]
    assert stage["name"] == "brief"
