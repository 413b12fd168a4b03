"""Storage, reached in each of the ways that lead to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from llamarl.storage.client import Store
from llamarl.storage.worker import StorageWorker
from tests.unit.stored_rows import WAYS, opened

Scenario = Callable[[Store, list[StorageWorker]], Awaitable[None]]


@pytest.fixture(params=WAYS)
def storage_way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def drive_storage(storage_way: str, tmp_path: Path) -> Callable[..., None]:
    """Runs a scenario with a client that reaches its units in one way."""

    def run(scenario: Scenario, num_units: int = 1, **spec: str) -> None:
        async def whole() -> None:
            async with opened(storage_way, tmp_path, num_units, **spec) as (units, store):
                await scenario(store, units)

        asyncio.run(whole())

    return run
