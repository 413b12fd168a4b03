"""Programs try to harm decoys, a server on the loopback interface, and the process that runs them:
in each kind of container that this machine has, as the user of the tests and, of root, as another.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import mkdtemp

import pytest

from llamarl.scoring.sandbox.containers import Bubblewrap, Kind, ProgramLimits, Ran, run_in
from tests.places import ROOT
from tests.scoring.attacked import HAD
from tests.scoring.attacks import ATTACKS, Attack, source_of
from tests.scoring.overuse import TAKING

STRANGER = 65534
OWN_USER = "import os\nprint(os.getuid())"
LIMITS = ProgramLimits(seconds=10.0, memory_bytes=48 * 2**20, disk_bytes=4 * 2**20)


pytestmark = [pytest.mark.full, pytest.mark.skipif(not HAD, reason="this Linux has no container")]


@contextmanager
def decoys() -> Iterator[tuple[str, int]]:
    """A folder of files that anybody may read, and a server's port; nothing has happened to them
    in the end."""
    home = Path(mkdtemp(prefix="llamarl-decoys-"))
    try:
        with socket.socket() as server, socket.socket(socket.AF_UNIX) as named:
            (home / "decoy").write_text("secret")
            (home / "script").write_text("#!/bin/sh\necho FELL\n")
            (home / "script").chmod(0o755)
            home.chmod(0o755)
            server.bind(("127.0.0.1", 0))
            server.listen()
            named.bind(str(home / "socket"))
            named.listen()
            before = seen(home)
            yield str(home), server.getsockname()[1]
            assert seen(home) == before
            for each in (server, named):
                each.setblocking(False)
                with pytest.raises(BlockingIOError):
                    each.accept()
    finally:
        shutil.rmtree(home)


def seen(home: Path) -> list[tuple[object, ...]]:
    found = []
    for path in (home, *sorted(home.iterdir())):
        with suppress(OSError):
            is_file = path.is_file()
            status = path.stat()
            times = (status.st_mtime_ns, status.st_ctime_ns)
            text = path.read_text() if is_file else ""
            found.append((path, status.st_mode, status.st_uid, status.st_gid, *times, text))
    return found


def assert_held(kind: Kind, attack: Attack, ran: Ran) -> None:
    # Bubblewrap's kernel refuses the first byte above the quota. Beside sandlock files are watched,
    # which a busy machine does late: what was written above it ends the program all the same.
    is_watched = kind is not Bubblewrap and attack in TAKING and ran.ended_for == "disk"
    assert "FELL" not in ran.stdout or is_watched, (attack.__name__, ran)
    if attack in TAKING:
        assert not ran.is_good, (attack.__name__, ran)
    else:  # none of them is refused by its limits, or for another reason than it should be
        assert ran.ended_for == "", (attack.__name__, ran)


@pytest.mark.parametrize("attack", ATTACKS + TAKING, ids=lambda attack: attack.__name__)
@pytest.mark.parametrize("kind", HAD, ids=lambda kind: kind.__name__)
def test_no_program_gets_out(kind: Kind, attack: Attack) -> None:
    with decoys() as (home, port):
        ran = run_in(kind, source_of(attack, home, port, os.getpid()), "", LIMITS)
    assert_held(kind, attack, ran)


def interpreter_of_strangers() -> str | None:
    """A Python of this version that another user may run."""
    version = f"python3.{sys.version_info.minor}"
    for path in (os.path.realpath(sys.executable), shutil.which(version, path="/usr/bin") or ""):
        with suppress(OSError):
            subprocess.run([path, "-c", "import json"], check=True, user=STRANGER, cwd="/")
            return path
    return None


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, and Linux")
@pytest.mark.parametrize("kind", HAD, ids=lambda kind: kind.__name__)
def test_no_program_of_a_plain_user_gets_out(kind: Kind) -> None:
    if not (python := interpreter_of_strangers()):
        pytest.skip("this Linux has no Python that another user may run")
    path = f"{ROOT}:{sysconfig.get_path('purelib')}"
    with decoys() as (home, port):
        sources = [source_of(attack, home, port, os.getpid()) for attack in ATTACKS + TAKING]
        told = {"kind": kind.__name__, "limits": asdict(LIMITS), "programs": sources}
        done = subprocess.run(
            [python, "-B", "-m", "tests.scoring.attacked"],
            input=json.dumps(told),
            cwd="/",
            env={"PYTHONPATH": path, "PATH": os.environ["PATH"], "HOME": "/nonexistent"},
            capture_output=True,
            text=True,
            user=STRANGER,
            group=STRANGER,
            extra_groups=[],
        )
    assert done.returncode == 0, done.stderr
    for attack, ran in zip(ATTACKS + TAKING, json.loads(done.stdout), strict=True):
        assert_held(kind, attack, Ran(**ran))


@pytest.mark.parametrize("kind", HAD, ids=lambda kind: kind.__name__)
def test_what_programs_need_is_there(kind: Kind) -> None:
    source = """
import asyncio, concurrent.futures, multiprocessing, os, resource, sqlite3, subprocess, sys
import tempfile, threading
async def main():
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "print(5)", stdout=-1)
    return (await process.communicate())[0]
assert asyncio.run(main()) == b"5\\n"
database = sqlite3.connect("a.db")
database.execute("create table t (a)")
database.commit()
with tempfile.TemporaryDirectory() as folder:
    open(f"{folder}/x", "w").write("y")
quiet = {"stderr": subprocess.DEVNULL}
assert subprocess.check_output([sys.executable, "-c", "print(1)"], **quiet) == b"1\\n"
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    assert [*pool.map(abs, [-1, 2])] == [1, 2]
sys.setrecursionlimit(10**5)
resource.setrlimit(resource.RLIMIT_STACK, (2**24, 2**24))
here, there = multiprocessing.Pipe()
child = multiprocessing.get_context("fork").Process(target=lambda: there.send(7))
child.start()
assert here.recv() == 7
child.join()
print(input(), os.listdir(os.environ["HOME"]))
"""
    ran = run_in(kind, source, "in\n", ProgramLimits(seconds=20.0))
    assert (ran.stdout, ran.stderr, ran.exit_code) == ("in ['a.db']\n", "", 0)


@pytest.mark.parametrize("kind", HAD, ids=lambda kind: kind.__name__)
def test_numpy_runs(kind: Kind) -> None:
    folder = Path(sys.base_prefix, "lib", f"python3.{sys.version_info.minor}", "site-packages")
    if not (folder / "numpy").is_dir():
        pytest.skip("the Python of this Linux has no numpy")
    source = f"""
import sys
sys.path.append({str(folder)!r})
import numpy as np
a = np.random.default_rng(0).normal(size=(50, 50))
np.save("a.npy", a @ np.linalg.inv(a))
print(np.abs(np.load("a.npy", mmap_mode="r") - np.eye(50)).max() < 1e-9)
"""
    ran = run_in(kind, source, "", ProgramLimits(seconds=20.0))
    assert (ran.stdout, ran.stderr) == ("True\n", "")


@pytest.mark.parametrize("kind", HAD, ids=lambda kind: kind.__name__)
def test_sparse_files_hold_nobody_up_and_count_by_their_blocks(kind: Kind) -> None:
    source = "open('a', 'wb').truncate({})\nprint('done')"
    assert "too large" in run_in(kind, source.format(2**40), "", LIMITS).stderr
    many = "for k in range(500):\n    with open(f'{k}', 'wb') as file: file.truncate(10**6)\n"
    assert run_in(kind, f"{many}print('done')", "", LIMITS).stdout == "done\n"


@pytest.mark.parametrize("kind", HAD, ids=lambda kind: kind.__name__)
def test_what_a_program_prints_is_its_output_and_nothing_else(kind: Kind) -> None:
    forged = '{"exit_code": 0, "stdout": 5, "stderr": "", "ended_for": ""}'
    ran = run_in(kind, f"import os\nprint({forged!r}, flush=True)\nos._exit(3)", "", LIMITS)
    assert ran == Ran(exit_code=3, stdout=f"{forged}\n")
    for text in ("started\\n", "\\xff\\ud800", "[" * 10**4):
        written = text.encode().decode("unicode_escape").encode(errors="surrogatepass")
        ran = run_in(kind, f"import os\nos.write(1, {written!r})", "", LIMITS)
        assert (ran.exit_code, ran.stdout) == (0, written.decode(errors="replace"))


@pytest.mark.parametrize("kind", HAD, ids=lambda kind: kind.__name__)
def test_when_a_run_has_ended_so_have_all_its_processes(kind: Kind) -> None:
    mark = secrets.token_hex(8)
    source = f"""
import os, sys, time
for _ in range(5):
    if os.fork() == 0:
        try:
            os.setsid()
        except PermissionError:
            pass
        os.closerange(0, 3)
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)", "{mark}"])
time.sleep(0.5)
print("done")
"""
    assert run_in(kind, source, "", LIMITS).stdout == "done\n"
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            assert mark.encode() not in path.read_bytes()


def test_of_root_each_program_is_a_user_of_its_own() -> None:
    if Bubblewrap not in HAD or os.geteuid() != 0:
        pytest.skip("needs root, Linux and bubblewrap")
    users = {int(run_in(Bubblewrap, OWN_USER, "", LIMITS).stdout) for _ in range(2)}
    assert len(users | {os.getuid(), STRANGER}) == 4
