"""What becomes of a caller's own loop when something in it fails."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest

from llamarl.controller.library import LibraryEngines
from llamarl.core.errors import UserCodeError
from tests.e2e.commands import Command
from tests.e2e.test_library import RECIPE, run


def test_an_error_in_the_background_reaches_every_call(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe"
    recipe.mkdir()
    for name in ("checkpoint", "prompts.jsonl"):
        (recipe / name).symlink_to(RECIPE / name)
    text = (RECIPE / "run.yaml").read_text()
    (recipe / "run.yaml").write_text(
        re.sub(r"reward:(\n  .*)+", "reward: {functions: [task]}", text)
    )
    (recipe / "task.py").write_text("def reward(prompt, completion):\n    return 1 / 0\n")

    async def work(engines: LibraryEngines) -> None:
        groups = await engines.generate(itertools.islice(engines.prompts, 8))
        for _ in range(2):
            with pytest.raises(UserCodeError, match="ZeroDivisionError"):
                await engines.score(groups)
        with pytest.raises(UserCodeError, match="ZeroDivisionError"):
            await engines.generate(["1+1="])

    run(
        work,
        tmp_path / "run",
        "data.held_out=null",
        recipe=recipe,
        executors=["generator", "scorer"],
    )


LEAVING = """
import asyncio, os, signal, sys
import llamarl
from llamarl.core.errors import NoGenerator

async def block(run_dir):
    async with llamarl.start_engines({recipe!r}, run_dir=run_dir, executors={parts}) as engines:
        if "trainer" in {parts}:
            await engines.sync_weights()
        futures = await engines.submit([next(engines.prompts) for _ in range(32)])
        {how}

if __name__ == "__main__":
    try:
        asyncio.run(block(sys.argv[1]))
    except (KeyError, NoGenerator) as error:
        print(error, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("parts", "how", "said"),
    [
        pytest.param(
            *(("generator", "scorer", "trainer"), "raise KeyError('of the caller')"),
            "'of the caller'",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ("generator",),
            "os.kill(engines.executors.generators[0].pids[0], signal.SIGKILL);"
            "await asyncio.gather(*futures)",
            "every generator replica is lost",
            marks=pytest.mark.long,
        ),
    ],
    ids=["raised", "killed"],
)
def test_an_exception_in_the_block_leaves_no_process(
    parts: Sequence[str], how: str, said: str, tmp_path: Path
) -> None:
    script = tmp_path / "leaving.py"
    script.write_text(LEAVING.format(recipe=str(RECIPE), parts=parts, how=how))
    mark = f"LLAMARL_TEST_{uuid.uuid4().hex}"
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, mark: "1", "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == f"{said}\n"
        assert Command(process, mark).family() == [process.pid]
        assert not list((tmp_path / "run").glob(".rendezvous-*"))
        assert json.loads((tmp_path / "run" / "environment.json").read_text())["python"]
    finally:
        _, warned = process.communicate(timeout=30)  # which ends its input
        assert "never retrieved" not in warned
        assert process.returncode == 0
