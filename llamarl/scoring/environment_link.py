"""The way of a generator rank to the environments.

Every turn has an answer; with an environment that is lost, the answer is that the episode is."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from llamarl.cluster.sockets import Connection
from llamarl.core.errors import ExecutorLost
from llamarl.core.faces import Environment
from llamarl.core.records import EpisodeState, StageStatus, TurnItem, TurnResult
from llamarl.storage.wire import prompt_header, read_prompt

RETRY_S = 0.1  # while the environment's executor is started again


class EnvironmentLink:
    """protocols.Environment of the executor `name`: its socket at `path`, or (None) its `calls`.
    Picklable. What takes the executor's place listens at the same path, and has calls of its own,
    with which the link is renewed."""

    def __init__(self, name: str, calls: Environment, path: str | None) -> None:
        self.name = name
        self._calls, self._path = calls, path
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()
        self._renewed = asyncio.Event()

    def __reduce__(self) -> Any:
        return EnvironmentLink, (self.name, self._calls, self._path)

    def renew(self, calls: Environment) -> None:
        """Ask these from now on."""
        self._calls = calls
        self._renewed.set()
        self._renewed = asyncio.Event()

    async def answer(self, turn: TurnItem) -> TurnResult:
        """See `protocols.Environment`. An episode waits to begin for an executor that is started
        again."""
        begins, connection = turn.prompt is not None, None
        while True:
            renewed = self._renewed
            try:
                if self._path is None:
                    return await self._calls.answer(turn)
                connection = await self._connected(self._path)
                packet = await connection.ask((turn_header(turn), []))
                packet.close()
                return read_result(packet.header["result"])
            except ConnectionError:
                if self._connection is connection:  # else another turn has found it, too
                    self._connection = None
            except ExecutorLost:
                if begins:
                    await renewed.wait()
            if not begins:
                return lost(turn)

    async def forget(self, row_ids: Sequence[int]) -> None:
        """See `protocols.Environment`; an executor that is lost has forgotten them."""
        with suppress(ConnectionError, ExecutorLost):
            if self._path is None:
                await self._calls.forget([*row_ids])
            elif (connection := self._connection) is not None:
                (await connection.ask(({"ask": "forget", "rows": [*row_ids]}, []))).close()

    def close(self) -> None:
        """Hang up."""
        if self._connection is not None:
            self._connection.close()

    async def _connected(self, path: str) -> Connection:
        async with self._connecting:
            while self._connection is None:
                try:
                    self._connection = Connection(path, self.name)
                except OSError:
                    await asyncio.sleep(RETRY_S)
            return self._connection


@dataclass(frozen=True)
class Environments:
    """Those of a run, as one replica reaches them. The one of index `own` begins its episodes;
    prompt and response of a rollout have at most `context` tokens together."""

    links: tuple[EnvironmentLink, ...]
    own: int
    context: int

    async def answer(self, environment: int, turn: TurnItem) -> TurnResult:
        """What the environment of this index answers. Those of other hosts, which do not see that a
        replica is gone, forget an episode that begins again."""
        if turn.prompt is not None and turn.attempt:
            others = [link for link in self.links if link is not self.links[environment]]
            await asyncio.gather(*(link.forget([turn.row_id]) for link in others))
        return await self.links[environment].answer(turn)

    def renew(self, name: str, calls: Environment) -> None:
        """The executor of this name answers these calls from now on."""
        for link in self.links:
            if link.name == name:
                link.renew(calls)

    async def forget(self, row_ids: Sequence[int]) -> None:
        """These episodes, wherever they are played, do not go on."""
        await asyncio.gather(*(link.forget(row_ids) for link in self.links))

    def close(self) -> None:
        """Hang up."""
        for link in self.links:
            link.close()


def lost(turn: TurnItem) -> TurnResult:
    """The answer to a turn of an episode that is lost."""
    error = "the process of its environment was lost"
    state = EpisodeState.LOST
    return TurnResult(row_id=turn.row_id, attempt=turn.attempt, state=state, error=error)


def turn_header(turn: TurnItem) -> dict[str, Any]:
    """A turn as a packet's header holds it."""
    fields = {name: getattr(turn, name) for name in TurnItem.__slots__}
    prompt = None if turn.prompt is None else prompt_header(turn.prompt)
    return {"ask": "answer", "turn": fields | {"prompt": prompt}}


def read_turn(header: dict[str, Any]) -> TurnItem:
    """The inverse."""
    fields = header["turn"]
    prompt = None if fields["prompt"] is None else read_prompt(fields["prompt"])
    return TurnItem(**{**fields, "ids": tuple(fields["ids"]), "prompt": prompt})


def result_header(result: TurnResult) -> dict[str, Any]:
    """A result as a packet's header holds it."""
    return {"result": {name: getattr(result, name) for name in TurnResult.__slots__}}


def read_result(fields: dict[str, Any]) -> TurnResult:
    """The inverse."""
    prompt_ids = None if fields["prompt_ids"] is None else tuple(fields["prompt_ids"])
    make = partial(TurnResult, **{**fields, "prompt_ids": prompt_ids})
    return make(
        state=EpisodeState(fields["state"]),
        status=StageStatus(fields["status"]),
        observation=tuple(fields["observation"]),
    )
