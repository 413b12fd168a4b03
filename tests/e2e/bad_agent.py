"""An agent that misbehaves in the way that its argument names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.request
from typing import Any

MARK = "llamarl-bad-agent"


def ask(text: str, **options: Any) -> None:
    body = {"messages": [{"role": "user", "content": text}], **options}
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        response.read()


def fork() -> None:
    """Leave a process that would outlive this one."""
    words = ["-c", "import time; time.sleep(600)", MARK]
    subprocess.Popen([sys.executable, *words], start_new_session=True)


if __name__ == "__main__":
    match sys.argv[1]:
        case "never":
            pass
        case "forever":
            while True:
                ask("What is 12*34?")
        case "opens":
            for number in range(1000):
                ask(f"What is {number}*34?")
        case "files":
            ask("What is 12*34?")
            with open("large", "wb") as file:
                while True:
                    file.write(bytes(2**20))
                    file.flush()
        case "prints":
            ask("What is 12*34?")
            for _ in range(200):
                sys.stdout.write("x" * 2**16)
        case "forks":
            ask("What is 12*34?")
            for _ in range(5):
                fork()
        case "bomb":
            ask("What is 12*34?")
            while True:
                fork()
        case "memory":
            ask("What is 12*34?")
            kept = []
            while True:
                kept.append(bytearray(2**24))
        case "sleeps":
            threading.Event().wait(600)
        case "stranger":
            os.environ["OPENAI_BASE_URL"] = os.environ["OPENAI_BASE_URL"].replace("/v1", "0/v1")
            ask("What is 12*34?")
        case "good":
            ask("What is 12*34?")
