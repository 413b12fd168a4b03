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
    for side in ("own", "own_loader", "memcpy"):
        for tokens in (16, 512):
            assert found[f"{side}, 1 units, 2 consumers, {tokens} tokens"]["rows_per_s"] > 0


def check_pools(found: Found) -> None:
    mixed, same = (found[f"72B 10k, 64 groups, {kind}"] for kind in ("mixed", "same"))
    assert mixed["generators"] == 32, "all H20 that there are"
    assert mixed["trainer"] == same["trainer"]
    gain = found["72B 10k, 64 groups"]["gain_trainer_x1"]
    assert gain == pytest.approx(mixed["per_cost"] / same["per_cost"])
    price = mixed["trainer"] * 2.85 + 32
    tokens = mixed["per_cost"] * price / 3600 * mixed["step_s"]
    equal = same["per_cost"] * 2.85 * (same["trainer"] + same["generators"]) / 3600 * same["step_s"]
    assert tokens == pytest.approx(equal, rel=0.1), "both train the same rollouts"


def check_adapters(found: Found) -> None:
    for dtype in ("float32", "bfloat16"):
        ways = {
            way: found[f"{dtype}, 100 updates, {way}"] for way in ("whole", "adapter", "merged")
        }
        assert ways["adapter"]["kept"] == 1
        assert ways["merged"]["kept"] == ways["whole"]["kept"] <= 1.001
        assert all(each["moved"] > each["apart"] >= 0 for each in ways.values())
        assert found[f"{dtype}, batch 8"]["adapter_over_whole"] > 0
        for way in ("whole", "adapter"):
            check_times(found[f"{dtype}, batch 8, {way}"])
        for way in ("adapter", "merged"):
            check_times(found[f"{dtype}, {way}"])
    assert found["float32, 100 updates, adapter"]["apart"] < 1e-4
    adapters, whole = (found[f"float32, {what}"] for what in ("adapters", "whole weights"))
    assert 0 < 5 * adapters["publish_bytes"] < whole["publish_bytes"]


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


def check_links(found: Found) -> None:
    one, two = (found[f"{units} units"] for units in (1, 2))
    assert found[""]["second_unit_behind_links"] == pytest.approx(
        two["bytes_per_s"] / one["bytes_per_s"]
    )
    for figures in (one, two):
        assert 0 < figures["payload_share"] < figures["written_share"], "headers count"
        assert figures["read_share"] > 0


def check_planner(found: Found) -> None:
    assert found.pop("").keys() == {"max_error_replay"}
    assert found.keys() == {
        f"{kind} staleness 1" for kind in ("live", "replay", "replay, processes")
    }
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


def check_ranker(found: Found) -> None:
    rankers = {"none", "history", "model", "size", "ideal"}
    tasks = {"quickstart": 3, "made": 2, "drift": 4, "returning": 3}
    for task, num_windows in tasks.items():
        recalls = [figures for case, figures in found.items() if case.startswith(f"{task}, ")]
        assert len(recalls) == num_windows
        assert all(figures.keys() == rankers for figures in recalls), task
        assert all(0 <= each <= 1 for figures in recalls for each in figures.values()), task
        check_times(found[task])
    made = found["made, steps 41 to 60"]
    assert made["ideal"] > max(made["none"], made["size"])
    again = found["returning, second"]
    assert again["history"] > again["none"], "they have been seen before"
    for staleness in (0, 1):
        relative = found[f"dispatch, S = {staleness}"]
        assert relative.keys() == {"none", "history", "model", "oracle"}
        assert relative["none"] == 1


def check_sft(found: Found) -> None:
    assert found[""]["vs_trl"] is None
    assert found[""]["vs_rl"] > 0
    check_times(found["llamarl"])


def check_sites(found: Found) -> None:
    run = found[""]
    assert (run["steps"], run["num_lost"], run["rollouts_trained"]) == (3, 0, 3 * 8 * 8)
    assert run["staleness_max"] <= 1
    assert run["break_s"] >= 0.2
    assert run["models_per_publish"] > 0.1, "they came over the link"
    assert len(run["num_versions"]) == len(run["standstill_s"]) == 3
    assert run["far_rollouts"] > 0


def check_streams(found: Found) -> None:
    """One run stands for all: whatever compares two of them finds no difference."""
    assert sum("step_s" in values for values in found.values()) == 24
    assert found["tail"]["carried_vs_dynamic"] == 1
    assert found["tail, S=1"]["dynamic_vs_batch"] == 1
    tail = found["tail"]
    assert tail["async_vs_sync"] == tail["medians_async_vs_sync"] == 1
    assert tail["share_of_least"] > 0
    assert tail["least_vs_sync"] == pytest.approx(1 / tail["share_of_least"])
    ordered = [values for values in found.values() if "ranked_vs_fifo" in values]
    assert len(ordered) == 3
    assert sum("decode_steps" in values for values in ordered) == 2


def check_staging(found: Found) -> None:
    """A replica stands still while it takes a version, and all commit when the last one has it."""
    assert found.pop("")["model_bytes"] > 10e6
    assert found.keys() == {"blocking, together"}
    form = found["blocking, together"]
    assert form["num_publishes"] >= 1
    assert 0 < form["staleness_max"] <= 1
    assert form["early_share"] == 0
    assert form["publish_s"] > form["lead_s"] > 0
    assert form["interrupted_s"] > form["publish_s"] / 10


def check_all_staging(found: Found) -> None:
    """Every form keeps the bound, and only a blocking publish stops decoding for long."""
    forms = {name: figures for name, figures in found.items() if name}
    for name, figures in forms.items():
        assert figures["num_publishes"] >= 2, name
        assert 0 < figures["staleness_max"] <= (2 if "staleness 2" in name else 1), name
        assert figures["early_share"] == ("staggered" in name), name
        assert figures["publish_s"] > figures["lead_s"] > 0, name
    interrupted = {name: figures["interrupted_s"] for name, figures in forms.items()}
    beside = max(interrupted[f"double_buffer, {commits}"] for commits in ("staggered", "together"))
    for name in ("blocking, together", "blocking, staggered", "bucket, staggered"):
        assert interrupted[name] > 10 * beside, name


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
        assert figures["peak_bytes"] > 1e8
    assert 0.4 < plain["reward"] < 0.6, "words are even or odd"
    assert 0 < tools["accuracy"] < 1


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


def check_turns(found: Found) -> None:
    assert found.keys() == {"4 episodes"}
    figures = found["4 episodes"]
    assert figures["num_turns"] > 1
    assert 0 < figures["turn_ms"] <= figures["turn_p90_ms"]


def check_weights(found: Found) -> None:
    ways = ("publish, shared_memory", "publish, collective", "memcpy", "file")
    for dtype, num_bytes in (("float32", 4), ("bfloat16", 2)):
        for way in (*ways, "gather and broadcast"):
            check_times(found[f"{dtype}, {way}"])
        assert "forecast_ratio" in found[f"{dtype}, publish, collective"]
        assert "round_trip_s" in found[f"{dtype}, rates of the machine"]
        assert found[dtype]["model_bytes"] % num_bytes == 0
        assert found[dtype]["vs_file"] > 0
    decoding = found["decoding"]
    assert decoding["num_publishes"] > 0
    assert decoding["quiet_tokens_per_s"] > 0
    for staging in ("double_buffer", "host", "bucket"):
        memory = found[f"memory, {staging}"]
        assert memory.keys() == {"trainer_private", "generator_private", "all"}
        assert memory["all"] > 0
    each, once = (found[f"1 replica, packed {how}"] for how in ("for each", "once"))
    assert each["packing_cpu_s"] > 0
    assert once["packing_cpu_s"] > 0
    plain = found["to bfloat16"]["received_bytes"]
    for form in ("int8", "fp8_per_channel"):
        share = found[f"to {form}"]["received_bytes"] / plain
        assert found[f"to {form}"]["bytes_share"] == pytest.approx(share)
        assert share < 1


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


def check_messages(found: Found) -> None:
    """Of 2,000 messages; Monarch's 1.4 kB for each stand in docs/limits.md."""
    assert len(found) == 4
    for side in ("caller", "actor"):
        kept = found[f"a port as argument, {side}"]["growth_bytes_per_message"]
        assert kept < found[f"Monarch answers, {side}"]["growth_bytes_per_message"] + 1000, side


def check_positive(found: Found) -> None:
    values = [each for values in found.values() for each in values.values()]
    numbers = [value for value in values if isinstance(value, float)]
    assert numbers
    assert min(numbers) > 0


BENCHES: dict[str, Bench] = {  # by program, and what is run of it
    "bench_adapters": (
        ["--repeats=1", "--updates=100", "--batches=8", "--new-tokens=4"],
        check_adapters,
    ),
    "bench_async": (["--quick"], check_async),
    "bench_checkpoints": (["--megabytes=4", "--repeats=1", "--step-size=64"], check_checkpoints),
    "bench_generate": (["--quick", "--dtypes=float32"], check_generate),
    "bench_links": (["--tokens=64", "--rows=16", "--rounds=1", "--consumers=1"], check_links),
    "bench_offload": (["--megabytes=4", "--repeats=1"], check_positive),
    "bench_peers": (["--quick"], check_peers),
    "bench_planner": (["--quick"], check_planner),
    "bench_planner, external": (
        ["--external", "--rows", "8 H100", "A6000", "one sequence", "colocated, 16"],
        check_planner_external,
    ),
    "bench_pools": (["--quick", "--models=72B", "--groups=64"], check_pools),
    "bench_prompts": (["--prompts=2000"], check_positive),
    "bench_ranker": (["--quick"], check_ranker),
    "bench_routes": ([f"--recipe={ROOT / 'recipes' / 'gsm8k_llama32_1b_1gpu'}"], check_positive),
    "bench_sft": (["--quick"], check_sft),
    "bench_sites": (
        [
            *("--break-s=0.2", "--break-step=1", "num_steps=3", "trainer.groups_per_step=8"),
            *("evaluation.max_prompts=16", "checkpoint.export=false"),
        ],
        check_sites,
    ),
    "bench_staging": (["--quick"], check_staging),
    "bench_store": (
        ["--quick", "--rounds=1", "--tokens", "16", "512", "--units=1", "--consumers=2"],
        check_store,
    ),
    "bench_streams": (["--quick"], check_streams),
    "bench_training": (["--rounds=1", "--widths", "128", "256"], check_training),
    "bench_turns": (["--quick"], check_turns),
    "bench_weights": (["--quick"], check_weights),
    "soak": (["--steps=80"], check_soak),
    "soak_messages": (["--messages=2000"], check_messages),
}
NEED_LINKS = ("bench_links", "bench_sites")  # network namespaces of Linux, and root


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
ARITHMETIC = "tests/unit/test_tools.py::test_a_quick_benchmark_writes_the_shape_of_all"
SESSION = "tests/unit/test_tools.py::test_a_session_for_a_gpu_runs_each_of_its_parts_on_a_cpu"
ELSEWHERE = {  # program -> the test that runs it
    "bench_controller": ARITHMETIC,
    "bench_curriculum": ARITHMETIC,
    "bench_packing": ARITHMETIC,
    "bench_gpu": SESSION,
    "gpu_probe": SESSION,
    "make_random_model": SESSION,
    "fuzz": "tests/e2e/test_fuzz.py::"
    "test_damaged_files_and_keys_are_named_or_survived_and_never_believed",
    "install": "tests/unit/test_install.py::test_what_cannot_be_installed_ends_with_pips_own_words",
    "links": "tests/distributed/test_links.py::"
    "test_links_have_their_rate_and_delay_and_leave_nothing_after_an_error",
    "prepare_prompts": "tests/unit/test_prepare_prompts.py::"
    "test_a_run_reads_what_was_written_with_its_instruction",
    "write_reference_pages": "tests/unit/test_docs.py::"
    "test_generated_pages_are_what_the_code_says_today",
}
