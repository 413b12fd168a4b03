"""A run's control socket, with both ends in this process."""

from __future__ import annotations

import asyncio
import os
import pwd
import stat
from pathlib import Path

import pytest

from llamarl.cluster import sockets
from llamarl.cluster.sockets import Connection
from llamarl.controller import control
from llamarl.controller.control import Message, listening, scale, status


async def answer(message: Message) -> Message:
    if message["ask"] == "scale":
        if message["generators"] == 0:
            raise ValueError("generators must be from 1 to 9, got 0")
        return {"text": f"{message['generators']} {message['drains']}"}
    row = dict.fromkeys(control.COLUMNS) | {"executor": "trainer", "version": 7}
    return {"version": 7, "num_steps": 9, "num_open": 3, "executors": [row]}


def talk(run_dir: Path, *calls) -> list[str]:
    """What each call returns or raises while a run listens."""

    def attempt(call) -> str:
        try:
            return call()
        except ValueError as error:
            return str(error)

    async def main() -> list[str]:
        async with listening(str(run_dir), answer):
            return [await asyncio.to_thread(attempt, call) for call in calls]

    return asyncio.run(main())


def test_both_commands_show_what_the_run_answers(tmp_path: Path) -> None:
    run = str(tmp_path)
    shown = talk(
        tmp_path,
        lambda: status([run]),
        lambda: scale([run, "generators=3"]),
        lambda: scale([run, "generators=2", "--now"]),
        lambda: scale([run, "generators=0"]),
    )
    assert shown[0].startswith("version 7 of 9, 3 groups open\nexecutor  state  version")
    assert "trainer          7" in shown[0]
    assert shown[1:] == ["3 True\n", "2 False\n", "generators must be from 1 to 9, got 0"]
    assert list(tmp_path.iterdir()) == [], "the socket's file is gone"


async def test_only_the_user_can_connect_in_a_folder_with_a_long_name(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    async with listening(str(folder), answer):
        socket = folder / control.SOCKET
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (socket, socket.parent)]
    assert modes == [0o600, 0o700]


def test_another_users_process_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "user_of", lambda peer: os.geteuid() + 1)
    owner = pwd.getpwuid(os.geteuid()).pw_name
    (said,) = talk(tmp_path, lambda: status([str(tmp_path)]))
    assert said == f"RUN must be a run of yours, got {tmp_path}, of {owner}"


async def test_a_run_that_ends_before_it_answers_is_named(tmp_path: Path) -> None:
    is_asked = asyncio.Event()

    async def never(message: Message) -> Message:
        is_asked.set()
        return await asyncio.get_running_loop().create_future()

    async with listening(str(tmp_path), never):
        asking = asyncio.create_task(asyncio.to_thread(status, [str(tmp_path)]))
        await is_asked.wait()
    with pytest.raises(ValueError, match=f"until it has answered, got {tmp_path}, which ended"):
        await asking


async def test_what_was_begun_is_done_though_who_asked_is_gone(tmp_path: Path) -> None:
    has_begun, may_end, is_done = (asyncio.Event() for _ in range(3))

    async def slow(message: Message) -> Message:
        has_begun.set()
        await may_end.wait()
        is_done.set()
        return {}

    async with listening(str(tmp_path), slow):
        connection = Connection(tmp_path / control.SOCKET, "the run")
        asking = asyncio.create_task(connection.ask(({"ask": "scale"}, [])))
        await has_begun.wait()
        connection.close()
        with pytest.raises(ConnectionError):
            await asking
        for _ in range(10):  # until the run has noticed
            await asyncio.sleep(0)
        may_end.set()
        await is_done.wait()


def test_a_run_whose_folder_can_hold_no_socket_goes_on(tmp_path: Path) -> None:
    (tmp_path / control.SOCKET).parent.touch()
    said = talk(tmp_path, lambda: status([str(tmp_path)]))
    assert said == [
        f"RUN must be the folder of a run that is at work, got {tmp_path}, where none is"
    ]


def test_the_socket_of_a_killed_run_is_no_run_and_gives_way_to_the_next(tmp_path: Path) -> None:
    (tmp_path / control.SOCKET).parent.mkdir()
    (tmp_path / control.SOCKET).touch()
    with pytest.raises(ValueError, match="where none is"):
        status([str(tmp_path)])
    assert talk(tmp_path, lambda: scale([str(tmp_path), "generators=1"])) == ["1 True\n"]
