# ruff: noqa: T201, SIM115 - programs of a model print, and keep files open
"""Programs that try to take more than their limits, in the form of `attacks.py`: each must be ended
or get an error, before it prints FELL."""

from __future__ import annotations

from tests.scoring.attacks import Attack


def many_writes(home: str, port: int, caller: int) -> None:
    import os

    kept = os.open("kept", os.O_RDWR | os.O_CREAT)
    for start in range(2**6):
        os.pwrite(kept, bytes(2**20), start * 2**20)
    print("FELL", os.fstat(kept).st_blocks)


def many_appends(home: str, port: int, caller: int) -> None:
    for k in range(10**4):
        with open(f"{k % 50}", "ab") as file:
            file.write(bytes(2**18))
    print("FELL")


def mapped_files(home: str, port: int, caller: int) -> None:
    import mmap

    kept = []
    for k in range(10**4):
        file = open(f"{k}", "w+b")
        file.truncate(2**20)
        kept.append(mmap.mmap(file.fileno(), 2**20))
        kept[-1][:] = b"x" * 2**20
        file.close()
    print("FELL")


def copied_files(home: str, port: int, caller: int) -> None:
    import os

    with open("first", "wb") as file:
        file.write(bytes(2**20))
    first = os.open("first", os.O_RDONLY)
    for k in range(10**4):
        for copy in (
            lambda to: os.sendfile(to, first, 0, 2**20),
            lambda to: os.copy_file_range(first, to, 2**20, 0),
            lambda to: os.posix_fallocate(to, 0, 2**20),
        ):
            to = os.open(f"{copy.__code__.co_firstlineno}.{k}", os.O_WRONLY | os.O_CREAT)
            copy(to)
            os.close(to)
    print("FELL")


def files_without_names(home: str, port: int, caller: int) -> None:
    import os
    import time

    for _ in range(9):
        if os.fork() == 0:
            kept = [open(f"{os.getpid()}.{k}", "wb") for k in range(40)]
            for file in kept:
                os.unlink(file.name)
            for file in kept:
                file.write(bytes(2**21))
                file.flush()
            print("FELL", flush=True)
            time.sleep(60)
    while True:
        os.wait()


def mapped_files_without_names(home: str, port: int, caller: int) -> None:
    import mmap
    import os
    import time

    kept = []
    for k in range(40):
        file = os.open(f"{k}", os.O_RDWR | os.O_CREAT)
        os.unlink(f"{k}")
        os.ftruncate(file, 2**21)
        kept.append(mmap.mmap(file, 2**21))
        os.write(file, bytes(2**21))
        os.close(file)
    print("FELL", flush=True)
    time.sleep(60)


def many_names(home: str, port: int, caller: int) -> None:
    import os

    open("first", "w").close()
    for k in range(10**5):
        os.mkdir(f"folder{k}")
        os.symlink("x" * 50, f"link{k}")
        os.link("first", f"other{k}")
    print("FELL")


def deep_folders(home: str, port: int, caller: int) -> None:
    import os

    for _ in range(10**5):
        os.mkdir("d" * 250)
        os.chdir("d" * 250)
        open("file", "wb").write(bytes(4096))
    print("FELL")


def memory_of_children(home: str, port: int, caller: int) -> None:
    import os
    import time

    for _ in range(6):
        if os.fork() == 0:
            kept = bytearray(40 * 2**20)
            time.sleep(60)
            print("FELL", len(kept))
    while True:
        os.wait()


def memory_in_buffers(home: str, port: int, caller: int) -> None:
    import os
    import socket
    import time

    for _ in range(9):
        if os.fork() == 0:
            kept = [socket.socketpair() for _ in range(25)]
            for pair in kept:
                for end in pair:
                    end.setblocking(False)
                    try:
                        while True:
                            end.send(bytes(2**12))
                    except BlockingIOError:
                        pass
            time.sleep(60)
            print("FELL")
    while True:
        os.wait()


def memory_in_pipes(home: str, port: int, caller: int) -> None:
    import os
    import time

    for _ in range(28):
        if os.fork() == 0:
            for _ in range(28):
                os.set_blocking((pipe := os.pipe())[1], False)
                os.write(pipe[1], bytes(2**16))
            time.sleep(60)
            print("FELL")
    while True:
        os.wait()


def many_threads(home: str, port: int, caller: int) -> None:
    import threading
    import time

    threading.stack_size(2**15)
    for _ in range(10**3):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    print("FELL", flush=True)


def many_processes(home: str, port: int, caller: int) -> None:
    import os
    import time

    for _ in range(10**3):
        if os.fork() == 0:
            time.sleep(60)
    print("FELL", flush=True)


TAKING: list[Attack] = [
    many_writes,
    many_appends,
    mapped_files,
    copied_files,
    files_without_names,
    mapped_files_without_names,
    many_names,
    deep_folders,
    memory_of_children,
    memory_in_buffers,
    memory_in_pipes,
    many_threads,
    many_processes,
]
