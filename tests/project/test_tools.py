"""Every tool says what it is for and is run by a test; benchmarks write one shape of file, and work
out on spans and shapes written by hand what they should."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from llamarl.metrics.span import Span
from llamarl.publish.layout import RankLayout
from llamarl.publish.reshard import num_bytes, plan

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from bench_controller import results, simulate
from controller_bench.messages import MessageCosts
from controller_bench.simulation import Shape
from harness import Bench, dump, is_met, read, shown, turns
from weights_bench.decoding import longest_gap_s, tokens_per_s
from weights_bench.model import Model, generator_layouts, llama, trainer_layouts

from tests.e2e.forks import Forks
from tests.places import ROOT
from tests.project.small_runs import ARITHMETIC, BENCHES, ELSEWHERE, PROGRAMS, Found

TOOLS = ROOT / "tools"
DESCRIBES = re.compile(r"(ArgumentParser|Bench)\(.*__main__", re.DOTALL)
DESCRIBED = sorted(path for path in TOOLS.glob("*.py") if DESCRIBES.search(path.read_text()))
QUICK = {  # under 2 seconds
    "bench_controller": [
        *("--actors=0", "--replicas=4", "--trainer-ranks=16", "--rollouts=128"),
        "--conversations=2",
    ]
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
def test_a_small_run_finds_what_it_must(name: str, forks: Forks, tmp_path: Path) -> None:
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
    found = " ".join(f"{number}{way}" for number, way in turns(["a", "b"], 3))
    assert found == "0a 0b 1b 1a 2a 2b"


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


def test_a_benchmark_keeps_its_files_notes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


MS = 10**6


def step(start_ms, end_ms, tokens=64):
    return Span(0, "decode", "busy", start_ms * MS, end_ms * MS, {"tokens": tokens})


STEPS = [step(0, 10), step(11, 20), step(26, 36), step(37, 47), step(67, 77)]


def test_the_longest_gap_is_one_between_steps_that_the_window_touches() -> None:
    assert longest_gap_s(STEPS, 0, 46 * MS) == pytest.approx(0.006)
    assert longest_gap_s(STEPS, 22 * MS, 23 * MS) == pytest.approx(0.006)  # nothing but the gap
    assert longest_gap_s(STEPS, 28 * MS, 50 * MS) == pytest.approx(0.020)
    assert math.isnan(longest_gap_s(STEPS, 80 * MS, 90 * MS))


def test_a_step_that_the_window_cuts_counts_in_part() -> None:
    assert tokens_per_s(STEPS, 0, 20 * MS) == pytest.approx(128 / 0.020)
    assert tokens_per_s(STEPS, 5 * MS, 31 * MS) == pytest.approx((32 + 64 + 32) / 0.026)
    assert tokens_per_s(STEPS, 50 * MS, 60 * MS) == 0


def test_the_benchmark_model_is_planned_whole_with_norms_on_both_ranks() -> None:
    model = Model(llama(1, vocab_size=96, hidden_size=64, intermediate_size=160), "bfloat16")
    source, target = [], []
    for rank in range(2):
        for layouts, side in (
            (trainer_layouts(model, rank), source),
            (generator_layouts(model, rank)[0], target),
        ):
            side.append(RankLayout(rank=rank, host="here", parameters=layouts))
    copies = plan(source, target)
    assert num_bytes(copies) == model.num_bytes + 3 * 64 * 2  # three norms more
    assert {copy.source_rank for copy in copies} == {0, 1}


COSTS = MessageCosts(call_s=1e-3, sent_byte_s=0.0, received_byte_s=0.0, ranks_s=1e-3, num_actors=0)
SHAPE = Shape(num_replicas=4, num_trainer_ranks=16, num_groups=16, num_steps=5)


@pytest.mark.parametrize(("num_collectors", "who"), [(0, "generator"), (2, "collector")])
def test_a_small_run_has_and_pays_for_the_calls_of_its_shape(num_collectors: int, who: str) -> None:
    shape = replace(SHAPE, num_collectors=num_collectors)
    load = simulate(shape, COSTS)
    found = results(shape, COSTS, load)
    steps = load.num_steps
    assert steps == SHAPE.num_steps - SHAPE.max_staleness - 1
    for method in ("generator.prepare", "trainer.write", "generator.verify", "generator.commit"):
        assert load.calls[method] == 4 * steps, "one of each replica and version"
    assert load.calls["trainer.step"] == steps
    assert [call for call in load.calls if call.endswith("collect")] == [f"{who}.collect"]
    num_groups = 16 * steps
    assert 0 < load.calls[f"{who}.collect"] <= num_groups + 4 * steps, (
        "by group, and log-prob checks"
    )
    assert load.message_s == pytest.approx(sum(load.calls.values()) * 1e-3, rel=0.1)
    assert 0 < found["controller_wait_share"] < 0.1
    assert found["controller_core_share"] > load.message_s / load.elapsed_s
    assert 500 < found["bytes_per_rollout"] < 20_000


def test_conversations_cost_the_controller_rows_and_no_calls() -> None:
    plain, load = (simulate(replace(SHAPE, num_conversations=number), COSTS) for number in (1, 4))
    assert load.num_steps == plain.num_steps
    assert load.calls["trainer.step"] == plain.calls["trainer.step"]
    rows, reports = (
        load.num_bytes[call] / plain.num_bytes[call]
        for call in ("trainer.accumulate", "collector.collect")
    )
    assert 3 < rows < 5, "a row of a batch for each"
    assert 3 < reports < 12, "a record for each, and what the episode was"
    assert load.num_bytes["scorer.process"] == pytest.approx(
        plain.num_bytes["scorer.process"], rel=0.3
    )
    assert load.elapsed_s == pytest.approx(plain.elapsed_s, rel=0.2), "steps are as long"
