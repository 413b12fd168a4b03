"""Weighs the messages of one caller, as the cluster would pickle them."""

from __future__ import annotations

import pickle
from collections.abc import Awaitable, Callable
from typing import Any


class Weighed:
    """Wraps `group.first`, `group.every` or any executor: same calls, and their `num_bytes`."""

    def __init__(self, executor: Any) -> None:
        self.executor = executor
        self.num_bytes = 0
        self.calls: list[str] = []

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any) -> Any:
            result = await getattr(self.executor, method)(*args)
            self.num_bytes += len(pickle.dumps((method, args))) + len(pickle.dumps(result))
            self.calls.append(method)
            return result

        return call
