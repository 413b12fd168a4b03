"""Storage, reached in each of the ways that lead to it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.storage.stored_rows import WAYS, opened


@pytest.fixture(params=WAYS)
def storage_way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def opened_storage(storage_way: str, tmp_path: Path) -> Callable[..., Any]:
    """Opens units and a client that reaches them in one way, as `opened` does."""
    return functools.partial(opened, storage_way, tmp_path)
