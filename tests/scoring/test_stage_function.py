"""What a stage's function gets and may return: all of it, without a process."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from llamarl.core.records import Prompt, StageStatus
from llamarl.scoring.stage_function import answer, run_now
from llamarl.scoring.stages import Drop, Stage
from llamarl.storage.columns import Column

FLOATS, INTS = Column("floats", "float32", "response"), Column("ints", "int32", "response")
PROMPT = Prompt(prompt_id=1, text="q", token_ids=())


def returned(found: Any, *writes: str | Column, lengths: tuple[int, ...] = (3,)) -> Any:
    """What is answered when a function returns `found`; several lengths make it a group's."""
    per = "rollout" if len(lengths) == 1 else "group"
    stage = Stage("one", "one", writes=list(writes), per=per)
    answered = run_now(answer(lambda: found, stage, None, [], lengths))
    return json.loads(json.dumps(answered)).get("rows", answered)


def test_a_function_gets_its_reads_in_order_and_a_group_gets_lists() -> None:
    got: list[Any] = []
    for per, columns in (("rollout", [None, 2.5]), ("group", [[None, None], [2.5, 3.5]])):
        stage = Stage("one", "one", reads=["prompt", "reward"], per=per)
        lengths = [1] if per == "rollout" else [1, 1]
        run_now(answer(lambda *given: got.append(given), stage, PROMPT, columns, lengths))
    assert got == [(PROMPT, 2.5), ([PROMPT, PROMPT], [2.5, 3.5])]


@pytest.mark.parametrize(
    ("found", "writes", "rows"),
    [
        (None, (), [[]]),
        (Drop("too_long"), (), ["too_long"]),
        (Drop("too_long"), ("a", "b"), ["too_long"]),
        (True, ("a",), [[1.0]]),
        (np.float32(0.5), ("a",), [[0.5]]),
        ((1, [1, 2, 3]), ("a", FLOATS), [[1.0, [1.0, 2.0, 3.0]]]),
        ((1, Drop("odd")), ("a", FLOATS), ["odd"]),
        ((0.1, 1, 2), (FLOATS,), [[[np.float32(0.1).item(), 1.0, 2.0]]]),
        (np.arange(3, dtype=np.int8), (FLOATS,), [[[0.0, 1.0, 2.0]]]),
        (torch.tensor([1.0, 2.0, 3.0]), (INTS,), [[[1, 2, 3]]]),
        ([True, False, True], (INTS,), [[[1, 0, 1]]]),
    ],
)
def test_one_rollout(found: Any, writes: tuple[str | Column, ...], rows: list[Any]) -> None:
    assert returned(found, *writes) == rows


def test_nan_and_infinity_pass_in_a_column_per_token() -> None:
    ((values,),) = returned([math.nan, math.inf, -math.inf], FLOATS)
    np.testing.assert_array_equal(values, [math.nan, math.inf, -math.inf])


@pytest.mark.parametrize(
    ("found", "writes", "rows"),
    [
        (None, (), [[], []]),
        ([None, Drop("odd")], (), [[], "odd"]),
        (Drop("all"), ("a", "b"), ["all", "all"]),
        ([0.5, Drop("odd")], ("a",), [[0.5], "odd"]),
        (np.array([1, 2]), ("a",), [[1.0], [2.0]]),
        (([1, 2], [[1, 2, 3], []]), ("a", FLOATS), [[1.0, [1.0, 2.0, 3.0]], [2.0, []]]),
        (([1, 2], (Drop("odd"), [])), ("a", FLOATS), ["odd", [2.0, []]]),
    ],
)
def test_a_group(found: Any, writes: tuple[str | Column, ...], rows: list[Any]) -> None:
    assert returned(found, *writes, lengths=(3, 0)) == rows


@pytest.mark.parametrize(
    ("found", "writes", "lengths", "must"),
    [
        (False, (), (3,), "be None or a Drop, for the stage writes nothing, got False"),
        (None, ("a",), (3,), "be a finite number for a, got None"),
        ("1", ("a",), (3,), "be a finite number for a, got '1'"),
        (math.inf, ("a",), (3,), "be a finite number for a, got inf"),
        (Drop, ("a",), (3,), "be a finite number for a, got <class"),
        ([1.0, 2.0], ("a", "b"), (3,), "be a tuple with an entry for each of a, b, got [1.0, 2.0]"),
        ((1.0,), ("a", "b"), (3,), "be a tuple with an entry for each of a, b, got (1.0,)"),
        (Drop("Odd"), (), (3,), "drop for a reason of up to 40 small letters, digits and _, got"),
        (Drop("x" * 41), (), (3,), "drop for a reason of up to 40"),
        (Drop(None), (), (3,), "drop for a reason of up to 40"),  # type: ignore[arg-type]
        (1.0, (FLOATS,), (3,), "be 3 numbers for floats, one per response token, got 1.0"),
        ([1.0], (FLOATS,), (3,), "be 3 numbers for floats, one per response token, got 1"),
        ("abc", (FLOATS,), (3,), "one per response token, got 'abc'"),
        (["a"] * 3, (FLOATS,), (3,), "one per response token, got ['a', 'a', 'a']"),
        ([[1], [2], [3]], (FLOATS,), (3,), "one per response token, got [[1], [2], [3]]"),
        ([[1], [], []], (FLOATS,), (3,), "one per response token, got [[1], [], []]"),
        ([None] * 3, (FLOATS,), (3,), "one per response token, got [None"),
        ([10**400] * 3, (FLOATS,), (3,), "one per response token, got [1000"),
        (iter([1, 2, 3]), (FLOATS,), (3,), "one per response token, got <list_itera"),
        ([1, 2, 1e300], (FLOATS,), (3,), "be numbers of float32 for floats, got [1, 2, 1e+300]"),
        ([1, 2, 0.5], (INTS,), (3,), "be numbers of int32 for ints, got [1, 2, 0.5]"),
        ([1, 2, 2**31], (INTS,), (3,), "be numbers of int32 for ints, got [1, 2, 2147483648]"),
        ([1, 2, math.nan], (INTS,), (3,), "be numbers of int32 for ints, got [1, 2, nan]"),
        ([1.0], ("a",), (3, 3), "have one entry per rollout (2), got [1.0]"),
        (1.0, ("a",), (3, 3), "have one entry per rollout (2), got 1.0"),
        ([1.0, None], ("a",), (3, 3), "be a finite number for a, got None"),
        ([None, 1], (), (3, 3), "be None or a Drop"),
        (([1, 2], [3]), ("a", "b"), (3, 3), "have one entry per rollout (2), got [3]"),
    ],
)
def test_what_else_is_returned_is_invalid_and_says_what_it_must_be(
    found: Any, writes: tuple[str | Column, ...], lengths: tuple[int, ...], must: str
) -> None:
    answered = returned(found, *writes, lengths=lengths)
    assert answered["status"] == StageStatus.INVALID
    assert answered["error"].startswith("what stage one returns must ")
    assert must in answered["error"]
    assert len(answered["error"].splitlines()) == 1


def test_a_value_that_raises_when_it_is_read_is_a_failure_of_the_function() -> None:
    class Liar(float):
        def __float__(self) -> float:
            raise OSError("no float")

    answered = returned(Liar(1), "a")
    assert answered["status"] == StageStatus.RAISED
    assert answered["error"].endswith("OSError: no float")
    assert "OverflowError" in returned(10**400, "a")["error"]
