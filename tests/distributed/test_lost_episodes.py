"""An episode that begins again on another host is forgotten where it was played."""

from __future__ import annotations

import asyncio
from pathlib import Path

from llamarl.core.records import EpisodeState, TurnItem
from llamarl.scoring.environment import EnvironmentLink, Environments
from tests.distributed.test_environment import ADD, Setting


def test_an_episode_that_begins_again_elsewhere_is_forgotten_where_it_was_played(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        hosts = [Setting(tmp_path / name) for name in "ab"]
        for setting in hosts:
            await setting.executor.start()
        calls = [EnvironmentLink(f"{n}", host.executor, None) for n, host in enumerate(hosts)]
        replicas = [  # on its own host a replica uses the socket
            Environments((hosts[0].link, calls[1]), own=0, context=400),
            Environments((calls[0], hosts[1].link), own=1, context=400),
        ]
        prompt = hosts[0].prompt()
        begin = [TurnItem(row_id=1, attempt=attempt, prompt=prompt) for attempt in range(2)]
        ids = tuple(hosts[0].tokenizer.encode(ADD, special=False))
        turn = TurnItem(row_id=1, attempt=0, ids=ids, room=400)
        other = TurnItem(row_id=2, attempt=0, prompt=prompt)
        for item in (begin[0], other):
            assert (await replicas[0].answer(0, item)).state is EpisodeState.GOES_ON
        resumed = await replicas[1].answer(0, turn)
        assert resumed.state is EpisodeState.GOES_ON, "cut, it goes on from the other host"
        again = await replicas[1].answer(1, begin[1])
        assert again.state is EpisodeState.GOES_ON, "its replica was lost"
        assert [[*host.executor._episodes] for host in hosts] == [[2], [1]]
        for setting in hosts:
            setting.link.close()
            await setting.executor.close()

    for name in "ab":
        (tmp_path / name).mkdir()
    asyncio.run(main())
