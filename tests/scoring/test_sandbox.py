"""Programs that a model wrote, in a container of this machine. How they try to get out of it is in
test_escapes.py."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from llamarl.core.config import Config, RewardConfig
from llamarl.core.records import Prompt, StageResult, StageStatus
from llamarl.recipe.composition import CONF_FOLDER
from llamarl.recipe.inputs import check_sandbox
from llamarl.scoring.reward_functions import read_tests, reward_code
from llamarl.scoring.sandbox.containers import (
    PREFIX,
    Kind,
    ProgramLimits,
    Ran,
    Sandlock,
    Unsandboxed,
    chosen_container,
    lacking,
    missing,
    run_in,
    run_program,
)
from llamarl.scoring.sandbox.folders import remove_left_once
from llamarl.scoring.tool_calls import SHOWN_CHARS, make_python, shorten
from llamarl.scoring.user_code.watchdog import descendants
from tests.recipe.composing import compose_file
from tests.scoring.attacked import HAD
from tests.scoring.reward_pool import completions, running

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(missing()), reason=f"this Linux lacks {missing()}"),
]
LIMITS = ProgramLimits(seconds=20.0)  # that none of these needs, on a machine with other work


def run(source: str, stdin: str = "", limits: ProgramLimits = LIMITS) -> Ran:
    before = descendants(os.getpid())
    found = run_program(source, stdin, limits)
    assert descendants(os.getpid()) <= before, "no process is left behind"
    return found


def test_a_program_that_does_no_harm_runs() -> None:
    found = run("import json, math\nprint(json.dumps([input(), math.comb(5, 2)]))", "é\n")
    assert (found.stdout, found.exit_code, found.is_good) == ('["\\u00e9", 10]\n', 0, True)
    found = run("open('a.txt', 'w').write('x' * 9)\nprint(len(open('a.txt').read()))")
    assert found.stdout == "9\n"
    found = run("import sys\nsys.exit('no')")
    assert (found.exit_code, found.stderr, found.is_good) == (1, "no\n", False)


def test_time_is_limited_whatever_the_program_does() -> None:
    for source in (
        "while True: pass",
        "import time\ntime.sleep(60)",
        "import signal\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
    ):
        start_s = time.monotonic()
        found = run(source, limits=ProgramLimits(seconds=0.5))
        assert (found.exit_code, found.ended_for) == (None, "time")
        assert time.monotonic() - start_s < 20.0


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_is_cut_off(stream: str) -> None:
    limits = replace(LIMITS, output_bytes=1000)
    found = run(f"import sys\nwhile True: sys.{stream}.write('x' * 999)", limits=limits)
    assert (found.ended_for, len(getattr(found, stream))) == ("output", 1000)


def test_a_program_that_a_signal_has_ended_is_told_as_a_shell_tells_it() -> None:
    for number in (9, 6, 11):
        assert run(f"import os\nos.kill(os.getpid(), {number})").exit_code == 128 + number


def test_the_least_limits_let_a_program_run() -> None:
    least = ProgramLimits(memory_bytes=32 * 2**20, disk_bytes=0, output_bytes=3, num_processes=1)
    assert run("print(1)", limits=least) == Ran(exit_code=0, stdout="1\n")
    assert not run("import os\nos.write(os.open('a', 65), b'x')", limits=least).is_good


@pytest.mark.parametrize("kind", [Sandlock, Unsandboxed])
def test_what_killed_processes_have_left_is_removed_by_the_next(
    kind: Kind, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if kind not in [*HAD, Unsandboxed]:
        pytest.skip("this Linux has no Landlock, or no sandlock")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, other = tmp_path / f"{PREFIX}left", tmp_path / "other"
    for folder in (left, other):
        (folder / "scratch").mkdir(parents=True)
    remove_left_once.cache_clear()
    with running_program(kind, "import time; time.sleep(60)") as folder:
        remove_left_once.cache_clear()
        assert run_in(kind, "print(1)", "", LIMITS).stdout == "1\n"
        assert {*tmp_path.iterdir()} == {other, folder}
    assert [*tmp_path.iterdir()] == [other]


@contextmanager
def running_program(kind: Kind, source: str) -> Iterator[Path]:
    """The folder that a program has meanwhile."""
    before = {*Path(tempfile.gettempdir()).iterdir()}
    container = kind(source, "", LIMITS)
    try:
        (folder,) = {*Path(tempfile.gettempdir()).iterdir()} - before
        yield folder
    finally:
        container.close()


def test_without_a_container_time_and_output_are_limited() -> None:
    free = ProgramLimits(seconds=20.0, output_bytes=100, is_sandboxed=False)
    assert run("print(open('/etc/passwd').read())", limits=free).stdout
    assert run("while True: pass", limits=replace(free, seconds=0.5)).ended_for == "time"
    assert run("while True: print('x')", limits=free).ended_for == "output"


def test_where_nothing_contains_one_line_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sandlock

    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(sandlock, "landlock_abi_version", lambda: 3)
    with fresh_choice():
        line = missing()
        with pytest.raises(RuntimeError, match="programs cannot be sandboxed here: bubblewrap: "):
            run_program("print(1)", "", LIMITS)
    assert line.startswith("bubblewrap: the program bwrap is not installed; sandlock: Landlock ABI")
    assert "(Linux 6.12), this kernel" in line
    assert "\n" not in line


def test_without_namespaces_one_line_says_what_programs_can_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    if Sandlock not in HAD:
        pytest.skip("this Linux has no Landlock, or no sandlock")
    (tmp_path / "rm").symlink_to(shutil.which("rm") or "")
    monkeypatch.setenv("PATH", str(tmp_path))
    with fresh_choice():
        check_sandbox(code_recipe())
        assert run_program("print(1)", "", LIMITS).stdout == "1\n"
    (line,) = caplog.messages
    for word in ("user, mount, pid and network namespaces", "the program bwrap is not installed"):
        assert word in line
    assert "\n" not in line


def test_with_namespaces_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    if lacking():
        pytest.skip("this Linux has no namespaces, or no bubblewrap")
    check_sandbox(code_recipe())
    assert caplog.messages == []


def code_recipe() -> Config:
    minimum = ["model.checkpoint=x", "data.prompts=x.jsonl"]
    return compose_file(CONF_FOLDER, "config", [*minimum, "reward.functions=[code]"])


@contextmanager
def fresh_choice() -> Iterator[None]:
    """The container is chosen anew, here and afterwards."""
    chosen_container.cache_clear()
    try:
        yield
    finally:
        chosen_container.cache_clear()


def score(completion: str, tests: object, program_s: float = 20.0) -> float:
    prompt = Prompt(prompt_id=3, text="", token_ids=(1,), fields={"answer": tests})
    config = RewardConfig(functions=["code"], program_s=program_s)
    return asyncio.run(reward_code(prompt, completion, True, config))


ADD = "Here:\n```python\na, b = map(int, input().split())\nprint(a + b)\n```\n"
CASES = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 6", "output": "11"}]


def test_a_program_is_right_if_it_passes_every_case() -> None:
    assert score(ADD, CASES) == 1.0
    assert score(ADD, {"inputs": ["1 2"], "outputs": ["3"]}) == 1.0
    assert score(ADD, [*CASES, {"input": "1 1", "output": "3"}]) == 0.0
    assert score("print(3)", CASES) == 0.0
    assert score("no program at all", CASES) == 0.0
    assert score("```\nwhile True: pass\n```", CASES[:1], program_s=0.5) == 0.0


def test_programs_of_rewards_end_with_them() -> None:
    """In the processes of a run's scorer, which are killed when a reward takes too long."""
    config = RewardConfig(functions=["code"], program_s=60.0, timeout_s=1.5)
    prompt = Prompt(prompt_id=3, text="", token_ids=(1,), fields={"answer": CASES})

    async def main() -> list[StageResult]:
        async with running(config, None) as pool:
            return await pool.score(completions("import time; time.sleep(60)", prompt=prompt))

    before = descendants(os.getpid())
    (hung,) = asyncio.run(main())
    assert hung.status is StageStatus.HUNG
    assert descendants(os.getpid()) <= before


def test_a_program_is_right_if_it_passes_its_asserts() -> None:
    program = "```py\ndef add(a, b): return a + b\n```"
    assert score(program, "assert add(1, 2) == 3") == 1.0
    assert score(program, ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]) == 0.0
    assert score("import sys\nsys.exit(0)", "assert False") == 0.0, "an early exit is no pass"


@pytest.mark.parametrize("tests", [None, "", [], {"inputs": ["1"]}, [{"input": "1"}], 3, ["", 1]])
def test_tests_of_another_form_name_the_line(tests: object) -> None:
    prompt = Prompt(prompt_id=3, text="", token_ids=(1,), fields={"answer": tests})
    with pytest.raises(ValueError, match=r"^line 3: 'answer' .* must hold asserts, or cases"):
        read_tests(prompt, RewardConfig(functions=["code"]))


def test_the_tool_returns_what_the_program_prints() -> None:
    python = make_python(LIMITS)

    async def main() -> list[str]:
        sources = ("print(6 * 7)", "1 / 0", "while True: print('x')", "import os; os._exit(3)")
        return [await python(source) for source in sources]

    printed, raised, endless, left = asyncio.run(main())
    assert printed == "42"
    assert raised.endswith("ZeroDivisionError: division by zero")
    assert endless.endswith("(ended: too much output)")
    assert left == "(ended with 3)"
    assert len(shorten("x" * 10**6)) < SHOWN_CHARS + 100
