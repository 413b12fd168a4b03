"""A stand-in for the command line of docker, as far as llamarl uses it: containers are folders, and
their processes run in bubblewrap. It is started as `python fake_docker.py STATE COMMAND...`; STATE
has `images.json`, with the config and perhaps the folder of each image by its name.

It refuses options that are not in OPTIONS, which a test compares with the help of the real one."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

OPTIONS = {
    "run": {
        **dict.fromkeys(("--rm", "-i"), False),
        **dict.fromkeys(("--pull", "--name", "--label", "--network", "--memory"), True),
        **dict.fromkeys(("--memory-swap", "--pids-limit", "--cpus", "--security-opt"), True),
        **dict.fromkeys(("--user", "--mount", "--entrypoint"), True),
    },
    "exec": {"--workdir": True, "--user": True, "--env": True},
    "ps": {"--all": False, "--quiet": False, "--filter": True},
    "rm": {"--force": False},
    "inspect": {"--size": False, "--format": True},
    "image inspect": {"--format": True},
}
"""By command, its options, and whether each has a value."""
CONTROL, SELF, EVENTS = "/.control", "/.fake_docker.py", "/sys/fs/cgroup/memory.events"
POLL_S = 0.01
DAEMON = "Error response from daemon: "


def fail(text: str, code: int = 1) -> None:
    sys.stderr.write(text + "\n")
    sys.exit(code)


def parsed(command: str, words: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the options, and the words after them."""
    found: dict[str, list[str]] = {}
    while words and words[0].startswith("-"):
        name = words.pop(0)
        if name not in OPTIONS[command]:
            fail(f"unknown flag: {name}", 125)
        found.setdefault(name, []).append(words.pop(0) if OPTIONS[command][name] else "")
    return found, words


def image_of(state: Path, name: str) -> dict:
    images = json.loads((state / "images.json").read_text())
    if name not in images:
        fail(f"{DAEMON}No such image: {name}", 125)
    return images[name]


def run(state: Path, words: list[str]) -> None:
    options, (image, *command) = parsed("run", words)
    assert options["--pull"] == ["never"]
    assert options["--memory"] == options["--memory-swap"]
    (name,), (network,) = options["--name"], options["--network"]
    found, home = image_of(state, image), state / "containers" / name
    root = home / "root"
    shutil.copytree(found.get("folder") or state / "empty", root, symlinks=True)
    for folder in ("proc", "dev", "usr", "tmp", "etc", "run", "sys/fs/cgroup"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for folder in ("bin", "sbin", "lib", "lib64"):
        with suppress(FileExistsError):
            (root / folder).symlink_to(f"usr/{folder}")
    (home / "labels").write_text("\n".join(options["--label"]))
    workdir = found["config"].get("WorkingDir") or "/"
    (root / workdir.lstrip("/")).mkdir(parents=True, exist_ok=True)
    words = ["bwrap", "--die-with-parent", "--as-pid-1", "--unshare-pid", "--unshare-ipc"]
    words += ["--unshare-net"] * (network == "none")
    words += [] if os.geteuid() == 0 else ["--unshare-user"]
    words += ["--bind", str(root), "/", "--proc", "/proc", "--dev", "/dev"]
    for path in dict.fromkeys(("/usr", sys.base_prefix)):
        words += ["--ro-bind", path, path]
    for mount in options["--mount"]:
        fields = dict(each.partition("=")[::2] for each in mount.split(","))
        assert fields.keys() == {"type", "src", "dst", "readonly"}
        words += ["--ro-bind", fields["src"], fields["dst"]]
    words += ["--ro-bind", __file__, SELF, "--chdir", workdir, "--clearenv"]
    words += ["--setenv", "PATH", os.environ["PATH"]]
    memory, (entry,) = options["--memory"][0], options["--entrypoint"]
    words += ["--", os.path.realpath(sys.executable), "-S", SELF, "init", memory, entry, *command]
    process = subprocess.Popen(words)
    (home / "pid").write_text(str(process.pid))
    code = process.wait()
    shutil.rmtree(home, ignore_errors=True)
    sys.exit(code)


def init(memory_bytes: int, command: list[str]) -> None:
    """Be the first process of a container: run its command, and others that are asked for."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with suppress(FileNotFoundError):
        os.unlink(CONTROL)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(CONTROL)
    listening.listen()
    asked: dict[int, socket.socket] = {}
    num_killed = 0
    main = spawn(command, os.getcwd(), {**os.environ}, [0, 1, 2])
    while True:
        if select.select([listening], [], [], POLL_S)[0]:
            one, _ = listening.accept()
            data, files, _, _ = socket.recv_fds(one, 2**20, 3)
            told = json.loads(data)
            pid = spawn(told["command"], told["folder"], {**os.environ, **told["env"]}, files)
            asked[pid] = one
            for file in files:
                os.close(file)
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                code = os.waitstatus_to_exitcode(ended[1])
                code = code if code >= 0 else 128 - code
                if ended[0] == main:
                    os._exit(code)
                if (one := asked.pop(ended[0], None)) is not None:
                    one.send(str(code).encode())
                    one.close()
        sizes = {}
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with suppress(OSError):
                resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                sizes[pid] = resident * os.sysconf("SC_PAGE_SIZE")
        largest = max(sizes, key=lambda pid: sizes[pid])
        if sizes[largest] > memory_bytes:
            num_killed += 1
            Path(EVENTS).write_text(f"oom 1\noom_kill {num_killed}\n")
            os.kill(largest, signal.SIGKILL)


def spawn(command: list[str], folder: str, environment: dict[str, str], files: list[int]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            os.chdir(folder)
            for number, file in enumerate(files):
                os.dup2(file, number)
            os.closerange(3, 100)
            os.execvpe(command[0], command, environment)
        except OSError as error:
            os.write(2, f"OCI runtime exec failed: {error}\n".encode())
        os._exit(127)
    return pid


def execute(state: Path, words: list[str]) -> None:
    options, (name, *command) = parsed("exec", words)
    root = state / "containers" / name / "root"
    if not root.is_dir():
        fail(f"{DAEMON}No such container: {name}")
    os.chdir(root)  # a path of a socket is short
    control = socket.socket(socket.AF_UNIX)
    try:
        control.connect(CONTROL.lstrip("/"))
    except OSError:
        fail(f"{DAEMON}container {name} is not running")
    env = dict(each.partition("=")[::2] for each in options.get("--env", ()))
    told = {"command": command, "env": env, "folder": options["--workdir"][0]}
    socket.send_fds(control, [json.dumps(told).encode()], [0, 1, 2])
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    code = control.recv(16)
    sys.exit(int(code) if code else 137)


def labelled(state: Path, wanted: str) -> list[str]:
    found = []
    for path in sorted(state.glob("containers/*/labels")):
        for label in path.read_text().splitlines():
            if label == wanted or label.partition("=")[0] == wanted:
                found.append(path.parent.name)
    return found


def main(state: Path, words: list[str]) -> None:
    if (state / "says").exists():
        sys.stderr.write((state / "says").read_text())
    if words[0] == "exec" and (state / "broken").exists():
        fail(f"{DAEMON}the container cannot be entered")
    if (state / "unreachable").exists():
        fail("Cannot connect to the Docker daemon at unix:///x.sock. Is the docker daemon running?")
    if words[0] == "run":
        run(state, words[1:])
    elif words[0] == "exec":
        execute(state, words[1:])
    elif words[0] == "ps":
        options, _ = parsed("ps", words[1:])
        key, _, label = options["--filter"][0].partition("=")
        assert key == "label"
        sys.stdout.write("".join(f"{name}\n" for name in labelled(state, label)))
    elif words[0] == "rm":
        for name in parsed("rm", words[1:])[1]:
            home = state / "containers" / name
            if not home.is_dir():
                fail(f"{DAEMON}No such container: {name}")
            with suppress(OSError, ValueError):
                os.kill(int((home / "pid").read_text()), signal.SIGKILL)
            shutil.rmtree(home, ignore_errors=True)
    elif words[0] == "inspect":
        options, (name,) = parsed("inspect", words[1:])
        assert options["--format"] == ["{{.SizeRw}}"]
        root = state / "containers" / name / "root"
        if not root.is_dir():
            fail(f"{DAEMON}No such object: {name}")
        files = (Path(at, each) for at, _, names in os.walk(root) for each in names)
        sys.stdout.write(str(sum(os.lstat(path).st_size for path in files if path.exists())))
    elif words[:2] == ["image", "inspect"]:
        options, names = parsed("image inspect", words[2:])
        for found in [image_of(state, name) for name in names]:
            is_id = options["--format"] == ["{{.Id}}"]
            sys.stdout.write("sha256:0\n" if is_id else json.dumps(found["config"]) + "\n")
    else:
        fail(f"docker: '{words[0]}' is not a docker command.")


if __name__ == "__main__":
    if sys.argv[1] == "init":
        init(int(sys.argv[2]), sys.argv[3:])
    else:
        main(Path(sys.argv[1]), sys.argv[2:])
