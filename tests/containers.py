"""The stand-in for docker's command line, ready to be used as `environment.engine`."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

from tests import fake_docker

IMAGE = "tests/plain:1"


def make_engine(folder: Path, images: dict[str, dict] | None = None) -> str:
    """Return a program that knows these images, by name with their "config" and "folder"; else one
    plain image."""
    for name in ("empty", "containers"):
        (folder / name).mkdir(parents=True)
    (folder / "images.json").write_text(json.dumps(images or {IMAGE: {"config": {}}}))
    program, python = folder / "docker", os.path.realpath(sys.executable)
    command = shlex.join([python, "-S", fake_docker.__file__, str(folder)])
    program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    program.chmod(0o755)
    return str(program)
