"""Sandboxes of agents, in each way that this machine has: what their programs reach, their limits,
and what is left of them."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from llamarl.scoring.agent.command import AgentCommand, CommandEnvironment, reward_of
from llamarl.scoring.agent.episode import AgentEpisode
from llamarl.scoring.agent.turns import Reply
from llamarl.scoring.sandbox import docker
from llamarl.scoring.sandbox.containers import Ran
from llamarl.scoring.sandbox.docker import ContainerSandbox
from llamarl.scoring.sandbox.folders import remove_left, remove_left_once
from llamarl.scoring.sandbox.sandboxes import MIB, PREFIX, LocalSandbox, Sandbox, SandboxLimits
from tests.containers import IMAGE, make_engine
from tests.places import ROOT

pytestmark = pytest.mark.full
PYTHON, PYTHON_HERE = os.path.realpath(sys.executable), sys.executable
WITH_FOLDERS = ["namespaces", "docker"] * (shutil.which("bwrap") is not None)
WAYS = [*WITH_FOLDERS, "sandlock", "plain"]
CONTAINED = [way for way in WAYS if way != "plain"]


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(docker, "LOOK_S", 0.2)
    if request.param not in WITH_FOLDERS:
        monkeypatch.setattr(shutil, "which", lambda name: None)
    return str(request.param)


@asynccontextmanager
async def opened(
    way: str,
    url: str = "http://127.0.0.1:40009/x/v1",
    folders: tuple[str, ...] = (),
    **limits: int,
) -> AsyncIterator:
    own = SandboxLimits(**limits)
    sandbox: LocalSandbox | ContainerSandbox
    with tempfile.TemporaryDirectory() as state:
        if way == "docker":
            engine = make_engine(Path(state))
            sandbox = ContainerSandbox(engine, IMAGE, url, own, folders=folders)
        else:
            sandbox = LocalSandbox(url, own, contained=way != "plain", folders=folders)
        try:
            await sandbox.start()
            yield sandbox
        finally:
            await sandbox.stop()
            assert not (sandbox._folder and sandbox._folder.path.exists())
            assert not [*Path(state).glob("containers/*")]


async def python(sandbox: Sandbox, text: str, timeout_s: float = 60.0) -> Ran:
    return await sandbox.run([PYTHON, "-c", text], {"OWN": "mine"}, timeout_s)


@pytest.mark.parametrize("way", WAYS, indirect=True)
async def test_commands_share_a_folder_and_their_ends_are_told(way: str) -> None:
    async with opened(way) as sandbox:
        await sandbox.write("in/a.txt", b"one")
        text = "import os; print(open('in/a.txt').read(), os.environ['OWN'], os.environ['HOME'] == "
        text += "os.getcwd()); open('b.txt', 'w').write('two')"
        ran = await python(sandbox, text)
        assert (ran.exit_code, ran.stdout, ran.stderr) == (0, "one mine True\n", "")
        assert await sandbox.read("b.txt") == b"two"
        ran = await python(sandbox, "import sys; print(open('b.txt').read()); sys.exit(3)")
        assert (ran.exit_code, ran.stdout) == (3, "two\n")
        ran = await python(sandbox, "import os; os.kill(os.getpid(), 9)")
        assert ran.exit_code == 128 + 9
        ran = await python(sandbox, "print('x' * 10**6 + 'end')")
        assert ran.stdout.endswith("xend\n")
        assert len(ran.stdout) == 65536
        with pytest.raises(FileNotFoundError):
            await sandbox.read("nothing")


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("has_model", [True, False])
async def test_a_program_that_does_not_exist_is_no_failed_check(way: str, has_model: bool) -> None:
    async with opened(way) as sandbox:
        run = sandbox.run(["/no/such/program"], {}, 9.0, has_model=has_model)
        if way != "plain":
            assert (await run).exit_code == 127
        else:
            with pytest.raises(RuntimeError, match="/no/such/program"):
                await run


@pytest.mark.parametrize("way", WAYS, indirect=True)
async def test_files_are_neither_written_nor_read_outside_of_the_folder(
    way: str, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    async with opened(way) as sandbox:
        await python(sandbox, f"import os; os.symlink({str(secret)!r}, 'link'); os.mkdir('d')")
        await python(sandbox, f"import os; os.symlink({str(tmp_path)!r}, 'd/up')")
        for path in ("link", "d/up/secret", "../x", "/etc/passwd", "."):
            for ask in (sandbox.read(path), sandbox.write(path, b"changed")):
                with pytest.raises(ValueError, match="a file of a sandbox must"):
                    await ask
    assert secret.read_text() == "s"


@pytest.mark.parametrize("way", WITH_FOLDERS, indirect=True)
async def test_folders_lie_at_their_places_and_are_emptied_of_whatever_is_there(
    way: str, tmp_path: Path
) -> None:
    async with opened(way, folders=("/tests", "/logs")) as sandbox:
        await sandbox.write("/tests/in/run.sh", b"#!/bin/sh\necho $0", is_executable=True)
        ran = await sandbox.run(["/tests/in/run.sh"], {}, 60.0)
        assert (ran.exit_code, ran.stdout) == (0, "/tests/in/run.sh\n"), ran.stderr
        leave = "import os, shutil; shutil.rmtree('/tests/in'); os.mkdir('/tests/d')\n"
        leave += f"os.symlink({str(tmp_path)!r}, '/tests/d/up'); os.mkfifo('/tests/pipe')\n"
        leave += f"os.symlink({str(tmp_path)!r}, '/logs/verifier'); open('/logs/a', 'w')"
        assert (await python(sandbox, leave)).exit_code == 0
        (tmp_path / "mine").write_text("m")
        for path in ("/tests", "/logs/verifier"):
            await sandbox.empty(path)
        ran = await sandbox.run(["ls", "-A", "/tests", "/logs", "/logs/verifier"], {}, 60.0)
        assert ran.stdout.split() == ["/logs:", "a", "verifier", "/logs/verifier:", "/tests:"]
        assert (tmp_path / "mine").exists()
        await python(sandbox, f"import os; os.symlink({str(tmp_path)!r}, '/logs/up')")
        for path in ("/logs/up/x", "/other", "/"):
            with pytest.raises(ValueError, match="a file of a sandbox must"):
                await sandbox.empty(path)
    assert (tmp_path / "mine").exists()


async def test_folders_at_fixed_places_are_refused_where_they_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for folder in ("/", "/usr", "/usr/share/own", sys.base_prefix, os.path.dirname(sys.prefix)):
        with pytest.raises(RuntimeError, match=r"must be none of the system's|have bubblewrap"):
            await LocalSandbox("http://127.0.0.1:1/x/v1", folders=(folder,)).start()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match=r"must have bubblewrap, .* got /tests, /app"):
        await LocalSandbox("http://127.0.0.1:1/x/v1", folders=("/tests",), home="/app").start()


@pytest.mark.parametrize("way", CONTAINED, indirect=True)
async def test_a_program_reaches_its_model_and_nothing_else(way: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.read(5))
        writer.write(b"model")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    other = socket.create_server(("127.0.0.1", 0))
    connect = "import socket\n"
    connect += "s = socket.create_connection(('127.0.0.1', {port}), 3)\n"
    connect += "s.send(b'hello'); print(s.recv(9).decode())"
    async with opened(way, f"http://127.0.0.1:{port}/x/v1") as sandbox:
        ran = await python(sandbox, connect.format(port=port))
        assert (ran.stdout, asked) == ("model\n", [b"hello"]), ran.stderr
        ran = await python(sandbox, connect.format(port=other.getsockname()[1]))
        assert ran.exit_code == 1
        for path in (secret, Path(__file__)):
            ran = await python(sandbox, f"print(open({str(path)!r}).read())")
            assert (ran.exit_code, ran.stdout) == (1, ""), path
        ran = await python(sandbox, f"open({str(tmp_path / 'new')!r}, 'w')")
        assert ran.exit_code == 1
    assert not (tmp_path / "new").exists()
    server.close()
    other.close()


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("while True: pass", "time"),
        ("x = bytearray(200 * 2**20)\nwhile True: x[::4096] = x[::4096]", "memory"),
        ("f = open('x', 'wb')\nwhile True: f.write(bytes(2**20)); f.flush()", "disk"),
        ("open('x', 'wb').write(bytes(20 * 2**20))", "disk"),
    ],
)
async def test_a_program_that_exceeds_a_limit_is_ended_and_the_limit_named(
    way: str, text: str, limit: str
) -> None:
    limits = {"memory_bytes": 100 * MIB, "disk_bytes": 10 * MIB}
    async with opened(way, **limits) as sandbox:
        ran = await python(sandbox, text, 3.0 if limit == "time" else 60.0)
        assert (ran.exit_code, ran.ended_for) == (None, limit)


@pytest.mark.parametrize("way", WAYS, indirect=True)
async def test_what_a_program_leaves_behind_ends_with_it(way: str) -> None:
    mark = f"left{os.getpid()}{time.monotonic_ns()}"
    leave = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; "
    leave += f"time.sleep(600)', '{mark}'], start_new_session=True)\nprint('left')"
    async with opened(way) as sandbox:
        ran = await python(sandbox, leave)
        assert ran.stdout == "left\n", ran.stderr
    end_s = time.monotonic() + 10
    command = ["pgrep", "-f", mark]
    while subprocess.run(command, capture_output=True, check=False).stdout.strip():
        assert time.monotonic() < end_s, "a process is left"
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("ran", "reward"),
    [
        (Ran(exit_code=0), 1.0),
        (Ran(exit_code=1), 0.0),
        (Ran(exit_code=0, stdout="so\n0.25\n"), 0.25),
        (Ran(exit_code=1, stdout="-1"), -1.0),
        (Ran(exit_code=0, stdout="fine"), 1.0),
        (Ran(exit_code=2, stderr="no module"), "got exit code 2: no module"),
        (Ran(exit_code=137), "got exit code 137"),
        (Ran(exit_code=1, stderr="Traceback (most recent call last):\nOSError"), "got exit code 1"),
        (Ran(exit_code=None, ended_for="time"), "got too much time"),
    ],
)
def test_only_a_check_that_ends_as_one_gives_a_reward(ran: Ran, reward: float | str) -> None:
    if isinstance(reward, str):
        with pytest.raises(RuntimeError, match=reward):
            reward_of(ran)
    else:
        assert reward_of(ran) == reward


@pytest.mark.parametrize("way", CONTAINED, indirect=True)
async def test_a_pipe_in_the_place_of_a_file_holds_up_nobody(way: str) -> None:
    async with opened(way) as sandbox:
        await python(sandbox, "import os; os.mkfifo('check.py'); os.mkfifo('found')")
        await asyncio.wait_for(sandbox.write("check.py", b"print(6)"), 20)
        assert (await sandbox.run([PYTHON, "check.py"], {}, 60.0)).stdout == "6\n"
        with pytest.raises(ValueError, match="must be a plain file"):
            await asyncio.wait_for(sandbox.read("found"), 20)


ASK = """
import json, os, sys, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": sys.argv[1]}]}).encode()
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
found = json.load(urllib.request.urlopen(request))
open("said.txt", "w").write(found["choices"][0]["message"]["content"])
"""
CHECK = "import sys; sys.exit(open('said.txt').read() != 'Six.')"


async def play(command: list[str], check: list[str], said: str) -> float:
    spec = AgentCommand(command=command, check=check)
    episode = AgentEpisode(CommandEnvironment(spec))
    await episode.start({"question": "How much?", "files": {"ask.py": ASK}})
    while True:
        for event in (await episode.wait(60.0))["events"]:
            if "end" in event:
                return (await episode.get_reward(is_cut=False))[0]
            assert event["messages"][0]["content"] == "How much?"
            episode.reply(event["conversation"], Reply(said))


async def test_a_command_plays_an_episode_and_a_check_scores_it() -> None:
    ask, check = [PYTHON, "ask.py", "{question}"], [PYTHON, "-c", CHECK]
    assert await play(ask, check, "Six.") == 1.0
    assert await play(ask, check, "Seven.") == 0.0
    for command, words in (
        (["/no/such/program"], "must start|must be a program"),
        ([PYTHON, "-c", "pass"], "the check must exit with 0 or 1|at least one message"),
    ):
        with pytest.raises(RuntimeError, match=words):
            await play(command, [PYTHON, "-c", "import sys; sys.exit(2)"], "Six.")


KILLED = """
import asyncio, os, signal
from llamarl.scoring.sandbox.sandboxes import LocalSandbox

async def start():
    await LocalSandbox("http://127.0.0.1:9/x/v1", contained=False).start()
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(start())
"""


async def test_what_a_killed_process_has_left_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {**os.environ, "TMPDIR": str(tmp_path)}
    killed = await asyncio.to_thread(subprocess.run, [PYTHON_HERE, "-c", KILLED], env=own)
    assert killed.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    remove_left_once.cache_clear()
    async with opened("plain") as sandbox:
        assert not left.exists()
        remove_left(PREFIX)
        assert sandbox._folder.path.exists(), "it is at work"
    assert not [*tmp_path.iterdir()]


WRONG = """
import json, os, sys, urllib.request
for more in json.loads(sys.argv[1]):
    body = json.dumps({"messages": [{"role": "user", "content": "How much?"}], **more}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    urllib.request.urlopen(request)
"""


def asking(requests: str, end: str = "", *, goes_on: bool = False) -> list[str]:
    """A program whose requests have these further keys, one after the other."""
    way = "with suppress(OSError): urllib" if goes_on else "urllib"
    text = WRONG.replace("    urllib", f"    {way}")
    words = "-c", f"from contextlib import suppress\n{text}{end}", requests
    return [PYTHON, *(word.replace("{", "{{").replace("}", "}}") for word in words)]


N = "n must be left out, got 2"


@pytest.mark.parametrize(
    ("requests", "end", "message"),
    [
        ("[]", "", "it has asked for none$"),
        ("[]", "sys.exit('no key')", "it has asked for none, and ended with exit code 1: no key"),
        ('[{"n": 2}]', "", f"play must ask for what can be served: {N}"),
        ('[{}, {"n": 2}]', "", f"play must ask for what can be served: {N}"),
    ],
)
async def test_a_program_that_fails_for_want_of_a_reply_gets_no_reward(
    requests: str, end: str, message: str
) -> None:
    command = asking(requests, end)
    with pytest.raises(RuntimeError, match=message):
        await play(command, [PYTHON, "-c", "raise SystemExit(1)"], "Six.")


async def test_a_program_may_go_on_after_a_request_that_is_refused() -> None:
    for requests, end in (('[{}, {"n": 2}]', ""), ('[{"n": 2}, {}]', "sys.exit(1)")):
        command = asking(requests, end, goes_on=True)
        assert await play(command, [PYTHON, "-c", "raise SystemExit(1)"], "Six.") == 0.0


async def test_the_shipped_check_imports_nothing_that_the_agent_left() -> None:
    recipe = ROOT / "recipes" / "quickstart_agent"
    words = yaml.safe_load((recipe / "run.yaml").read_text())["environment"]["check_command"]
    check = [PYTHON if word == "{python}" else word for word in words]
    async with opened(CONTAINED[0]) as sandbox:
        await sandbox.write("json.py", b"import sys; sys.exit(0)")
        await sandbox.write("check.py", b"import json, sys; sys.exit(1)")
        assert (await sandbox.run(check, {}, 60.0)).exit_code == 1
        check.remove("-P")
        assert (await sandbox.run(check, {}, 60.0)).exit_code == 0, "the deception works"
