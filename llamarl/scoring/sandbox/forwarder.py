"""The first process in a sandbox without a network: it runs a command, and passes connections to
one port of the loopback interface on to a socket in a file, which leads out.

It is started as `python forwarder.py SOCKET PORT COMMAND...`, exits as the command does, and
imports nothing of this package, which it cannot see, and little else: each episode waits for it."""

import os
import socket
import sys
import threading

PART_BYTES = 65536
NOT_FOUND = 127


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


def main(path: str, port: int, command: list[str]) -> int:
    """Run the command and return its exit code; 127 if there is no such program."""
    listening = socket.create_server(("127.0.0.1", port))
    child = os.fork()
    if child == 0:
        listening.close()
        try:
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
            os._exit(NOT_FOUND)
    threading.Thread(target=serve, args=(listening, path), daemon=True).start()
    while True:  # it is the first process of its namespace, so orphans are its children too
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    exit_code = main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
    os._exit(exit_code)
