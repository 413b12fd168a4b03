"""Programs that a model wrote try to get out of their container, in every way that it limits."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path

import pytest

from llamarl.config import RewardConfig
from llamarl.environments import contained
from llamarl.environments.contained import ProgramLimits, Ran, missing, run_program
from llamarl.environments.ready_tools import SHOWN_CHARS, make_python, shorten
from llamarl.environments.rewards import code
from llamarl.types import Prompt
from llamarl.user_code.supervisor import descendants

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"this Linux lacks {missing()}")
LIMITS = ProgramLimits(seconds=3.0)


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


@pytest.mark.parametrize("path", ["/etc/passwd", str(Path(__file__)), "/proc/1/environ", "/root"])
def test_no_file_can_be_read_or_listed(path: str) -> None:
    found = run(f"import os\nprint(os.listdir({path!r}) if os.path.isdir({path!r}) else 1)")
    assert "PermissionError" in found.stderr or found.stdout == "1\n"
    assert "PermissionError" in run(f"print(open({path!r}).read())").stderr


def test_no_file_can_be_written_but_in_the_scratch_folder(tmp_path: Path) -> None:
    target = tmp_path / "evil"
    for source in (
        f"open({str(target)!r}, 'w')",
        f"import os\nos.symlink({str(tmp_path)!r}, 'link')\nopen('link/evil', 'w')",
        f"import os\nos.mkdir({str(target)!r})",
        f"import os\nos.rename('program.py', {str(target)!r})",
    ):
        run(source)  # some see what they wrote, in layers that are gone afterwards
        assert not target.exists()
        assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    "source",
    [
        "s = socket.socket()\ns.connect(('127.0.0.1', PORT))",
        "s = socket.socket()\ns.bind(('127.0.0.1', 0))",
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.sendto(b'x', ('127.0.0.1', PORT))",
        "s = socket.socket(socket.AF_INET6)\ns.connect(('::1', PORT))",
        "s = socket.socket(socket.AF_UNIX)\ns.connect('PATH')",
        "s = socket.socket(socket.AF_UNIX)\ns.connect('\\0llamarl-test')",
    ],
)
def test_no_socket_can_be_reached(source: str, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as named:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        named.bind(str(path))
        named.listen()
        with socket.socket(socket.AF_UNIX) as abstract:
            abstract.bind("\0llamarl-test")
            abstract.listen()
            port = str(tcp.getsockname()[1])
            text = source.replace("PORT", port).replace("PATH", str(path))
            found = run(f"import socket\n{text}\nprint('reached')")
    assert "reached" not in found.stdout
    assert not found.is_good


def test_time_is_limited_whatever_the_program_does() -> None:
    for source in (
        "while True: pass",
        "import time\ntime.sleep(60)",
        "import signal\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
    ):
        start_s = time.monotonic()
        found = run(source, limits=ProgramLimits(seconds=0.5))
        assert (found.exit_code, found.ended_for) == (None, "time")
        assert time.monotonic() - start_s < 3.0


def test_what_a_program_leaves_behind_ends_with_it() -> None:
    start_s = time.monotonic()
    found = run(
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  time.sleep(60)\nprint('done')"
    )
    assert found.stdout == "done\n"
    assert time.monotonic() - start_s < 2.5


def test_memory_processes_and_disk_are_limited() -> None:
    assert not run("x = bytearray(10**9)\nprint(len(x))").is_good
    many = "import os, time\nfor i in range(100):\n  if os.fork() == 0: time.sleep(1); os._exit(0)"
    assert "BlockingIOError" in run(f"{many}\nprint('all')").stderr
    found = run("for i in range(100): open(f'{i}', 'wb').write(b'x' * 10**6)\nprint('all')")
    assert "No space left" in found.stderr


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_is_cut_off(stream: str) -> None:
    limits = ProgramLimits(seconds=5.0, output_bytes=1000)
    found = run(f"import sys\nwhile True: sys.{stream}.write('x' * 999)", limits=limits)
    assert (found.ended_for, len(getattr(found, stream))) == ("output", 1000)


def test_limits_cannot_be_raised_and_no_other_process_can_be_hurt() -> None:
    found = run("import os\nos.kill(os.getppid(), 9)\nprint('killed')")
    assert (found.exit_code, found.ended_for) == (None, "its own doing")
    found = run(f"import os\nos.kill({os.getpid()}, 0)\nprint('reached')")
    assert "reached" not in found.stdout
    for source in (
        "import ctypes\nassert ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0",
        "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0",
        "import ctypes\nassert ctypes.CDLL(None).mount(b'a', b'.', b'tmpfs', 0, 0) == 0",
        "import os\nos.chroot('.')",
    ):
        assert not run(source).is_good


def test_what_is_written_in_place_of_the_result_is_no_result() -> None:
    found = run("import os\nos.kill(os.getppid(), 19)", limits=ProgramLimits(seconds=0.5))
    assert not found.is_good


def test_without_a_container_time_and_output_are_limited() -> None:
    free = ProgramLimits(seconds=0.5, output_bytes=100, is_contained=False)
    assert run("print(open('/etc/passwd').read())", limits=free).stdout
    assert run("while True: pass", limits=free).ended_for == "time"
    assert run("while True: print('x')", limits=free).ended_for == "output"


def test_where_the_kernel_cannot_contain_one_line_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sandlock

    monkeypatch.setattr(sandlock, "landlock_abi_version", lambda: 3)
    assert "Landlock ABI 6 (Linux 6.12), this kernel" in missing.__wrapped__()
    monkeypatch.setattr(contained, "run_program", lambda *args: Ran(exit_code=1))
    monkeypatch.setattr(sandlock, "landlock_abi_version", lambda: 7)
    assert "a container in which Python runs" in missing.__wrapped__()


def score(completion: str, tests: object) -> float:
    prompt = Prompt(prompt_id=3, text="", token_ids=(1,), fields={"answer": tests})
    config = RewardConfig(functions=["code"], program_s=2.0)
    return asyncio.run(code.reward(prompt, completion, True, config))


ADD = "Here:\n```python\na, b = map(int, input().split())\nprint(a + b)\n```\n"
CASES = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 6", "output": "11"}]


def test_a_program_is_right_if_it_passes_every_case() -> None:
    assert score(ADD, CASES) == 1.0
    assert score(ADD, {"inputs": ["1 2"], "outputs": ["3"]}) == 1.0
    assert score(ADD, [*CASES, {"input": "1 1", "output": "3"}]) == 0.0
    assert score("print(3)", CASES) == 0.0
    assert score("no program at all", CASES) == 0.0
    assert score("```\nwhile True: pass\n```", CASES[:1]) == 0.0


def test_a_program_is_right_if_it_passes_its_asserts() -> None:
    program = "```py\ndef add(a, b): return a + b\n```"
    assert score(program, "assert add(1, 2) == 3") == 1.0
    assert score(program, ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]) == 0.0
    assert score("import sys\nsys.exit(0)", "assert False") == 0.0, "an early exit is no pass"


@pytest.mark.parametrize("tests", [None, "", [], {"inputs": ["1"]}, [{"input": "1"}], 3, ["", 1]])
def test_tests_of_another_form_name_the_line(tests: object) -> None:
    prompt = Prompt(prompt_id=3, text="", token_ids=(1,), fields={"answer": tests})
    with pytest.raises(ValueError, match=r"^line 3: 'answer' .* must hold asserts, or cases"):
        code.read_tests(prompt, RewardConfig(functions=["code"]))


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
