"""The limits of a sandboxed program: its system calls, memory and threads."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FREE = """
read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek close close_range dup
dup2 dup3 open openat creat stat fstat lstat newfstatat statx access faccessat faccessat2 getdents
getdents64 getcwd chdir fchdir rmdir unlink unlinkat rename renameat renameat2 link linkat symlink
symlinkat readlink readlinkat truncate ftruncate fallocate fsync fdatasync statfs fstatfs sendfile
copy_file_range fadvise64 msync pipe pipe2 poll ppoll select pselect6 epoll_create epoll_create1
epoll_ctl epoll_wait epoll_pwait eventfd2 recvfrom shutdown getsockname getpeername getsockopt brk
munmap mprotect mremap madvise execve exit exit_group fork vfork wait4 waitid getpid getppid gettid
getpgid getpgrp getsid set_tid_address getuid geteuid getgid getegid getresuid getresgid getgroups
tgkill tkill rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait
sigaltstack pause restart_syscall alarm setitimer getitimer nanosleep clock_nanosleep clock_gettime
clock_getres gettimeofday time times futex set_robust_list get_robust_list rseq arch_prctl
sched_yield sched_getaffinity getcpu getrandom getrusage sysinfo uname getrlimit getpriority
"""
LEAVING_GROUP = "setsid setpgid"
"""Calls that are free where processes are not recognised by their process group."""

NUMBERS = {
    "x86_64": """
read 0 write 1 open 2 close 3 stat 4 fstat 5 lstat 6 poll 7 lseek 8 mmap 9 mprotect 10 munmap 11
brk 12 rt_sigaction 13 rt_sigprocmask 14 rt_sigreturn 15 ioctl 16 pread64 17 pwrite64 18 readv 19
writev 20 access 21 pipe 22 select 23 sched_yield 24 mremap 25 msync 26 madvise 28 dup 32 dup2 33
pause 34 nanosleep 35 getitimer 36 alarm 37 setitimer 38 getpid 39 sendfile 40 sendto 44
recvfrom 45 shutdown 48 getsockname 51 getpeername 52 socketpair 53 getsockopt 55 clone 56 fork 57
vfork 58 execve 59 exit 60 wait4 61 kill 62 uname 63 fcntl 72 fsync 74 fdatasync 75 truncate 76
ftruncate 77 getdents 78 getcwd 79 chdir 80 fchdir 81 rename 82 mkdir 83 rmdir 84 creat 85 link 86
unlink 87 symlink 88 readlink 89 umask 95 gettimeofday 96 getrlimit 97 getrusage 98 sysinfo 99
times 100 getuid 102 getgid 104 geteuid 107 getegid 108 setpgid 109 getppid 110 getpgrp 111
setsid 112 getgroups 115 getresuid 118 getresgid 120 getpgid 121 getsid 124 rt_sigpending 127
rt_sigtimedwait 128 rt_sigsuspend 130 sigaltstack 131 statfs 137 fstatfs 138 getpriority 140
prctl 157 arch_prctl 158 setrlimit 160 gettid 186 tkill 200 time 201 futex 202
sched_getaffinity 204 epoll_create 213 getdents64 217 set_tid_address 218 restart_syscall 219
fadvise64 221 clock_gettime 228 clock_getres 229 clock_nanosleep 230 exit_group 231 epoll_wait 232
epoll_ctl 233 tgkill 234 waitid 247 openat 257 mkdirat 258 newfstatat 262 unlinkat 263 renameat 264
linkat 265 symlinkat 266 readlinkat 267 faccessat 269 pselect6 270 ppoll 271 set_robust_list 273
get_robust_list 274 epoll_pwait 281 fallocate 285 eventfd2 290 epoll_create1 291 dup3 292 pipe2 293
preadv 295 pwritev 296 prlimit64 302 getcpu 309 renameat2 316 getrandom 318 copy_file_range 326
preadv2 327 pwritev2 328 statx 332 rseq 334 clone3 435 close_range 436 faccessat2 439
""",
    "aarch64": """
getcwd 17 eventfd2 19 epoll_create1 20 epoll_ctl 21 epoll_pwait 22 dup 23 dup3 24 fcntl 25 ioctl 29
mkdirat 34 unlinkat 35 symlinkat 36 linkat 37 renameat 38 statfs 43 fstatfs 44 truncate 45
ftruncate 46 fallocate 47 faccessat 48 chdir 49 fchdir 50 openat 56 close 57 pipe2 59 getdents64 61
lseek 62 read 63 write 64 readv 65 writev 66 pread64 67 pwrite64 68 preadv 69 pwritev 70 sendfile 71
pselect6 72 ppoll 73 readlinkat 78 newfstatat 79 fstat 80 fsync 82 fdatasync 83 exit 93
exit_group 94 waitid 95 set_tid_address 96 futex 98 set_robust_list 99 get_robust_list 100
nanosleep 101 getitimer 102 setitimer 103 clock_gettime 113 clock_getres 114 clock_nanosleep 115
sched_getaffinity 123 sched_yield 124 restart_syscall 128 kill 129 tkill 130 tgkill 131
sigaltstack 132 rt_sigsuspend 133 rt_sigaction 134 rt_sigprocmask 135 rt_sigpending 136
rt_sigtimedwait 137 rt_sigreturn 139 getpriority 141 getresuid 148 getresgid 150 times 153
setpgid 154 getpgid 155 getsid 156 setsid 157 getgroups 158 uname 160 getrlimit 163 setrlimit 164
getrusage 165 umask 166 prctl 167 getcpu 168 gettimeofday 169 getpid 172 getppid 173 getuid 174
geteuid 175 getgid 176 getegid 177 gettid 178 sysinfo 179 socketpair 199 getsockname 204
getpeername 205 sendto 206 recvfrom 207 getsockopt 209 shutdown 210 brk 214 munmap 215 mremap 216
clone 220 execve 221 mmap 222 fadvise64 223 mprotect 226 msync 227 madvise 233 wait4 260
prlimit64 261 renameat2 276 getrandom 278 copy_file_range 285 preadv2 286 pwritev2 287 statx 291
rseq 293 clone3 435 close_range 436 faccessat2 439
""",
}
"""The numbers of system calls, by machine; a call that a machine lacks is left out."""
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

EPERM, ENOSYS = 1, 38
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, JUMP_EQUAL, JUMP_LEAST, AND, RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
X32 = 0x40000000  # calls of another form of x86_64, whose numbers have this bit
NUMBER, ARCH, FIRST_ARGUMENT = 0, 4, 16  # offsets in what the kernel shows to a filter


@dataclass(frozen=True)
class Check:
    """A check of a call's argument: the bits in `mask` of the 32-bit `word` of its arguments, which
    have two words each, must be one of `values`; or none of them, if not `is_in`."""

    word: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF
    is_in: bool = True


ALL = 0xFFFFFFFF
THREAD = 0x017D4FFF  # flags of clone that threads, fork and vfork use: no namespace, no tracing
HUGE_PAGES, SHARED_WITHOUT_FILE = 0x40000, 0x21  # of mmap: memory that no process shows as its own
OWNER = 0o700
CHECKED: dict[str, tuple[Check, ...]] = {
    "clone": (Check(0, (0,), mask=ALL ^ THREAD),),
    "mmap": (
        Check(6, (0,), mask=HUGE_PAGES),
        Check(6, (SHARED_WITHOUT_FILE,), mask=SHARED_WITHOUT_FILE, is_in=False),
    ),
    "socketpair": (Check(0, (1,)),),  # of the Unix family: both ends are the program's
    "sendto": (Check(8, (0,)), Check(9, (0,))),  # no address
    # Duplicating, flags, locks, and reading the size of a pipe's buffer are allowed.
    "fcntl": (Check(2, (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)),),
    # Asking for a terminal or readable bytes, and setting blocking and close-on-exec, are allowed.
    "ioctl": (Check(2, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),),
    "prctl": (Check(0, (15, 16)),),  # the name of a thread
    "prlimit64": (Check(0, (0,)),),  # of the process itself, whose limits cannot be raised
    "setrlimit": (),
    "kill": (Check(0, (1,), is_in=False),),
    # A folder that its owner cannot list could not be counted.
    "mkdir": (Check(2, (OWNER,), mask=OWNER),),
    "mkdirat": (Check(4, (OWNER,), mask=OWNER),),
    "umask": (Check(0, (0,), mask=OWNER),),
}
"""Calls that are allowed if all checks of their arguments hold."""
ABSENT = ["clone3"]
"""Calls that the kernel says it lacks, so that libraries do without them: their arguments are in
memory, which a filter cannot read."""


def machine() -> str:
    """Return the kind of this machine, as in NUMBERS."""
    return os.uname().machine


def compile_filter(*, may_leave_group: bool) -> bytes:
    """Return the filter for this machine, as `prctl(PR_SET_SECCOMP)` takes it; with
    `may_leave_group` a program may leave its process group. Raises ValueError where there is no
    list for the machine."""
    if machine() not in NUMBERS:
        raise ValueError(f"system calls must be listed for {machine()}, got {[*NUMBERS]}")
    words = NUMBERS[machine()].split()
    numbers = {name: int(number) for name, number in zip(words[::2], words[1::2], strict=True)}
    lines = [
        _line(LOAD, ARCH),
        _line(JUMP_EQUAL, AUDIT_ARCH[machine()], 1, 0),
        _line(RETURN, KILL),
        _line(LOAD, NUMBER),
        _line(JUMP_LEAST, X32, 0, 1),
        _line(RETURN, REFUSE | EPERM),
    ]
    bodies = {name: [_line(RETURN, REFUSE | ENOSYS)] for name in ABSENT}
    free = FREE + LEAVING_GROUP * may_leave_group
    bodies |= {name: [_line(RETURN, ALLOW)] for name in free.split()}
    for name, checks in CHECKED.items():
        body = [line for check in checks for line in _lines(check)]
        bodies[name] = [*body, _line(RETURN, ALLOW)]
    for name, body in bodies.items():
        if name in numbers:
            lines += [_line(JUMP_EQUAL, numbers[name], 0, len(body)), *body]
    return b"".join([*lines, _line(RETURN, REFUSE | EPERM)])


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _lines(check: Check) -> Iterator[bytes]:
    """Yield the filter's instructions for a check: go on after them if it holds, else refuse."""
    yield _line(LOAD, FIRST_ARGUMENT + 4 * check.word)
    yield _line(AND, check.mask)
    for left in range(len(check.values) - 1, -1, -1):  # so many jumps stand before the refusal
        value = check.values[-1 - left]
        if check.is_in:
            yield _line(JUMP_EQUAL, value, left + 1, 0)
        else:
            yield _line(JUMP_EQUAL, value, left, int(left == 0))
    yield _line(RETURN, REFUSE | EPERM)


KIB = 1024
PIPE_BYTES = 65_536  # that the kernel holds for each at most
SOCKET_LIMIT = Path("/proc/sys/net/core/wmem_default")  # the same for sockets
BLOCK_BYTES = 512  # of st_blocks
FILE_BYTES = 4096  # what each name in a folder counts at least
MAX_DEPTH = 64  # of folders: deeper ones are too much


def children(pid: int) -> set[int]:
    """Return the pids of the processes that `pid` has started. One that starts or ends at this
    moment may be missing."""
    found: set[int] = set()
    for task in _listed(f"/proc/{pid}/task"):
        with suppress(OSError):  # it has ended
            found |= {int(word) for word in Path(task, "children").read_text().split()}
    return found


def below(pid: int) -> set[int]:
    """Return the pids of all descendants of `pid`."""
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        new = children(waiting.pop()) - found
        found |= new
        waiting += new
    return found


def in_group(group: int) -> set[int]:
    """Return the pids of the processes of a process group, whoever their parents are."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[2]) == group:
                found.add(int(folder.name))
    return found


def num_threads(pids: Iterable[int]) -> int:
    """Return the number of threads of these processes together."""
    return sum(len(_listed(f"/proc/{pid}/task")) for pid in pids)


def memory_bytes(pids: Iterable[int], limit: int) -> int:
    """Return the memory of these processes, and of the kernel behind their pipes and sockets, in
    bytes. Shared pages count once where that decides whether the sum is above `limit`."""
    pids = [*pids]
    buffers = _buffer_bytes(pids)
    found = buffers + sum(_resident_bytes(pid) for pid in pids)
    return found if found <= limit else buffers + sum(_shared_out_bytes(pid) for pid in pids)


def disk_bytes(folder: str, pids: Iterable[int], limit: int) -> int:
    """Return the bytes in the blocks of a folder's files, and of deleted files there that these
    processes still have open or mapped. Counting stops above `limit`."""
    pids = [*pids]
    found = dict(_mapped_and_gone(folder, pids)) | dict(_open_and_gone(pids))
    total = sum(found.values())
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for file, size in _below_folder(descriptor):
            total += FILE_BYTES if file in found else max(FILE_BYTES, size)
            found[file] = size
            if total > limit:
                break
    finally:
        os.close(descriptor)
    return total


def _listed(folder: str) -> list[str]:
    """Return the paths in a folder of /proc; none if it is gone."""
    try:
        return [f"{folder}/{name}" for name in os.listdir(folder)]
    except OSError:
        return []


def _own_bytes(pid: int, file: str, names: tuple[str, str]) -> int:
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    found = [line.split()[1] for line in lines if line.startswith(names)]
    return sum(map(int, found)) * KIB


def _resident_bytes(pid: int) -> int:
    with suppress(OSError):  # it has ended
        return _own_bytes(pid, "status", ("VmRSS:", "VmSwap:"))
    return 0


def _shared_out_bytes(pid: int) -> int:
    """Return the memory of a process in bytes, where the kernel tells it with each page that n
    processes share counted as one n-th."""
    with suppress(OSError):
        return _own_bytes(pid, "smaps_rollup", ("Pss:", "SwapPss:"))
    return _resident_bytes(pid)


def _descriptors(pids: Iterable[int]) -> Iterator[str]:
    """Yield the paths below /proc of all descriptors of these processes' threads."""
    for pid in pids:
        for task in _listed(f"/proc/{pid}/task"):
            yield from _listed(f"{task}/fd")


def _buffer_bytes(pids: Iterable[int]) -> int:
    names = set()
    for path in _descriptors(pids):
        with suppress(OSError):
            names.add(os.readlink(path))
    num_sockets = sum(name.startswith("socket:") for name in names)
    num_pipes = sum(name.startswith("pipe:") for name in names)
    socket_bytes = int(SOCKET_LIMIT.read_text()) if num_sockets else 0
    return num_pipes * PIPE_BYTES + num_sockets * socket_bytes


File = tuple[int, int]
"""A file's device and inode."""


def _sized(found: os.stat_result) -> tuple[File, int]:
    return (found.st_dev, found.st_ino), found.st_blocks * BLOCK_BYTES


def _open_and_gone(pids: Iterable[int]) -> Iterator[tuple[File, int]]:
    for path in _descriptors(pids):
        with suppress(OSError):
            found = os.stat(path)
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 0:
                yield _sized(found)


def _mapped_and_gone(folder: str, pids: Iterable[int]) -> Iterator[tuple[File, int]]:
    """Yield deleted files that these processes have mapped. The kernel does not tell their blocks,
    so each counts up to the end of the mapping."""
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                places, _, start, device, inode, *path = line.split(maxsplit=5)
                if path and path[0].startswith(folder) and path[0].endswith(" (deleted)"):
                    first, last = (int(place, 16) for place in places.split("-"))
                    major, minor = (int(number, 16) for number in device.split(":"))
                    file = os.makedev(major, minor), int(inode)
                    yield file, int(start, 16) + last - first


def _below_folder(folder: int, depth: int = 0) -> Iterator[tuple[File, int]]:
    """Yield all that is in an open folder and below it. No link is followed, and entries that
    vanish in the meantime are left out. An entry that is too deep is given again and again, so that
    any limit is exceeded."""
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError, NotADirectoryError):
                found = entry.stat(follow_symlinks=False)
                yield _sized(found)
                while depth > MAX_DEPTH:
                    yield _sized(found)
                if stat.S_ISDIR(found.st_mode):
                    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
                    inner = os.open(entry.name, flags, dir_fd=folder)
                    try:
                        yield from _below_folder(inner, depth + 1)
                    finally:
                        os.close(inner)
