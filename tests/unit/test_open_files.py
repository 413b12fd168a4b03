"""Where few files may be open."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("most", [48, 256])
def test_a_reward_process_finds_room_for_its_channel_where_few_files_may_be_open(most: int) -> None:
    code = (
        "import os, resource\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({most}, {most}))\n"
        "from llamarl.scoring.user_code.worker import _move\n"
        "for _ in range(40):\n"
        "    own = os.open(os.devnull, os.O_RDONLY)\n"
        "    os.close(_move(own, os.O_RDONLY))\n"
        "    os.close(own)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
