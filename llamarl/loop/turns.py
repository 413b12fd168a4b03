"""The turns of episodes: what is asked of the environment, and who waits for which answer.

Owns: the calls to the environment, and which rollout waits. Does not own: what a rollout does with
an answer (`rollouts.py`), or the environment (`executors/environment.py`). Invariant: a rollout
waits for one answer at a time; one that comes for a rollout that does not wait is ignored.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence

from llamarl.batcher import Batcher
from llamarl.episode import EpisodeState, TurnItem, TurnResult
from llamarl.errors import cancel_all
from llamarl.protocols import Environment
from llamarl.types import Prompt


class Turns:
    """Belongs to one event loop. An error of the environment goes to `on_error`, once."""

    def __init__(self, environment: Environment, on_error: Callable[[Exception], None]) -> None:
        self._environment, self._on_error = environment, on_error
        self._submitting: Batcher[TurnItem] = Batcher(environment.submit, on_error)
        self._waiting: dict[int, tuple[int, asyncio.Future[TurnResult]]] = {}  # by row
        self._numbers = itertools.count()
        self._collecting: asyncio.Task[None] | None = None

    async def ask(self, row_id: int, prompt: Prompt | None = None) -> TurnResult:
        """With a prompt, begin an episode; else have the turn answered that has ended."""
        if self._collecting is None:
            self._collecting = asyncio.create_task(self._collect())
        number, answered = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[row_id] = number, answered
        sent = self._submitting.ask((row_id, number, prompt))
        try:
            return await answered
        finally:
            sent.cancel()
            del self._waiting[row_id]

    async def abort(self, row_ids: Sequence[int]) -> None:
        """Those of these that are played do not go on; who waits gets an answer at once."""
        for row_id in row_ids:
            number, _ = self._waiting.get(row_id, (-1, None))
            self._pass_on(TurnResult(row_id=row_id, number=number, state=EpisodeState.DONE))
        await self._environment.forget([*row_ids])

    async def close(self) -> None:
        """Ask nothing more."""
        await self._submitting.close()
        await cancel_all([self._collecting] if self._collecting is not None else [])

    async def _collect(self) -> None:
        received = 0
        try:
            while True:
                first, results = await self._environment.collect(received)
                received = first + len(results)
                for result in results:
                    self._pass_on(result)
        except Exception as error:  # noqa: BLE001 - raised where all that waits is ended
            self._on_error(error)

    def _pass_on(self, result: TurnResult) -> None:
        number, answered = self._waiting.get(result.row_id, (-1, None))
        if answered is not None and number == result.number and not answered.done():
            answered.set_result(result)
