"""Sandboxes that are containers: the engine's command line, what fails, and what is left of them.
The engine is a stand-in; its options are compared with those of the real docker."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from llamarl.scoring.sandbox import docker
from llamarl.scoring.sandbox.docker import ContainerSandbox, missing_engine, missing_image
from tests.containers import IMAGE, make_engine
from tests.fake_docker import OPTIONS

URL = "http://127.0.0.1:40009/x/v1"
NO_BWRAP, NO_DOCKER = (shutil.which(name) is None for name in ("bwrap", "docker"))
needs_bwrap = pytest.mark.skipif(NO_BWRAP, reason="this Linux has no bubblewrap")
FLAG = re.compile(r"^\s+(?:(-\w), )?(--[\w-]+)(?: (\w+))?(?:\s{2,}|$)")


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder of temporary files is the test's own, so that nothing of others is removed; pytest
    has made its own before."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        docker.remove_left.cache_clear()
        docker.image_config.cache_clear()
        yield Path(folder)


@pytest.fixture
def engine(tmp_path: Path) -> str:
    return make_engine(tmp_path / "engine")


@asynccontextmanager
async def opened(engine: str, image: str = IMAGE, **options: object) -> AsyncIterator:
    sandbox = ContainerSandbox(engine, image, URL, **options)
    try:
        await sandbox.start()
        yield sandbox
    finally:
        await sandbox.stop()


def options_of(command: str) -> dict[str, bool]:
    """Return the options that docker's help lists, and whether each has a value."""
    call = ["docker", *command.split(), "--help"]
    text = subprocess.run(call, capture_output=True, text=True, check=True).stdout
    found = {}
    for short, name, kind in filter(None, map(_flag, text.splitlines())):
        found[name] = bool(kind)
        found[short] = bool(kind)
    return found


def _flag(line: str) -> tuple[str, str, str] | None:
    match = FLAG.match(line)
    return None if match is None else (match[1] or match[2], match[2], match[3] or "")


@pytest.mark.skipif(NO_DOCKER, reason="this Linux has no docker")
@pytest.mark.parametrize("command", OPTIONS)
def test_docker_knows_each_option_that_its_stand_in_knows(command: str) -> None:
    found = options_of(command)
    for name, has_value in OPTIONS[command].items():
        assert found.get(name) is has_value, f"docker {command} {name}"


@pytest.mark.skipif(NO_DOCKER, reason="this Linux has no docker")
def test_without_an_engine_docker_itself_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    what = missing_engine("docker")
    assert what.startswith("docker ps must succeed, got: Cannot connect")
    assert "\n" not in what


@needs_bwrap
async def test_what_is_missing_is_named(engine: str, tmp_path: Path) -> None:
    assert missing_engine(engine) == ""
    assert missing_image(engine, [IMAGE] * 120) == ""
    assert missing_image(engine, [*[IMAGE] * 70, "none:1", IMAGE]) == "none:1"
    with pytest.raises(RuntimeError, match="No such image: none:1"):
        async with opened(engine, "none:1"):
            pass
    nowhere = str(tmp_path / "nowhere")
    assert missing_engine(nowhere) == f"{nowhere} ps must succeed, got: it is not installed"
    (tmp_path / "engine" / "unreachable").touch()
    assert "Cannot connect to the Docker daemon" in missing_engine(engine)
    with pytest.raises(RuntimeError, match="Cannot connect to the Docker daemon"):
        async with opened(engine):
            pass


@needs_bwrap
async def test_a_container_that_is_gone_is_a_failure_and_no_exit_code(
    engine: str, tmp_path: Path
) -> None:
    async with opened(engine) as sandbox:
        (name,) = os.listdir(tmp_path / "engine" / "containers")
        running = asyncio.create_task(sandbox.run(["sleep", "600"], {}, 600.0))
        await sandbox.write("x", b"")
        subprocess.run([engine, "rm", "--force", name], check=True)
        with pytest.raises(RuntimeError, match="must succeed, got"):
            await running
        for ask in (sandbox.run(["true"], {}, 60.0), sandbox.write("x", b""), sandbox.read("x")):
            with pytest.raises(RuntimeError, match="must succeed, got"):
                await ask


@needs_bwrap
async def test_what_the_engine_says_itself_is_no_programs_end(engine: str, tmp_path: Path) -> None:
    async with opened(engine) as sandbox:
        (tmp_path / "engine" / "says").write_text("docker is another program here\n")
        ran = await sandbox.run(["sh", "-c", "echo mine >&2; exit 1"], {}, 60.0)
        assert (ran.exit_code, ran.stderr) == (1, "mine\n")
        much = "import sys; sys.stderr.write('x' * 10**6)"
        assert (
            await sandbox.run([os.path.realpath(sys.executable), "-c", much], {}, 60.0)
        ).exit_code == 0
        (tmp_path / "engine" / "broken").touch()
        with pytest.raises(RuntimeError, match=r"exec must succeed, got: .* cannot be entered"):
            await sandbox.run(["true"], {}, 60.0)


@needs_bwrap
async def test_programs_start_in_the_images_folder_where_none_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "image" / "work").mkdir(parents=True)
    (tmp_path / "image" / "work" / "there.txt").write_text("there")
    config = {"WorkingDir": "/work", "User": str(os.getuid())}
    images = {"a:1": {"config": config, "folder": str(tmp_path / "image")}}
    engine = make_engine(tmp_path / "engine", images)
    async with opened(engine, "a:1", home=None, folders=("/tests",)) as sandbox:
        ran = await sandbox.run(["sh", "-c", "pwd; cat there.txt; ls -d /tests"], {}, 60.0)
        assert ran.stdout.split() == ["/work", "there/tests"]
        await sandbox.write("own/b.txt", b"b")
        assert await sandbox.read("/work/own/b.txt") == b"b"
        assert await sandbox.read("there.txt") == b"there"


@needs_bwrap
def test_the_forwarder_runs_where_there_is_no_python_and_no_shell() -> None:
    command, files = docker.own_python()
    words = ["bwrap", "--unshare-pid", "--proc", "/proc"]
    words += [] if os.geteuid() == 0 else ["--unshare-user"]
    for source, target in files.items():
        words += ["--ro-bind", source, target]
    done = subprocess.run(
        [*words, "--", *command, "keep", "/nowhere", "4000", ""],
        input='["make", "/a/b"]\n["write", "/a", "/a/c", "eA==", false]\n["read", "/a", "/a/c"]\n'
        '["read", "/a", "/a/d"]\n["end"]\n',
        capture_output=True,
        text=True,
        check=True,
    )
    told = done.stdout.splitlines()
    assert told[:4] == ['{"found": "/"}', *['{"found": null}'] * 2, '{"found": "eA=="}']
    assert "FileNotFoundError" in told[4]
    assert told[5:] == ['{"found": 0}']


STARTED = """
import asyncio, sys
from llamarl.scoring.sandbox.docker import ContainerSandbox
async def main():
    sandbox = ContainerSandbox(sys.argv[1], sys.argv[2], "http://127.0.0.1:40009/x/v1")
    await sandbox.start()
    running = asyncio.create_task(sandbox.run(["sleep", "600"], {}, 600.0))
    await sandbox.write("x", b"")
    print("ready", flush=True)
    await running
asyncio.run(main())
"""


def start_one(engine: str, folder: Path) -> subprocess.Popen[str]:
    """Return a process that has a container in which a program runs."""
    process = subprocess.Popen(
        [sys.executable, "-c", STARTED, engine, IMAGE],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


async def until_gone(folder: Path, pattern: str) -> None:
    end_s = time.monotonic() + 60
    while [*folder.glob(pattern)]:
        assert time.monotonic() < end_s, f"{[*folder.glob(pattern)]} is left"
        await asyncio.sleep(0.02)


@needs_bwrap
@pytest.mark.full
async def test_a_container_ends_with_the_process_that_was_killed_and_the_next_cleans_up(
    engine: str, own_folder: Path, tmp_path: Path
) -> None:
    process = start_one(engine, own_folder)
    process.send_signal(signal.SIGKILL)
    process.wait()
    await until_gone(tmp_path, "engine/containers/*")  # as its standard input has ended
    assert len([*own_folder.glob("llamarl-container-*")]) == 1
    async with opened(engine):
        assert len([*own_folder.glob("llamarl-container-*")]) == 1  # its own
    assert not [*own_folder.glob("*llamarl-container-*")]


@needs_bwrap
@pytest.mark.full
async def test_the_next_process_removes_containers_that_were_left_and_none_that_is_at_work(
    engine: str, own_folder: Path, tmp_path: Path
) -> None:
    left = own_folder / "llamarl-container-left"
    left.mkdir()
    (left / "engine").write_text(engine)
    other = own_folder / "llamarl-container-of-another-engine"
    other.mkdir()
    (other / "engine").write_text("another")
    run = [engine, "run", "--rm", "-i", "--pull", "never", "--name", "left", "--network", "none"]
    run += ["--label", f"llamarl={left}", "--memory", "99999999", "--memory-swap", "99999999"]
    run += ["--mount", f"type=bind,src={left},dst=/left,readonly", "--entrypoint", "/usr/bin/sleep"]
    alone = subprocess.Popen([*run, IMAGE, "600"])
    at_work = start_one(engine, own_folder)
    await until_gone(tmp_path, "engine/containers/left")
    alone.wait()
    async with opened(engine) as sandbox:
        assert (await sandbox.run(["true"], {}, 60.0)).exit_code == 0
        assert len([*(tmp_path / "engine" / "containers").iterdir()]) == 2
    assert not left.exists()
    assert other.exists()
    assert at_work.poll() is None
    at_work.kill()
    at_work.wait()
    await until_gone(tmp_path, "engine/containers/*")
