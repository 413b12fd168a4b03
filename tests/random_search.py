"""Which cases a random search runs.

Other ones every day: a few by `make test-long`, a tenth of them by the default suite; the slow set
runs many, always the same. A case that fails says its seed: LLAMARL_SEARCH_SEED=SEED runs that
case alone.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

GIVEN = os.environ.get("LLAMARL_SEARCH_SEED")
TODAY = datetime.datetime.now(datetime.UTC).date().toordinal() * 100_000


def searched(few: int, many: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a test its argument `seeds`: of `few` cases of today; in the slow set, of `many`."""
    slow = pytest.param(range(many), id=f"{many} cases", marks=pytest.mark.slow)
    if GIVEN is not None:
        return pytest.mark.parametrize("seeds", [pytest.param([int(GIVEN)], id=f"seed {GIVEN}")])
    first = TODAY + max(1, few // 10)
    quick = pytest.param(range(TODAY, first), id=f"{first - TODAY} cases of today")
    last = TODAY + few
    more = pytest.param(
        range(first, last), id=f"{last - first} more of today", marks=pytest.mark.long
    )
    return pytest.mark.parametrize("seeds", [quick, *[more] * (first < last), slow])


@contextmanager
def case(seed: int) -> Iterator[None]:
    """What fails within names the seed."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"to run this case alone: LLAMARL_SEARCH_SEED={seed}")
        raise
