"""A headless Chromium that is driven over two pipes: the DevTools protocol, and what a user does.

Needs `chromium` on the PATH, and no package: https://chromedevtools.github.io/devtools-protocol.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-default-apps", "--disable-dev-shm-usage", "--remote-debugging-pipe"),
]
LIMIT_S = 60.0
READ, WRITE = 3, 4  # where Chromium reads commands and writes answers
KEYS = {"ArrowDown": 40, "ArrowUp": 38, "Enter": 13}


class Browser:
    """One page. `requests` are the addresses that it asked for, `errors` what its console says."""

    def __init__(self, program: str, profile: str) -> None:
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        # Out of the way of the numbers that Chromium uses.
        ends = [fcntl.fcntl(each, fcntl.F_DUPFD, 10) for each in (commands, answers)]

        def connect() -> None:
            os.dup2(ends[0], READ)
            os.dup2(ends[1], WRITE)

        self.process = subprocess.Popen(
            [program, *OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(READ, WRITE),
            preexec_fn=connect,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for each in (commands, answers, *ends):
            os.close(each)
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._number, self._unread = 0, b""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    _session: str | None = None

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command. RuntimeError if it fails, or takes too long."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end_s = time.monotonic() + LIMIT_S
        while True:
            answer = self._next(end_s - time.monotonic(), method)
            if answer.get("id") == self._number:
                break
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        found: dict[str, Any] = answer["result"]
        return found

    def _next(self, limit_s: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._read], [], [], max(0.0, limit_s))
            data = os.read(self._read, 2**20) if ready else b""
            if not data:
                raise RuntimeError(f"{method}: no answer, Chromium's code {self.process.poll()}")
            self._unread += data
        text, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        event, parameters = message.get("method"), message.get("params", {})
        if event == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(parameters["exceptionDetails"]))
        elif event == "Log.entryAdded":
            self.errors.append(parameters["entry"]["text"])
        return message

    def show(
        self, address: str, width: int = 1280, height: int = 860, theme: str = "light"
    ) -> None:
        """Open a page of `llamarl view`, or another hash of the one that is open."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.ask("Emulation.setEmulatedMedia", features=features)
        self.ask("Page.navigate", url=address)
        self.wait(f"location.href === {json.dumps(address)} && document.readyState === 'complete'")
        self.settle()

    def settle(self) -> None:
        """Wait until the page shows what its address says."""
        self.wait("document.body.dataset.shown === location.hash")

    def leave(self) -> None:
        """Open nothing."""
        self.ask("Page.navigate", url="about:blank")
        self.wait("location.href === 'about:blank'")

    def value(self, script: str) -> Any:
        """What an expression is, as JSON."""
        found = self.ask(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait(self, script: str, limit_s: float = 10.0) -> None:
        """Until an expression is true."""
        end_s = time.monotonic() + limit_s
        while not self.value(script):
            if time.monotonic() > end_s:
                raise AssertionError(f"never true: {script}; {self.errors}")
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        """What is to be read of the first element that matches."""
        found: str = self.value(f"document.querySelector({json.dumps(selector)}).innerText")
        return found

    def texts(self, selector: str) -> list[str]:
        """Of all elements that match."""
        query = f"document.querySelectorAll({json.dumps(selector)})"
        found: list[str] = self.value(f"[...{query}].map((each) => each.innerText)")
        return found

    def style(self, selector: str, name: str) -> str:
        """A computed style of the first element that matches."""
        element = f"document.querySelector({json.dumps(selector)})"
        found: str = self.value(f"getComputedStyle({element}).getPropertyValue('{name}')")
        return found

    def point(self, selector: str) -> None:
        """Move the mouse onto the middle of the first element that matches."""
        query = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{query}.scrollIntoView({{block: 'nearest'}})")
        box = self.value(f"{query}.getBoundingClientRect().toJSON()")
        self._x, self._y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        self._mouse("mouseMoved")

    def click(self, selector: str) -> None:
        """Click on it."""
        self.point(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self._mouse(kind, button="left", clickCount=1)
        self.settle()

    def _mouse(self, kind: str, **more: Any) -> None:
        self.ask("Input.dispatchMouseEvent", type=kind, x=self._x, y=self._y, **more)

    def write(self, selector: str, text: str) -> None:
        """Write into an input field, in place of what is there."""
        self.value(f"document.querySelector({json.dumps(selector)}).select()")
        self.value(f"document.querySelector({json.dumps(selector)}).focus()")
        self.ask("Input.insertText", text=text)
        self.settle()

    def press(self, key: str) -> None:
        """Press a key, and let it go."""
        for kind in ("rawKeyDown", "keyUp"):
            code = {"windowsVirtualKeyCode": KEYS[key]}
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, **code)
        self.settle()

    def picture(self, path: Path) -> None:
        """Write what is seen as PNG."""
        data = self.ask("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """End the browser."""
        self.process.kill()
        self.process.wait()
        os.close(self._read)
        os.close(self._write)


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser with a new profile. RuntimeError if there is none on this machine."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        raise RuntimeError("the page is shown by chromium: on Debian, apt-get install chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        opened = Browser(program, profile)
        try:
            yield opened
        finally:
            opened.close()
