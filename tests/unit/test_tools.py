"""Every tool says what it is for and is run by a test; benchmarks write one shape of file."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from harness import Bench, dump, is_met, read, shown, turns

from tests.e2e.forks import Forks
from tests.places import ROOT
from tests.unit.small_runs import (
    ARITHMETIC,
    BENCHES,
    ELSEWHERE,
    PROGRAMS,
    Found,
)

TOOLS = ROOT / "tools"
DESCRIBES = re.compile(r"(ArgumentParser|Bench)\(.*__main__", re.DOTALL)
DESCRIBED = sorted(path for path in TOOLS.glob("*.py") if DESCRIBES.search(path.read_text()))
QUICK = {  # under 2 seconds
    "bench_controller": ["--actors=0", "--replicas=4", "--trainer-ranks=16", "--rollouts=256"],
}


def run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """The tool's main, in this process."""
    monkeypatch.setattr(sys, "argv", [f"tools/{name}.py", *arguments])
    runpy.run_path(str(TOOLS / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize("path", DESCRIBED, ids=lambda path: path.stem)
def test_a_tool_says_what_it_is_for(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        run(path.stem, monkeypatch, "--help")
    assert not end.value.code
    said = " ".join(capsys.readouterr().out.split())
    purpose = path.read_text().lstrip('r"').split("\n")[0]
    assert purpose.rstrip(".") in said
    assert "--json" in said or not path.stem.startswith("bench_")


@pytest.mark.parametrize("name", QUICK)
def test_a_quick_benchmark_writes_the_shape_of_all(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "figures.json"
    run(name, monkeypatch, *QUICK[name], f"--json={file}")
    check_shape(file, name)


def check_shape(file: Path, name: str) -> None:
    document = json.loads(file.read_text())
    keys = {"bench", "commit", "date", "machine", "command", "figures", "rounds"}
    assert document.keys() == keys
    tool = name.partition(",")[0]
    assert document["bench"] == name.removeprefix("bench_").replace(", ", "_")
    assert document["machine"]["cores"] > 0
    assert document["command"].startswith(f"python tools/{tool}.py ")
    assert document["command"].endswith("--json FILE")
    assert document["figures"]
    for figure in document["figures"]:
        assert {"name", "value", "unit"} <= figure.keys(), figure
        assert figure.keys() <= {"name", "value", "unit", "case", "spread", "goal"}, figure


def check_gpu(found: Found) -> None:
    assert found.pop("") == {"left_out": "memory"}
    errors = {name: figures.pop("error") for name, figures in found.items()}
    assert errors == dict.fromkeys(("generation", "training", "publish", "offload", "loop"), "")
    for name, figures in found.items():
        assert all(value >= 0 for value in figures.values()), name
    assert found["publish"]["copied_bytes"] > 0
    assert found["loop"]["sync_trained_tokens"] > 0


def check_probe(found: Found) -> None:
    assert found.pop("") == {"left_out": "attend, pinned"}
    errors = {name: figures["error"] for name, figures in found.items() if "error" in figures}
    names = ("ceilings", "int_mm", "fingerprints", "gemm", "sdpa", "ipc", "nccl", "decode")
    assert errors == dict.fromkeys((*names, "trainer"), "")
    answers = ("right_with_bytes", "refused_with_bytes", "wrong_with_bytes")
    asked = [figures.get(name, []) for figures in found.values() for name in answers]
    assert sum(map(len, asked)) == 2 * 8 * 10 * 3, "layouts, rows, bytes and columns"
    said = {name: value for figures in found.values() for name, value in figures.items()}
    assert said.keys() >= {"product_tflop_per_s", "layer_ms", "head_ms", "in_out_us"}
    for figures in found.values():
        assert figures.get("sums_wrong_with_bytes", []) == []
        assert {figures.get(name, True) for name in ("arrived", "is_the_cpus", "is_copied")} == {
            True
        }
        assert figures.get("largest_difference", 0) < 0.05
    assert found["nccl, one rank"]["sum"] == 4
    assert "RuntimeError" in found["nccl, no peer"]["raised"]
    assert found["decode, 4 rows"]["tokens_per_s"] > 0


@pytest.mark.long
@pytest.mark.parametrize("name", BENCHES)
def test_a_small_run_of_a_benchmark_finds_what_it_must(
    name: str, forks: Forks, tmp_path: Path
) -> None:
    arguments, check = BENCHES[name]
    tool = name.partition(",")[0]
    done = forks.run(str(TOOLS / f"{tool}.py"), *arguments, "--json=figures.json", where=tmp_path)
    assert done.returncode == 0, done.stderr
    check_shape(tmp_path / "figures.json", name)
    check(read(tmp_path / "figures.json"))


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_small_run_of_a_tool_leaves_what_it_must(name: str, forks: Forks, tmp_path: Path) -> None:
    arguments, check, code = PROGRAMS[name]
    tool = str(TOOLS / f"{name.partition(',')[0]}.py")
    done = forks.run(tool, *arguments, where=tmp_path)
    assert done.returncode == code, done.stderr
    check(tmp_path, done.stdout)


def test_every_tool_is_run_by_a_test() -> None:
    programs = {path.stem for path in TOOLS.glob("*.py") if "__main__" in path.read_text()}
    small = {name.partition(",")[0] for name in (*BENCHES, *PROGRAMS)}
    assert small.isdisjoint(ELSEWHERE)
    assert programs == small | ELSEWHERE.keys()
    assert {name for name, test in ELSEWHERE.items() if test == ARITHMETIC} == QUICK.keys()
    for name, test in ELSEWHERE.items():
        file, _, function = test.partition("::")
        assert f"def {function}(" in (ROOT / file).read_text(), name


GPU_SESSION = TOOLS / "gpu_session" / "session.sh"
DONE = re.compile(r"^\[\d+ s\] (\w+) rc=(\d+) ", re.MULTILINE)
RUNS = ("billion_none", "billion_file", "quickstart", "quickstart_adapters")


@pytest.mark.long
def test_a_session_for_a_gpu_runs_each_of_its_parts_on_a_cpu(tmp_path: Path) -> None:
    parts = {
        "probe": {"probe"},
        "tests": {"tests", "check"},
        "speed": {"bench_generation", "bench_training", "bench_publish", "bench_offload"}
        | {"bench_memory", "bench_loop"},
        "runs": {"model", *RUNS},
    }
    environment = {**os.environ, "DEVICE": "cpu", "OUT": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment["PYTHON"] = sys.executable
    command = ["bash", str(GPU_SESSION), *parts]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)
    found = dict(DONE.findall((tmp_path / "logs" / "session.log").read_text()))
    assert found == dict.fromkeys(set().union(*parts.values()), "0"), done.stdout
    assert done.returncode == 0
    with tarfile.open(tmp_path / "logs.tgz") as packed:
        names = packed.getnames()
    assert {f"logs/{name}.log" for name in found} <= {*names}
    assert {f"logs/{name}/metrics.jsonl" for name in RUNS} <= {*names}
    check_probe(read(tmp_path / "logs" / "probe.json"))
    files = sorted((tmp_path / "logs").glob("bench_*.json"))
    check_gpu({case: values for file in files for case, values in read(file).items()})


def test_a_session_names_a_part_that_it_does_not_have(tmp_path: Path) -> None:
    environment = {**os.environ, "OUT": str(tmp_path)}
    command = ["bash", str(GPU_SESSION), "probe", "all"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("must be probe, tests, speed or runs, got all\n")


SECTIONS = """
import os, pathlib, time
from sections import Facts

def whole(setting):
    yield Facts({"bytes": 1, "is_cuda": setting.is_cuda})
    yield Facts({"bytes": 2}, "second half")

def ends(setting):
    yield Facts({"written": pathlib.Path("figures.json").read_text().count("bytes")})
    os._exit(3)

def raises(setting):
    yield Facts({"bytes": 3})
    raise ValueError("one line\\nand another")

def hangs(setting):
    time.sleep(10_000)
"""
PROGRAM = """
import sys
sys.path[:0] = [TOOLS, "."]
import sections
from harness import Bench
from sections import Section
NAMES = ["whole", "ends", "card", "raises", "hangs"]
LIMITS = {"hangs": 1e-3}
if __name__ == "__main__":
    bench = Bench("What these are for.")
    bench.parse()
    made = {
        name: Section(
            measure=f"parts:{name}", limit_s=LIMITS.get(name, 600), needs_gpu=name == "card"
        )
        for name in NAMES
    }
    sections.run(bench, made, NAMES, device="cpu", is_tiny=True)
"""


@pytest.mark.long
def test_what_a_section_found_stays_however_it_or_a_later_one_ends(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(SECTIONS)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("TOOLS", repr(str(TOOLS))))
    command = [sys.executable, str(program), "--json=figures.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    found = read(tmp_path / "figures.json")
    assert found.pop("") == {"left_out": "card"}
    assert found.pop("whole, second half") == {"bytes": 2}
    for figures in found.values():
        assert figures.pop("section_s") >= 0
    assert found == {
        "whole": {"bytes": 1, "is_cuda": False, "error": ""},
        "ends": {"written": 2, "error": "the process ended with code 3"},
        "raises": {"bytes": 3, "error": "ValueError: one line"},
        "hangs": {"error": "took longer than 0.01 s"},
    }


def test_in_every_second_round_the_ways_go_backwards() -> None:
    assert list(turns(["a", "b"], 3)) == [
        (0, "a"),
        (0, "b"),
        (1, "b"),
        (1, "a"),
        (2, "a"),
        (2, "b"),
    ]


def test_a_goal_is_met_by_every_number_or_missed() -> None:
    assert is_met({"value": 1.2, "goal": ">= 1.2"})
    assert not is_met({"value": [1.3, 1.1], "goal": ">= 1.2"})
    assert not is_met({"value": None, "spread": [0.006, 0.012], "goal": "<= 0.01"})
    assert is_met({"value": None, "goal": "<= 1"}) is None
    assert is_met({"value": 3}) is None
    assert not is_met({"value": 1.0, "goal": "> 1.0"})
    with pytest.raises(ValueError, match="a goal must begin"):
        is_met({"value": 1, "goal": "about 1"})
    missed = {"value": 0.24, "unit": "", "spread": [0.2, 0.3], "goal": ">= 0.7"}
    assert shown(missed) == "0.24 (0.2 to 0.3) (goal >= 0.7, **missed**)"
    assert shown({"value": 158700, "unit": "rows/s"}) == "158,700 rows/s"


def test_a_benchmark_that_is_run_again_keeps_the_notes_of_its_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "mine.json"
    file.write_text(dump({"bench": "mine", "figures": [], "notes": ["Why."]}))
    monkeypatch.setattr(sys, "argv", ["tools/bench_mine.py", "--json", str(file)])
    bench = Bench("What mine does.", {"ratio": ">= 2"})
    bench.parse()
    bench.add_medians({"one": [{"ratio": 1.0}, {"ratio": 4.0}, {"ratio": 3.0}]})
    bench.write()
    document = json.loads(file.read_text())
    assert document["notes"] == ["Why."]
    assert document["figures"] == [
        {"name": "ratio", "value": 3.0, "unit": "", "case": "one", "spread": [1.0, 4.0]}
        | {"goal": ">= 2"}
    ]
