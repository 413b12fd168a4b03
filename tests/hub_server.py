"""A Hub on the loopback interface, for the real client: models and data sets of a few kilobytes."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".parquet", ".arrow", ".bin")
API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?")
FILE = re.compile(r"(?:/(datasets))?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Hub:
    """`repositories`: "models/ORG/NAME" -> commit -> path -> bytes; `branches`: such a name with
    "@main" -> commit. `gated`: those that refuse files. `cut`: paths whose next transfer breaks off
    in the middle, so often. `slow`: paths whose transfer takes a second per tenth. `stuck`: paths
    whose transfer stops in the middle, which sets `is_stuck`, until `goes_on` is set. `wrong`:
    paths whose bytes are damaged on the way. `sizes`: what the list says instead, `lists`: all of
    it. `dribbles`: the API sends a byte a second. `asked`: method and path of every request,
    `begins` of each transfer."""

    repositories: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    cut: dict[str, int] = field(default_factory=dict)
    slow: set[str] = field(default_factory=set)
    stuck: set[str] = field(default_factory=set)
    is_stuck: threading.Event = field(default_factory=threading.Event)
    goes_on: threading.Event = field(default_factory=threading.Event)
    wrong: set[str] = field(default_factory=set)
    sizes: dict[str, object] = field(default_factory=dict)
    lists: dict[str, object] = field(default_factory=dict)
    dribbles: bool = False
    asked: list[tuple[str, str]] = field(default_factory=list)
    begins: list[tuple[str, int]] = field(default_factory=list)
    url: str = ""

    def add(self, repository: str, files: dict[str, bytes] | Path, branch: str = "main") -> str:
        """A commit with these files, or those of a folder, at the head of a branch; which one."""
        if isinstance(files, Path):
            every = (path for path in files.rglob("*") if path.is_file())
            files = {str(path.relative_to(files)): path.read_bytes() for path in every}
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.repositories.setdefault(repository, {})[commit] = files
        self.branches[f"{repository}@{branch}"] = commit
        return commit

    def fetched(self) -> set[str]:
        """The names of all files of which bytes were asked."""
        return {path.rpartition("/")[2] for method, path in self.asked if method == "FILE"}


def digest_of(path: str, content: bytes) -> str:
    """What the Hub calls the content by."""
    if path.endswith(LARGE):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve `hub` at `hub.url`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append((self.command, path))
            if found := API.fullmatch(path):
                self.answer(*found.groups())
            elif found := FILE.fullmatch(path):
                self.give(found[1] or "models", *found.groups()[1:])
            else:
                self.refuse(404, "")

        def refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def commit_of(self, kind: str, repository: str, revision: str | None) -> str | None:
            full = f"{kind}/{repository}"
            commits = hub.repositories.get(full)
            commit = hub.branches.get(f"{full}@{revision or 'main'}", revision)
            if commits is None:
                self.refuse(401, "RepoNotFound")
            elif commit not in commits:
                self.refuse(404, "RevisionNotFound")
            else:
                return commit
            return None

        def answer(self, kind: str, repository: str, what: str | None, rev: str | None) -> None:
            commit = self.commit_of(kind, repository, rev)
            if commit is None:
                return
            files = hub.repositories[f"{kind}/{repository}"][commit]
            body: object = {"id": repository, "sha": commit, "siblings": [], "private": False}
            if what == "tree":
                listed = [self.entry(path, content) for path, content in files.items()]
                body = hub.lists.get(f"{kind}/{repository}", listed)
            text = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            for start in range(len(text)) if hub.dribbles else ():
                self.wfile.write(text[start : start + 1])
                time.sleep(1)
            self.wfile.write(text)

        def entry(self, path: str, content: bytes) -> dict[str, object]:
            size = hub.sizes.get(path, len(content))
            found = {"type": "file", "path": path, "size": size, "oid": "0" * 40}
            large = {"oid": digest_of(path, content), "size": size, "pointerSize": 130}
            return found | ({"lfs": large} if path.endswith(LARGE) else {})

        def give(self, kind: str, repository: str, revision: str, path: str) -> None:
            commit = self.commit_of(kind, repository, revision)
            if commit is None:
                return
            if f"{kind}/{repository}" in hub.gated:
                return self.refuse(403, "GatedRepo")
            content = hub.repositories[f"{kind}/{repository}"][commit].get(path)
            if content is None:
                return self.refuse(404, "EntryNotFound")
            begin = int((self.headers.get("Range") or "bytes=0-").split("=")[1].split("-")[0])
            self.send_response(206 if begin else 200)
            self.send_header("ETag", f'"{digest_of(path, content)}"')
            self.send_header("X-Repo-Commit", commit)
            self.send_header("Content-Length", str(len(content) - begin))
            if begin:
                total = len(content)
                self.send_header("Content-Range", f"bytes {begin}-{total - 1}/{total}")
            self.end_headers()
            if self.command == "GET":
                hub.asked.append(("FILE", path))
                hub.begins.append((path, begin))
                body = bytes(255 - each for each in content) if path in hub.wrong else content
                if hub.cut.get(path, 0) > 0:
                    hub.cut[path] -= 1
                    self.wfile.write(body[begin : begin + (len(body) - begin) // 2])
                    self.close_connection = True
                elif path in hub.slow:
                    step = len(body) // 10
                    for start in range(0, len(body), step):
                        self.wfile.write(body[start : start + step])
                        time.sleep(1)
                elif path in hub.stuck:
                    half = begin + (len(body) - begin) // 2
                    self.wfile.write(body[begin:half])
                    hub.is_stuck.set()
                    hub.goes_on.wait()
                    with suppress(OSError):  # nobody may be there any more
                        self.wfile.write(body[half:])
                else:
                    self.wfile.write(body[begin:])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
