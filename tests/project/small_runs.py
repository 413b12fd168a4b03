"""The smallest run of each tool: its arguments, and what must be true of what it found.

A run executes every function of its tool that needs no rival's environment, in about ten seconds of
a processor. Checks name cases and figures, and relations that hold on any machine.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.places import ROOT

Found = dict[str, dict[str, Any]]
"""The figures of a benchmark: case -> name -> value."""
Bench = tuple[list[str], Callable[[Found], None]]
Program = tuple[list[str], Callable[[Path, str], None], int]
"""Arguments, what must be true of the folder it ran in and of what it printed, the exit code."""
TIMES = ("_s", "_ms", "_us", "_per_s")


def check_times(figures: dict[str, Any]) -> None:
    """All times and rates are numbers above 0."""
    timed = {name: value for name, value in figures.items() if name.endswith(TIMES)}
    assert timed
    assert all(math.isfinite(value) and value > 0 for value in timed.values()), timed


def check_store(found: Found) -> None:
    assert found[""]["rows_vs_transferqueue"] is None
    assert found[""]["bytes_vs_memcpy"] > 0
    assert found[""]["second_unit"] > 0
    for side in ("own", "memcpy"):
        for tokens in (16, 512):
            assert found[f"{side}, 1 units, 2 consumers, {tokens} tokens"]["rows_per_s"] > 0


def check_async(found: Found) -> None:
    sync, quick = (found[f"long_tail: {mode}"] for mode in ("sync, 1 thread", "async, staleness 1"))
    assert sync["rollouts"] == quick["rollouts"] == 2 * 4 * 8
    assert sync["accuracy"] is None
    chosen = found["long_tail"]
    assert (chosen["best_sync"], chosen["best_async"]) == ("sync, 1 thread", "async, staleness 1")
    assert chosen["ratio"] == pytest.approx(sync["seconds"] / quick["seconds"])


def check_checkpoints(found: Found) -> None:
    assert found.pop("")["ranks"] == 2
    assert found.keys() == {"waiting", "beside", "torch"}
    for way, figures in found.items():
        assert figures["written_s"] >= figures["blocked_s"] > 0, way
        assert figures["first_blocked_s"] > 0
        assert figures["step"] > 0
    assert found["waiting"]["step"] == 1, "none runs beside it"


def check_generate(found: Found) -> None:
    for batch in (64, 8):
        figures = found[f"float32, batch {batch}"]
        check_times(figures)
        engine, other = (figures[f"{way}_tokens_per_s"] for way in ("engine", "transformers"))
        assert figures["ratio"] == pytest.approx(engine / other)
        assert found[""][f"ratio_{batch}"] == figures["ratio"]
    tail = found["float32, long tail"]
    others_s = tail["transformers_arrival_s"], tail["transformers_sorted_s"]
    assert tail["ratio"] == pytest.approx(min(others_s) / tail["engine_s"])
    assert "attention" in tail["transformers_settings"]


def check_planner(found: Found) -> None:
    assert found.pop("").keys() == {"max_error_replay"}
    assert found.keys() == {"live staleness 1", "replay staleness 1"}
    for figures in found.values():
        check_times(figures)
        off = figures["predicted_s"] / figures["measured_s"] - 1
        assert figures["error"] == pytest.approx(abs(off))


def check_planner_external(found: Found) -> None:
    assert found[""]["max_error_fit"] < 0.2
    known = json.loads((ROOT / "docs" / "benchmarks" / "planner_external.json").read_text())
    shown = {each["case"]: each["value"] for each in known["figures"] if each["name"] == "ratio"}
    ratios = {case: each["ratio"] for case, each in found.items() if "ratio" in each}
    assert len(ratios) > 10
    assert ratios == pytest.approx({case: shown[case] for case in ratios}, rel=0.01)
    for kind in ("trainer", "generator"):
        assert 0 <= found[kind]["error_half"] <= found[kind]["error_two_thirds"]
        least, most = found[kind]["time_half"]
        assert least <= most
    assert found["step"]["rows"] == 1
    assert found["generator, H20-96GB: not confirmed"]["rows"] > 0


def check_turns(found: Found) -> None:
    check_times(found["2 at once"])


def check_sft(found: Found) -> None:
    assert found[""]["vs_trl"] is None
    check_times(found["llamarl"])


def check_peers(found: Found) -> None:
    assert found["1 core"].keys() == {
        f"vs_trl_{workload}{end}" for workload in ("equal", "tools") for end in ("", "_processor")
    }
    assert set(found["1 core"].values()) == {None}, "ratios, which need TRL"
    plain, tools = (
        found[f"{workload}, 1 core: llamarl"] for workload in ("equal lengths", "instant tools")
    )
    for figures in (plain, tools):
        check_times(figures)
    assert 0.4 < plain["reward"] < 0.6, "words are even or odd"
    assert 0 < tools["accuracy"] < 1


def check_experts(found: Found) -> None:
    assert found[""]["record_bytes"] == 12 * 8
    assert found[""]["step_vs_dense"] > 0
    for staleness in (0, 1):
        figures = found[f"staleness {staleness}"]
        assert figures["mismatch_ratio"] > 1
        assert 0 < figures["tokens_moved"] <= 1


def check_training(found: Found) -> None:
    for case in ("width 128, the quickstart", "width 256"):
        figures = found[case]
        rates = [found[f"{case}, {dtype}"]["tokens_per_s"] for dtype in ("float32", "bfloat16")]
        assert figures["speed_up"] == pytest.approx(rates[1] / rates[0])
        assert figures["share_of_peak"] > 0
        assert figures["share_of_bfloat16_peak"] > 0
        assert 0 < figures["logprob_median"] < figures["logprob_largest"]
        assert 0 < figures["gradient"] < 1
    assert found["width 256"]["logprob_median"] < 0.1


def check_weights(found: Found) -> None:
    ways = ("publish, shared_memory", "publish, collective", "memcpy", "file")
    for dtype, num_bytes in (("float32", 4), ("bfloat16", 2)):
        for way in (*ways, "gather and broadcast"):
            check_times(found[f"{dtype}, {way}"])
        assert found[dtype]["model_bytes"] % num_bytes == 0
        assert found[dtype]["vs_file"] > 0
    decoding = found["decoding"]
    assert decoding["num_publishes"] > 0
    assert decoding["quiet_tokens_per_s"] > 0


def check_soak(found: Found) -> None:
    run = found.pop("")
    assert run["num_steps"] == 80
    assert run["steps_ratio"] > 0.1, "a busy machine may be five times slower at the end"
    assert found.keys() == {"controller", "generator-0", "trainer", "scorer", "storage-0"}
    for name, figures in found.items():
        assert figures["growth_bytes_per_step"] < 500_000, name
        assert min(figures["memory_bytes"]) > 1e7, name
        before, after = figures["num_files"]
        assert after <= before + 20, name


def check_positive(found: Found) -> None:
    values = [each for values in found.values() for each in values.values()]
    numbers = [value for value in values if isinstance(value, float)]
    assert numbers
    assert min(numbers) > 0


BENCHES: dict[str, Bench] = {  # by program, and what is run of it
    "bench_async": (["--quick"], check_async),
    "bench_checkpoints": (["--megabytes=4", "--repeats=1", "--step-size=64"], check_checkpoints),
    "bench_experts": (["--rounds=1", "--rollouts=8"], check_experts),
    "bench_generate": (["--quick", "--dtypes=float32"], check_generate),
    "bench_peers": (["--quick"], check_peers),
    "bench_planner": (["--quick"], check_planner),
    "bench_planner, external": (
        ["--external", "--rows", "8 H100", "A6000", "one sequence", "colocated, 16"],
        check_planner_external,
    ),
    "bench_routes": ([f"--recipe={ROOT / 'recipes' / 'gsm8k_llama32_1b_1gpu'}"], check_positive),
    "bench_sft": (["--quick"], check_sft),
    "bench_store": (
        ["--quick", "--rounds=1", "--tokens", "16", "512", "--units=1", "--consumers=2"],
        check_store,
    ),
    "bench_turns": (
        ["--quick", "--rounds=1", "--episodes=2", "--turns=2", "--token-ms=0"],
        check_turns,
    ),
    "bench_training": (["--rounds=1", "--widths", "128", "256"], check_training),
    "bench_weights": (["--quick"], check_weights),
    "soak": (["--steps=80"], check_soak),
}


def check_demo(folder: Path, printed: str) -> None:
    assert printed.startswith("two hosts: tls://127.0.0.1:")
    assert json.loads((folder / "run" / "summary.json").read_text())["steps"] == 1


def check_drawn_run(folder: Path, printed: str) -> None:
    display = (folder / "pictures" / "display.svg").read_text()
    assert display.startswith("<svg")
    assert "held-out" in display
    assert "answer length" in (folder / "pictures" / "learning.svg").read_text()


def check_made(folder: Path, printed: str) -> None:
    made = folder / "made"
    held_out, prompts = ((made / f"{name}.jsonl").read_text() for name in ("held_out", "prompts"))
    assert 0 < held_out.count("\n") < prompts.count("\n")
    others = {path.name for path in made.glob("*.jsonl")} - {"held_out.jsonl", "prompts.jsonl"}
    assert {(made / name).read_text().count("\n") for name in others} == {50}
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (made / "checkpoint").iterdir()} == names


def check_half_good(folder: Path, printed: str) -> None:
    """Of the first twelve questions, not all; who is made to do the work is right."""
    figures = json.loads(printed)
    assert 0 < figures["accuracy"] < 0.5
    assert figures.get("forced_work_accuracy", figures.get("made_to_call_accuracy")) == 1


def check_recipe_pages(folder: Path, printed: str) -> None:
    assert "recipes/gsm8k_llama32_1b_1gpu/README.md: as it was\n" in printed


def check_same_run(folder: Path, printed: str) -> None:
    assert re.search(r"^sft: \d{3} rows equal$", printed, re.MULTILINE)


PROGRAMS: dict[str, Program] = {  # the same of those that measure nothing
    "demo_two_hosts": (
        [
            *("run_dir=run", "num_steps=1", "trainer.groups_per_step=4", "data.held_out=null"),
            *("checkpoint.export=false", "metrics.live=false"),
        ],
        check_demo,
        0,
    ),
    "draw_pictures": (
        [
            *("--folder=pictures", "num_steps=16", "trainer.groups_per_step=4", "cluster=inline"),
            *("evaluation.max_prompts=16", "evaluation.every_steps=1", "checkpoint.export=false"),
        ],
        check_drawn_run,
        0,
    ),
    "make_quickstart": (["--rows=50", "--out=made"], check_made, 0),
    "make_quickstart, check": (
        ["--rows=12", f"--check={ROOT / 'recipes' / 'quickstart' / 'checkpoint'}"],
        check_half_good,
        1,
    ),
    "make_quickstart_tools": (["--rows=50", "--out=made"], check_made, 0),
    "make_quickstart_tools, check": (
        ["--rows=12", f"--check={ROOT / 'recipes' / 'quickstart_tools' / 'checkpoint'}"],
        check_half_good,
        1,
    ),
    "same_run": ([str(ROOT), str(ROOT), "--scenarios", "sft"], check_same_run, 0),
    "write_recipe_pages": (["--check", "gsm8k_llama32_1b_1gpu"], check_recipe_pages, 0),
}
ARITHMETIC = "tests/project/test_tools.py::test_a_quick_benchmark_writes_the_shape_of_all"
SESSION = "tests/project/test_tools.py::test_a_session_for_a_gpu_runs_each_of_its_parts_on_a_cpu"
ELSEWHERE = {  # program -> the test that runs it
    "bench_controller": ARITHMETIC,
    "bench_gpu": SESSION,
    "gpu_probe": SESSION,
    "make_random_model": SESSION,
    "fuzz": "tests/e2e/test_damage.py::"
    "test_damaged_files_and_keys_are_named_or_survived_and_never_believed",
    "install": "tests/project/test_install.py::"
    "test_what_cannot_be_installed_ends_with_pips_own_words",
    "prepare_prompts": "tests/project/test_prepare_prompts.py::"
    "test_a_run_reads_what_was_written_with_its_instruction",
    "write_reference_pages": "tests/project/test_docs.py::"
    "test_generated_pages_are_what_the_code_says_today",
}
