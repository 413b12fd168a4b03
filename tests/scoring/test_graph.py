"""The dataflow graph: what a recipe may add to it, and each mistake's line."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.core.config import Config
from llamarl.scoring.stages import FrozenModel, Graph, Stage, make_graph
from llamarl.storage.columns import Column
from tests.fakes import nothing
from tests.places import RECIPE
from tests.recipe.composing import compose_recipe


def recipe(*overrides: str) -> Config:
    return compose_recipe(RECIPE, overrides)


def rewards(*columns: str) -> str:
    return f"algorithm.reward_columns=[{','.join(columns)}]"


LOGPROBS = Column("teacher_logprobs", "float32", "response")


def graph(*own: Stage, overrides: tuple[str, ...] = ()) -> Graph:
    return make_graph(recipe(*overrides), own)


def test_the_shipped_graph_scores_what_was_generated_and_settles_last() -> None:
    found = graph()
    assert list(found.stages) == ["generate", "score", "settle", "train"]
    assert found.needs["settle"] == {"generate", "score"}


def test_a_kl_term_adds_a_frozen_model_that_runs_beside_scoring() -> None:
    found = graph(overrides=("algorithm.kl_coefficient=0.1",))
    assert found.needs["infer"] == {"generate"}
    assert found.needs["settle"] == {"generate", "score", "infer"}
    assert ("infer", "train", ("ref_logprobs",)) in list(found.edges)


def test_a_stage_follows_those_it_reads_from() -> None:
    judge = Stage("judge", nothing, ["prompt", "completion"], ["quality"])
    rank = Stage("rank", nothing, ["reward", "quality"], ["ranked"], per="group")
    found = graph(rank, judge, overrides=(rewards("ranked"),))
    assert found.needs["rank"] == {"generate", "score", "judge"}
    assert list(found.stages).index("judge") < list(found.stages).index("rank")
    assert ("rank", "settle", ("ranked",)) in list(found.edges)
    assert [stage.name for stage in found.between] == ["score", "judge", "rank"]


def test_settle_waits_for_a_filter_although_it_writes_nothing() -> None:
    assert "short" in graph(Stage("short", nothing, ["completion"])).needs["settle"]


def test_the_loss_may_read_a_column_of_a_teacher() -> None:
    teacher = Stage("teacher", FrozenModel("../teacher"), writes=[LOGPROBS])
    found = graph(
        teacher, overrides=("algorithm=task", "algorithm.loss_columns=[teacher_logprobs]")
    )
    assert teacher.is_model
    assert "teacher" in found.needs["settle"]
    assert ("teacher", "train", ("teacher_logprobs",)) in list(found.edges)


def test_a_stage_travels_by_pickle() -> None:
    stage = Stage("judge", "judge", ["completion"], ["quality"])
    assert pickle.loads(pickle.dumps(stage)) == stage


def own(name: str = "a", reads: Sequence[str] = (), writes: Sequence[Any] = ("x",)) -> Stage:
    return Stage(name, nothing, [*reads], [*writes])


def frozen(*writes: Any, **more: Any) -> Stage:
    return Stage("a", FrozenModel("m"), [], [*writes], **more)


def columns_in_loss(*names: str) -> tuple[str, ...]:
    return "algorithm=task", f"algorithm.loss_columns=[{','.join(names)}]"


CIRCLE = "stages must not wait for each other in a circle, got "
OWN_NAME = "the name of each stage must be its own, and no executor's, got "
X, LOSS = (rewards("x"),), columns_in_loss("teacher_logprobs")
MISTAKES = [
    (f"{CIRCLE}a -> b -> a", [own(reads="y"), own("b", "x", "y")], (rewards("reward"),)),
    (f"{CIRCLE}settle -> a -> settle", [own(reads=["advantage"])], X),
    ("reads of stage a must name columns that some stage writes", [own(reads=["qualty"])], X),
    ("reads of stage a must name .* of each rollout", [own(reads=["completion_text"])], X),
    ("column x must be written by one stage, got 'a and b'", [own(), own("b")], X),
    ("column reward must be .*, got 'score and a'", [own(writes=["reward"])], ()),
    ("stage a must write a column that another stage", [own()], ()),
    (f"{OWN_NAME}'score'", [own("score", writes=())], ()),
    (f"{OWN_NAME}'trainer'", [own("trainer", writes=())], ()),
    (f"{OWN_NAME}'a'", [own(writes=()), own(writes=())], ()),
    ("algorithm.reward_columns must name columns that some stage writes", [], X),
    (
        'algorithm.reward_columns must name columns of length "number"',
        [own(writes=[Column("x", "float32", "response")])],
        X,
    ),
    (
        'algorithm.loss_columns must name columns of length "response"',
        [own()],
        columns_in_loss("x"),
    ),
    (
        "column ref_logprobs of stage a must have the form float32, response",
        [own(writes=[Column("ref_logprobs", "int32", "response")])],
        (),
    ),
    ('column x must have the length "number"', [own(writes=[Column("x", "int32", "fixed")])], ()),
    ("algorithm.loss_columns must be empty unless", [own(writes=[LOGPROBS])], LOSS[1:]),
    ('stage a must write one Column\\(name, "float32", "response"\\)', [frozen("x")], ()),
    ('stage a must have per="rollout"', [frozen(LOGPROBS, per="group")], LOSS),
]


@pytest.mark.parametrize(("line", "stages", "overrides"), MISTAKES)
def test_each_wrong_graph_is_named_in_one_line(
    line: str, stages: list[Stage], overrides: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError, match=f"^{line}[^\n]*$"):
        graph(*stages, overrides=overrides)


WRONG_FIELDS: dict[str, dict[str, Any]] = {
    "the name of a stage must be": {"name": "My Stage"},
    "reads of stage a must be a list of names": {"reads": "completion"},
    "writes of stage a must be a list of names and Columns": {"writes": [3]},
    'per of stage a must be "rollout" or "group"': {"per": "batch"},
    "workers of stage a must be 1 to 1024": {"workers": 0},
    "timeout_s of stage a must be": {"timeout_s": 0},
    "max_failure_rate of stage a must be 0 to 1": {"max_failure_rate": 2},
    "the name of a column must be": {"writes": ["A b"]},
}


@pytest.mark.parametrize("line", WRONG_FIELDS)
def test_each_wrong_field_of_a_stage_is_named(line: str) -> None:
    with pytest.raises(ValueError, match=f"^{line}"):
        Stage(**{"name": "a", "run": nothing, **WRONG_FIELDS[line]})


@given(
    st.permutations(range(6)),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12),
)
def test_a_graph_without_circle_is_ordered_and_any_other_is_refused(
    order: list[int], pairs: list[tuple[int, int]]
) -> None:
    reads: dict[int, set[int]] = {number: set() for number in order}
    for reader, writer in pairs:
        reads[reader].add(writer)
    own = [
        Stage(
            f"s{number}", nothing, [f"c{other}" for other in sorted(reads[number])], [f"c{number}"]
        )
        for number in order
    ]
    if any(number in _reached(reads, number) for number in order):
        with pytest.raises(ValueError, match="in a circle"):
            make_graph(SIX_COLUMNS, own)
        return
    names = list(make_graph(SIX_COLUMNS, own).stages)
    for number in order:
        assert all(names.index(f"s{other}") < names.index(f"s{number}") for other in reads[number])


def _reached(reads: dict[int, set[int]], start: int) -> set[int]:
    found: set[int] = set()
    waiting = [start]
    while waiting:
        new = reads[waiting.pop()] - found
        found |= new
        waiting += new
    return found


SIX_COLUMNS = recipe(
    rewards(*(f"c{number}" for number in range(6))),
    "algorithm.reward_column_weights=[1,1,1,1,1,1]",
)
