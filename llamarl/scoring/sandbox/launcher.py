"""The file that a sandboxed program starts as, already within the container.

It writes STARTED once the program is sandboxed, and leaves nothing of its own in the program: no
descriptor, no right, no process. It imports nothing of this package, which it cannot see."""

import ctypes
import json
import os
import resource
import sys
from typing import Any

STARTED = b"started\n"
PR_SET_SECCOMP, FILTER, PR_SET_NO_NEW_PRIVS = 22, 2, 38
CAPABILITY_VERSION = 0x20080522
NO_SUID, NO_DEVICES = 2, 4

libc = ctypes.CDLL(None, use_errno=True)
libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]


class Program(ctypes.Structure):
    """A filter of system calls, in the form of the kernel."""

    _fields_ = (("length", ctypes.c_ushort), ("lines", ctypes.c_char_p))


def main(told: dict[str, Any]) -> None:
    """Become the program, by the instructions of `containers.py`."""
    if told["mount"]:
        folder, options = told["folder"].encode(), told["mount"].encode()
        _check(libc.mount(b"tmpfs", folder, b"tmpfs", NO_SUID | NO_DEVICES, options))
    if told["stdin"]:
        os.dup2(os.open(told["stdin"], os.O_RDONLY), 0)
    os.closerange(3, 2**20)
    if told["user"] is not None:
        os.setgroups([])
        os.setresgid(*[told["user"]] * 3)
        os.setresuid(*[told["user"]] * 3)
    os.chdir(told["folder"])
    for name, value in told["limits"].items():
        _limit(getattr(resource, name), value)
    _give_up_rights(bytes.fromhex(told["filter"]))
    os.write(1, STARTED)
    os.execve(told["command"][0], told["command"], told["environment"])


def _limit(kind: int, value: int) -> None:
    """Set a limit, no higher than it is, as only root may raise one."""
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _give_up_rights(lines: bytes) -> None:
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    _check(libc.capset(header, (ctypes.c_uint32 * 6)()))
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    program = Program(len(lines) // 8, lines)
    _check(libc.prctl(PR_SET_SECCOMP, FILTER, ctypes.addressof(program), 0, 0))


def _check(answer: int) -> None:
    if answer != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
