"""The service of a rehearsal's environment processes: that of a run, whose agents' connections can
be dropped."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

from llamarl.scoring import episodes
from llamarl.scoring.agent.episode import AgentEpisode
from llamarl.scoring.agent.turns import AgentRequest, Asked, Reply
from llamarl.scoring.episodes import UNKNOWN, Answer, Episodes


class DroppingEpisode(AgentEpisode):
    """An agent's episode. While it `drops`, the connection of a request ends without the reply that
    the model gives, which stays in the conversation: a client may ask for it again."""

    drops = False

    def ask(self, request: AgentRequest) -> Asked:
        """See `AgentEpisode`."""
        asked = super().ask(request)
        told: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

        def tell(reply: asyncio.Future[Reply]) -> None:
            if told.done():
                return
            if (error := reply.exception()) is not None:
                told.set_exception(error)
                told.exception()  # it may be that nothing waits for it
            elif self.drops:
                told.set_exception(ConnectionResetError("the rehearsal drops this connection"))
                told.exception()
            else:
                told.set_result(reply.result())

        asked.reply.add_done_callback(tell)
        return Asked(asked.begun, told)


class RehearsedEpisodes(Episodes):
    """The episodes of one process."""

    agent_kind = DroppingEpisode

    async def tidy(self) -> Answer:
        """Collect what nothing refers to."""
        gc.collect()
        return {}

    async def reply_and_drop(self, row_id: int, conversation: int, reply: dict[str, Any]) -> Answer:
        """Answer a request as `reply` does, and drop its connection."""
        if (agent := self.agent_of(row_id)) is None:
            return UNKNOWN
        assert isinstance(agent, DroppingEpisode)
        agent.drops = True
        agent.reply(conversation, Reply(**reply))
        await asyncio.sleep(0)  # those that wait for the reply are told
        agent.drops = False
        return {}


def load(setup: dict[str, Any]) -> Callable[..., Coroutine[Any, Any, Answer]]:
    """Return the worker's service, as `scoring/episodes.py` does."""
    return episodes.load(setup, RehearsedEpisodes)
