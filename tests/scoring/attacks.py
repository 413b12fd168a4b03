# ruff: noqa: T201, SIM115, B023 - programs of a model print, and keep files open
"""Programs that try to do harm, as functions. Each prints FELL for whatever it could do.

`home` is a folder of decoys outside the container, `port` a server on the loopback interface,
`caller` the pid of the process that runs the program. They import what they need, for their source
is all that is run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from llamarl.scoring.sandbox.limits import NUMBERS, machine

LISTED = [int(word) for word in NUMBERS[machine()].split() if word.isdigit()]
"""Numbers of the calls that some form of is allowed."""
Attack = Callable[[str, int, int], None]


def source_of(attack: Attack, home: str, port: int, caller: int) -> str:
    """A program that makes this attack."""
    called = f"{attack.__name__}({home!r}, {port}, {caller})"
    shared = "\n".join(inspect.getsource(each) for each in (system_call, refused, tried))
    start = f"from __future__ import annotations\nfrom typing import Any\nLISTED = {LISTED}\n"
    return f"{start}{shared}\n{inspect.getsource(attack)}\n{called}\n"


def system_call(number: int, *given: Any) -> tuple[int, int]:
    """What a call returned, and its error."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    args = [each if isinstance(each, bytes) else ctypes.c_long(each) for each in given]
    ctypes.set_errno(0)
    return libc.syscall(ctypes.c_long(number), *args), ctypes.get_errno()


def refused(what: str, number: int, *given: Any) -> None:
    """Make a call that has to be refused by the filter, whatever its arguments."""
    found, error = system_call(number, *given)
    if found != -1 or error not in (1, 38):
        print("FELL", what, number, found, error, flush=True)


def tried(what: str, act: Any) -> None:
    """Do what has to raise."""
    try:
        found = act()
    except OSError:
        return
    print("FELL", what, found, flush=True)


def any_socket(home: str, port: int, caller: int) -> None:
    import socket

    for family in range(1, 46):
        for kind in (1, 2, 3, 4, 5, 10):
            for protocol in (0, 6, 17, 132, 255, 262):
                tried(f"{family} {kind}", lambda *a: socket.socket(family, kind, protocol))


def pairs(home: str, port: int, caller: int) -> None:
    import array
    import socket

    for family in range(2, 46):
        tried(f"{family}", lambda: socket.socketpair(family, socket.SOCK_STREAM))
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for address in ("\0llamarl-test", f"{home}/socket"):
        tried(address, lambda: a.sendto(b"x", address))
        tried(address, lambda: a.connect(address))
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))]
    tried("rights", lambda: a.sendmsg([b"x"], rights))
    tried("buffer", lambda: a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**24))
    print("a pair works", a.send(b"xyz"), b.recv(9))


def modes_owners_times(home: str, port: int, caller: int) -> None:
    import os

    file = f"{home}/decoy"
    tried("chmod", lambda: os.chmod(file, 0))
    tried("chmod", lambda: os.chmod(home, 0o777))
    tried("chown", lambda: os.chown(file, 1, 1))
    tried("lchown", lambda: os.lchown(file, 1, 1))
    tried("utime", lambda: os.utime(file, (1, 1)))
    tried("setxattr", lambda: os.setxattr(file, "user.x", b"y"))
    tried("removexattr", lambda: os.removexattr(file, "user.kept"))
    tried("truncate", lambda: os.truncate(file, 0))
    tried("unlink", lambda: os.unlink(file))
    tried("rename", lambda: os.rename(file, file + "2"))
    tried("link", lambda: os.link(file, "linked"))
    tried("mkdir", lambda: os.mkdir(f"{home}/made"))
    tried("symlink", lambda: os.symlink("/", f"{home}/made"))
    tried("write", lambda: open(file, "a"))
    tried("read", lambda: open(file).read())
    tried("list", lambda: os.listdir(home))
    tried("execute", lambda: os.execv(f"{home}/script", ["script"]))


def descriptors_without_reading(home: str, port: int, caller: int) -> None:
    import os

    for path in (f"{home}/decoy", home, "/proc/self/root", "/"):
        try:
            found = os.open(path, os.O_PATH)
        except OSError:
            continue
        tried("fchmod", lambda: os.fchmod(found, 0))
        tried("fchown", lambda: os.fchown(found, 1, 1))
        tried("utime", lambda: os.utime(f"/proc/self/fd/{found}", (1, 1)))
        tried("read", lambda: os.read(found, 1))
        tried("reopened", lambda: os.listdir(f"/proc/self/fd/{found}"))
        tried("at", lambda: os.open("decoy", os.O_RDONLY, dir_fd=found))
        tried("made", lambda: os.mkdir("made", dir_fd=found))


def every_call_that_is_not_listed(home: str, port: int, caller: int) -> None:
    import os

    on_x86 = os.uname().machine == "x86_64"
    # 335 and 336 end whoever makes them, whatever a filter says.
    for number in {*range(1200)} - {*LISTED} - ({335, 336} if on_x86 else {*()}):
        refused("not listed", number, 0, 0, 0, 0, 0, 0)
    if on_x86:
        for number in range(600):
            refused("other form", 0x40000000 + number, 0, 0, 0, 0, 0, 0)


def other_words(home: str, port: int, caller: int) -> None:
    """Calls in the form of 32-bit programs: chmod is 15 there."""
    import ctypes
    import mmap
    import os

    if os.uname().machine != "x86_64":
        return
    code = b"\xb8\x14\x00\x00\x00\xcd\x80\xc3"  # mov eax, 20 (getpid); int 0x80; ret
    memory = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 7)
    memory.write(code)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    print("FELL", ctypes.CFUNCTYPE(ctypes.c_int)(start)())


def arguments_of_listed_calls(home: str, port: int, caller: int) -> None:
    import os

    on_x86 = os.uname().machine == "x86_64"
    clone, control, device, limit = (56, 157, 16, 302) if on_x86 else (220, 167, 29, 261)
    for bit in range(7, 32):
        if not 0x017D4FFF >> bit & 1:
            refused("clone", clone, 1 << bit | 17, 0, 0, 0, 0)
    for option in {*range(1, 100)} - {15, 16}:
        refused("prctl", control, option, 0, 0, 0, 0)
    for command in (0x5412, 0x5414, 0x541D, 0x5423, 0x40049409, 0xC0045878, 0x8910, 0x541E):
        refused("ioctl", device, 0, command, 0)
    for command in (8, 9, 10, 15, 1024, 1026, 1031, 1033, 1036):
        refused("fcntl", 72 if on_x86 else 25, 0, command, 2**20)
    for pid in (1, caller):
        refused("prlimit", limit, pid, 7, 0, 0)
    refused("mmap", 9 if on_x86 else 222, 0, 2**21, 3, 0x40022, -1, 0)
    refused("mmap", 9 if on_x86 else 222, 0, 2**21, 3, 0x21, -1, 0)


def limits_raised(home: str, port: int, caller: int) -> None:
    import resource

    for name in ("AS", "FSIZE", "NOFILE", "CORE", "MEMLOCK", "MSGQUEUE"):
        kind = getattr(resource, f"RLIMIT_{name}")
        try:
            resource.setrlimit(kind, (2**40, 2**40))
        except (OSError, ValueError):
            continue
        print("FELL", name, resource.getrlimit(kind))


def rights_regained(home: str, port: int, caller: int) -> None:
    import os

    tried("setuid", lambda: os.setuid(0))
    tried("setgroups", lambda: os.setgroups([0]))
    tried("chroot", lambda: os.chroot("."))
    tried("nice", lambda: os.nice(-5))
    tried("priority", lambda: os.setpriority(os.PRIO_PROCESS, 0, 19))
    tried("fifo", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))
    tried("affinity", lambda: os.sched_setaffinity(0, {0}))
    tried("node", lambda: os.mknod("node", 0o600 | 0o60000, os.makedev(7, 0)))
    tried("pipe", lambda: os.mkfifo("pipe"))
    tried("memory", lambda: os.memfd_create("x"))


def processes_of_others(home: str, port: int, caller: int) -> None:
    import os

    for pid in {1, os.getppid(), caller}:
        tried("signal", lambda: os.kill(pid, 0))
        tried("pidfd", lambda: os.pidfd_open(pid))
        for name in ("environ", "mem", "maps", "cmdline", "fd/0", "fd/1", "fd/2"):
            tried(name, lambda: open(f"/proc/{pid}/{name}", "rb").read())
            tried(name, lambda: open(f"/proc/{pid}/{name}", "wb"))
        tried("descriptors", lambda: os.listdir(f"/proc/{pid}/fd"))
        tried("adjusted", lambda: open(f"/proc/{pid}/oom_score_adj", "w"))
    for number in range(2, 100):
        tried("open", lambda: os.fstat(number + 1))


def shared_places(home: str, port: int, caller: int) -> None:
    import tempfile

    for folder in ("/dev/shm", "/var/tmp", "/run", "/", "/dev", "/etc", "/usr/lib", "/home"):
        tried(folder, lambda: open(f"{folder}/llamarl-test", "w"))
    for path in ("/etc/passwd", "/proc/self/environ", "/proc/self/mem", "/sys/kernel", "/dev/mem"):
        tried(path, lambda: open(path, "rb").read(1))
    print("a temporary file works", tempfile.TemporaryFile().write(b"x"))


def folders_that_cannot_be_listed(home: str, port: int, caller: int) -> None:
    import os

    for mode in (0, 0o300, 0o100):
        tried(f"mode {mode}", lambda: os.mkdir(f"hidden{mode}", mode))
    tried("mask", lambda: os.umask(0o777))
    tried("mask", lambda: os.umask(0o400))


def sparse_files(home: str, port: int, caller: int) -> None:
    import os

    for power in (30, 34, 40, 62):
        tried(f"{power}", lambda: os.truncate("program.txt", 2**power))
        with open("sparse", "wb") as file:
            tried(f"{power}", lambda: file.truncate(2**power))
            tried(f"{power}", lambda: os.posix_fallocate(file.fileno(), 2**power, 1))
            file.seek(2**power)
            tried(f"{power}", lambda: [file.write(b"x"), file.flush()])
    for k in range(100):  # each within the limit of one file
        with open(f"{k}", "wb") as file:
            file.truncate(2**20)


def memory_that_is_shared(home: str, port: int, caller: int) -> None:
    import mmap

    tried("without a file", lambda: mmap.mmap(-1, 2**20))
    tried("huge pages", lambda: mmap.mmap(-1, 2**21, 0x40022))


ATTACKS: list[Attack] = [
    any_socket,
    pairs,
    modes_owners_times,
    descriptors_without_reading,
    every_call_that_is_not_listed,
    other_words,
    arguments_of_listed_calls,
    limits_raised,
    rights_regained,
    processes_of_others,
    shared_places,
    folders_that_cannot_be_listed,
    sparse_files,
    memory_that_is_shared,
]
