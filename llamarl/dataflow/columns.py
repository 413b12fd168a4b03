"""The columns of rollouts: what each holds, and how long it is.

Owns: name, dtype and length of every column that the package writes, and the form of those that a
recipe adds. Does not own: arrays (storage units) or who writes which column (`graph.py`).
Invariant: a column has the same dtype and kind of length in every row.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from llamarl.config.check import require
from llamarl.types import (
    CLIPPED,
    EPISODE_REWARD,
    EPISODE_REWARDS,
    GENERATOR_LOGPROBS,
    LOSS_WEIGHTS,
    PROMPT_ID,
    PROMPT_IDS,
    PROXIMAL_LOGPROBS,
    RECORD,
    REF_LOGPROBS,
    RESPONSE_IDS,
    REWARD,
    SAMPLING,
    TOKEN_VERSIONS,
    TRAINER_LOGPROBS,
    TURNS,
)

NUMBER, RESPONSE, PROMPT, FIXED, TEXT = "number", "response", "prompt", "fixed", "text"
LENGTHS = {
    NUMBER: "one number per rollout",
    RESPONSE: "one entry per response token",
    PROMPT: "one entry per prompt token",
    FIXED: "as many entries in each rollout",
    TEXT: "UTF-8, one entry per byte",
}
DTYPES = ("float64", "float32", "int64", "int32", "uint8")
NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


@dataclass(frozen=True, slots=True)
class Column:
    """One kind of array: a 1-D array of `dtype` per rollout, of a `length` in LENGTHS.

    Example: `Column("teacher_logprobs", "float32", "response")`. ValueError for another dtype, or
    a length other than "number" and "response" in a recipe's own column.
    """

    name: str
    dtype: str = "float64"
    length: str = NUMBER

    def __post_init__(self) -> None:
        check_name("a column", self.name)
        where = f"of column {self.name}"
        allowed = f"be one of {', '.join(DTYPES)}"
        require(self.dtype in DTYPES, f"dtype {where}", allowed, self.dtype)
        allowed = f"be {NUMBER} or {RESPONSE}"
        require(self.length in LENGTHS, f"length {where}", allowed, self.length)
        fits = self.length != NUMBER or self.dtype == "float64"
        require(fits, f"dtype {where}", "be float64, for it is a number", self.dtype)


def check_name(of: str, name: object) -> None:
    """ValueError unless a column or stage can have this name, which is part of metrics' names."""
    is_name = isinstance(name, str) and NAME.fullmatch(name) is not None
    must = "be up to 40 small letters, digits and _, with a letter first"
    require(is_name, f"the name of {of}", must, name)


COLUMNS = {
    column.name: column
    for column in (
        Column(PROMPT_IDS, "int32", PROMPT),
        Column(RESPONSE_IDS, "int32", RESPONSE),
        Column(GENERATOR_LOGPROBS, "float32", RESPONSE),
        Column(TOKEN_VERSIONS, "int32", RESPONSE),
        Column(SAMPLING, "float64", FIXED),
        Column(REWARD),
        Column(EPISODE_REWARD),
        Column(EPISODE_REWARDS, "float64", FIXED),
        Column(PROMPT_ID),
        Column(TURNS, "uint8", TEXT),
        Column(RECORD, "uint8", TEXT),
        Column(REF_LOGPROBS, "float32", RESPONSE),
        Column(TRAINER_LOGPROBS, "float32", RESPONSE),
        Column(PROXIMAL_LOGPROBS, "float32", RESPONSE),
        Column(LOSS_WEIGHTS, "uint8", RESPONSE),
        Column(CLIPPED, "uint8", RESPONSE),
    )
}
"""Those that the package's own stages write, by name."""

# What a stage's function may read although no column holds it.
PROMPT_RECORD = "prompt"  # the rollout's `types.Prompt`, which has the whole row of the data file
COMPLETION = "completion"  # the response as text, decoded from RESPONSE_IDS
DERIVED = {PROMPT_RECORD: (), COMPLETION: (RESPONSE_IDS, TOKEN_VERSIONS)}
"""Name -> the columns it is made from; versions show where the last turn of an episode begins."""
RECORDED = (PROMPT_ID, TURNS, LOSS_WEIGHTS, CLIPPED)
"""What a stage writes for the archive only; no function of a recipe computes it."""


def stored_columns(names: Iterable[str]) -> list[str]:
    """The columns that hold what a stage reads by these names, each once."""
    return [*dict.fromkeys(each for name in names for each in DERIVED.get(name, (name,)))]
