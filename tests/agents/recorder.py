"""Runs the command in its arguments, and stands between it and the server of its model: whatever
they say to each other is told at the socket that the first argument names. It leaves a number of
its own in a file, by which the episode is known."""

import http.client
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

OWN_HEADERS = {"host", "connection", "content-length", "transfer-encoding", "accept-encoding"}
SERVER = urlsplit(os.environ["LLAMARL_URL"])
PLACE = sys.argv[1]
LAST_CHARS = 20000
NUMBER = 2 * random.SystemRandom().randrange(1, 2**24)


def tell(found):
    """Tell the test, which listens at a socket in a folder that can be read here."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(PLACE)
        connection.sendall(json.dumps({**found, "episode": NUMBER}).encode())


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def pass_on(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {k: v for k, v in self.headers.items() if k.lower() not in OWN_HEADERS}
        tell({"asked": self.path})
        server = http.client.HTTPConnection(SERVER.hostname, SERVER.port)
        server.request(self.command, self.path, body, headers)
        response = server.getresponse()
        self.send_response(response.status)
        self.send_header("Content-Type", response.headers["Content-Type"])
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        parts, held = [], b""  # one part: the client hears the end once the test has heard it
        while part := response.read1(65536):
            self.write(held)
            parts.append(part)
            held = part
        told = {"method": self.command, "path": self.path, "headers": headers}
        told |= {"body": body.decode(), "status": response.status}
        tell(told | {"response": b"".join(parts).decode()})
        self.write(held)
        self.wfile.write(b"0\r\n\r\n")

    def write(self, part):
        if part:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.flush()

    do_GET = do_POST = do_HEAD = pass_on  # noqa: N815 - named by the standard library

    def log_message(self, *_):
        pass


with open("number.txt", "w") as file:
    file.write(str(NUMBER))
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
server.daemon_threads = True
threading.Thread(target=server.serve_forever, daemon=True).start()
here = f"{SERVER.hostname}:{server.server_address[1]}"
variables = {name: text.replace(SERVER.netloc, here) for name, text in os.environ.items()}
begun_s = time.monotonic()
done = subprocess.run(sys.argv[2:], env=variables, capture_output=True, stdin=subprocess.DEVNULL)
out, err = (each.decode(errors="replace")[-LAST_CHARS:] for each in (done.stdout, done.stderr))
tell({"exit": done.returncode, "out": out, "err": err, "took_s": time.monotonic() - begun_s})
sys.exit(done.returncode)
