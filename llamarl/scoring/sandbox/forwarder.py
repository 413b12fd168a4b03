"""The first process in a sandbox without a network: it passes connections to one port of the
loopback interface on to a socket in a file, which leads out.

Started as `python forwarder.py SOCKET PORT COMMAND...` it runs a command, and exits as that does.
With `keep SOCKET PORT USER` it keeps a container, in which others run, and follows orders from
standard input until that ends; with `start COMMAND...` it becomes one of those. It imports nothing
of this package, which it cannot see, and little else: each episode waits for it."""

import os
import signal
import socket
import sys
import threading
import time

PART_BYTES = 65536
NOT_FOUND = 127
STARTED = "llamarl: started\n"  # on standard error, before whatever the command prints
KEEP, START = "keep", "start"
END_S = 20.0  # a killed process that still exists then is stuck in the kernel
GONE_S = 0.005  # between two looks whether killed processes are gone
ANYBODY = -1, -1  # the user and the group that a file has as it is made
OOM_FILES = "/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"


def pump(source: socket.socket, target: socket.socket) -> None:
    """Pass on what comes, until it ends."""
    try:
        while data := source.recv(PART_BYTES):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:  # one end is gone, so is the other
        for each in (source, target):
            each.close()


def serve(listening: socket.socket, path: str) -> None:
    """Pass on each connection, both ways."""
    while True:
        near, _ = listening.accept()
        far = socket.socket(socket.AF_UNIX)
        far.connect(path)
        for ends in ((near, far), (far, near)):
            threading.Thread(target=pump, args=ends, daemon=True).start()


def execute(command: list[str]) -> None:
    """Become this command, or exit with 127 if there is no such program."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(NOT_FOUND)


def main(path: str, port: int, command: list[str]) -> int:
    """Run the command and return its exit code; 127 if there is no such program."""
    listening = socket.create_server(("127.0.0.1", port))
    child = os.fork()
    if child == 0:
        listening.close()
        execute(command)
    threading.Thread(target=serve, args=(listening, path), daemon=True).start()
    while True:  # it is the first process of its namespace, so orphans are its children too
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def keep(path: str, port: int, user: str) -> None:
    """Follow the orders of standard input, each a list in JSON, and say for each an object with
    what it `found` or its `error`; first the folder in which this was started. What is made belongs
    to `user`."""
    import base64
    import json

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps orphans
    listening = socket.create_server(("127.0.0.1", port))
    threading.Thread(target=serve, args=(listening, path), daemon=True).start()
    owner = _ids(user)
    told: dict[str, object] = {"found": os.getcwd()}
    while True:
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
        if not (line := sys.stdin.readline()):
            return
        name, *arguments = json.loads(line)
        try:
            if name == "end":
                told = {"found": end()}
            elif name == "make":
                make_folder(arguments[0], owner)
                told = {"found": None}
            elif name == "empty":
                empty(arguments[0], arguments[1], owner)
                told = {"found": None}
            elif name == "write":
                top, place, data, is_executable = arguments
                write(top, place, base64.b64decode(data), is_executable, owner)
                told = {"found": None}
            else:
                told = {"found": base64.b64encode(read(*arguments)).decode()}
        except (OSError, ValueError, RecursionError) as error:
            told = {"error": str(error), "kind": type(error).__name__}


def end() -> int:
    """End all other processes, and return how many the kernel has ended for lack of memory."""
    from contextlib import suppress

    end_s = time.monotonic() + END_S
    own = {1, os.getpid()}
    while {int(name) for name in os.listdir("/proc") if name.isdigit()} - own:
        if time.monotonic() > end_s:
            raise OSError("a process cannot be ended")
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        time.sleep(GONE_S)
    for path in OOM_FILES:
        try:
            with open(path) as file:
                words = [line.split() for line in file]
        except OSError:
            continue
        return sum(int(count) for key, count in words if key == "oom_kill")
    return 0


def empty(top: str, path: str, owner: tuple[int, int]) -> None:
    """Make an empty folder at this path in the folder `top`, in the place of whatever lies there; a
    link in the place of `top` goes too."""
    import shutil

    for folder in dict.fromkeys((top, path)):
        if folder != top:
            refuse_links(top, os.path.dirname(path))
        if os.path.islink(folder) or (os.path.exists(folder) and not os.path.isdir(folder)):
            os.unlink(folder)
    if os.path.isdir(path):
        shutil.rmtree(path)
    make_folder(path, owner)


def write(
    top: str, path: str, data: bytes, is_executable: bool, owner: tuple[int, int] = ANYBODY
) -> None:
    """Write a file in the place of whatever file lies there."""
    refuse_links(top, path)
    make_folder(os.path.dirname(path), owner)
    new = f"{os.path.dirname(path)}/{os.urandom(8).hex()}"
    with open(new, "xb") as file:  # what is at the path may be a pipe, which blocks
        file.write(data)
    os.chmod(new, 0o755 if is_executable else 0o644)
    os.chown(new, *owner)
    os.replace(new, path)


def read(top: str, path: str) -> bytes:
    """Return what is in a file. Raises ValueError if it is no plain file."""
    refuse_links(top, path)
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"a file of a sandbox must be a plain file to be read, got {path}")
    with open(path, "rb") as file:
        return file.read()


def refuse_links(top: str, path: str) -> None:
    """Raise ValueError if a program has put a link on the way to this file."""
    while path != top:
        if os.path.islink(path):
            raise ValueError(f"a file of a sandbox must be no link, got {path}")
        path = os.path.dirname(path)


def make_folder(path: str, owner: tuple[int, int] = ANYBODY) -> None:
    """Make a folder, with those that it lies in."""
    if not os.path.isdir(path):
        make_folder(os.path.dirname(path), owner)
        os.mkdir(path, 0o755)
        os.chown(path, *owner)


def _ids(user: str) -> tuple[int, int]:
    """Return the ids of a user as an image names it: NAME, ID, or either with :GROUP; -1 leaves
    them."""
    import grp
    import pwd

    if not user:
        return ANYBODY
    name, _, group = user.partition(":")
    if name.isdigit():
        ids = int(name), -1
    else:
        ids = pwd.getpwnam(name).pw_uid, pwd.getpwnam(name).pw_gid
    if group:
        ids = ids[0], int(group) if group.isdigit() else grp.getgrnam(group).gr_gid
    return ids


if __name__ == "__main__":
    if sys.argv[1] == START:
        os.write(2, STARTED.encode())
        execute(sys.argv[2:])
    if sys.argv[1] == KEEP:
        keep(sys.argv[2], int(sys.argv[3]), sys.argv[4])
        os._exit(0)
    exit_code = main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
    os._exit(exit_code)
