"""Names of the Hub in a recipe: the real client against a Hub on the loopback interface."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import constants

from llamarl.cli.reports import merge
from llamarl.core.config import Config, LoraConfig
from llamarl.model import adapters as adapter_files
from llamarl.model.architecture import read_architecture
from llamarl.prompts.files import read_rows
from llamarl.recipe import hub as hub_files
from llamarl.recipe.composition import as_argument
from llamarl.recipe.hub import read_name
from llamarl.recipe.inputs import read_inputs, read_planned_architecture
from llamarl.recipe.local_inputs import with_local_files
from llamarl.recipe.prompt_inputs import with_measured_prompts
from tests.adapter_oracle import random_adapters
from tests.hub_server import Hub
from tests.places import CHECKPOINT, RECIPE
from tests.recipe.composing import compose_recipe
from tests.recipe.hub_client import DATA, JSONL, LINE, MODEL, ROWS, WANTED, client_of_hub
from tests.tiny_checkpoints import write_checkpoint

pytestmark = pytest.mark.full


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with client_of_hub(tmp_path) as hub:
        yield hub


def recipe(
    *values: str, prompts: str = "hf:org/sums", held_out: str = "hf:org/sums/test"
) -> Config:
    named = ["model.checkpoint=hf:org/tiny", f"data.prompts={prompts}", f"data.held_out={held_out}"]
    return compose_recipe(RECIPE, [*named, *values])


def switch_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """No network from now on."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def error_of(config: Config, command: str = "train") -> str:
    with pytest.raises(ValueError, match=" must ") as caught:
        with_local_files(config, command)
    (line,) = str(caught.value).splitlines()
    return line


def test_a_run_gets_paths_and_names_with_commits(hub: Hub) -> None:
    config, pinned = with_local_files(recipe(), "train")
    model, data = hub.branches[f"{MODEL}@main"], hub.branches[f"{DATA}@main"]
    assert pinned == {
        "model.checkpoint": f"hf:org/tiny@{model}",
        "data.prompts": f"hf:org/sums@{data}",
        "data.held_out": f"hf:org/sums/test@{data}",
    }
    assert hub.fetched() == WANTED | {"model.safetensors", "train.jsonl", "test.jsonl"}
    assert Path(config.data.prompts).name == "sums.jsonl"
    assert Path(config.data.held_out or "").name == "sums-test.jsonl"
    inputs = read_inputs(config)
    assert (len(inputs.prompts), len(inputs.held_out)) == (5, 1)
    assert model in inputs.checkpoint


def test_without_names_or_for_commands_that_read_no_files_no_hub_is_asked(hub: Hub) -> None:
    plain = compose_recipe(RECIPE, [])
    assert with_local_files(plain, "train") == (plain, {})
    for command in ("graph", "launch"):
        assert with_local_files(recipe(), command) == (recipe(), {})
    assert not hub.asked
    for text in ("hf:a/b", "hf:a/b@main", "hf:a/b@refs/pr/1", "hf:a-b/c.d_e/main/train@v1.0"):
        assert str(read_name("data.prompts", text, "dataset")) == text


def test_a_forecast_fetches_no_weights_and_no_prompts(hub: Hub) -> None:
    config, _ = with_local_files(recipe("plan.prompt_tokens=0"), "plan")
    assert hub.fetched() == WANTED
    assert with_measured_prompts(config).plan.prompt_tokens == 0
    with_local_files(recipe(), "train")
    config, _ = with_local_files(recipe("plan.prompt_tokens=0"), "plan")
    assert with_measured_prompts(config).plan.prompt_tokens > 0


def test_a_forecast_with_an_architecture_fetches_nothing(hub: Hub) -> None:
    architecture = f"model.architecture={CHECKPOINT}"
    config, _ = with_local_files(recipe(architecture), "plan")
    assert read_planned_architecture(config).vocab_size > 0
    assert not hub.asked
    of_hub = "model.architecture=hf:org/tiny"
    config, _ = with_local_files(recipe(of_hub), "plan")
    assert read_planned_architecture(config).vocab_size > 0
    assert hub.fetched() == {"config.json"}


def test_a_commit_that_is_in_the_cache_is_not_asked_for(hub: Hub) -> None:
    _, pinned = with_local_files(recipe(), "train")
    hub.asked.clear()
    names = [f"{key}={name}" for key, name in pinned.items()]
    assert with_local_files(compose_recipe(RECIPE, names), "train")[1] == pinned
    assert not hub.asked


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        ("nothing", "hf download org/tiny"),
        ("plan", "hf download org/tiny"),
        ("evaluate", "hf download org/sums --repo-type dataset"),
    ],
)
def test_without_a_network_the_line_says_what_to_download(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, kept: str, words: str
) -> None:
    with_local_files(recipe(), kept)
    switch_off(monkeypatch)
    assert f"`{words}" in error_of(recipe())


def test_a_hub_that_does_not_answer_is_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    line = error_of(recipe())
    assert "`hf download org/tiny` where there is a network" in line


def test_a_transfer_that_breaks_off_goes_on_where_it_was(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # what it writes at a time
    hub.cut["model.safetensors"] = 1
    config, _ = with_local_files(recipe(), "train")
    half = (CHECKPOINT / "model.safetensors").stat().st_size // 2
    first, second = [begin for path, begin in hub.begins if path == "model.safetensors"]
    assert first == 0
    assert half - 1000 <= second <= half
    weights = Path(config.model.checkpoint, "model.safetensors").read_bytes()
    assert weights == (CHECKPOINT / "model.safetensors").read_bytes()


@pytest.mark.full
def test_ctrl_c_ends_a_transfer_at_once_and_leaves_no_part(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    hub.stuck.add("model.safetensors")
    main = threading.get_ident()

    def interrupt() -> None:
        hub.is_stuck.wait()
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            with_local_files(recipe(), "train")
    finally:
        signal.signal(signal.SIGINT, before)
    assert not hub.goes_on.is_set(), "it ends amid the transfer"
    hub.goes_on.set()
    assert not [*tmp_path.rglob("*.incomplete")]


def test_a_file_is_read_for_its_hash_once(hub: Hub) -> None:
    config, _ = with_local_files(recipe(), "train")
    weights = Path(config.model.checkpoint, "model.safetensors").resolve()
    data, stat = weights.read_bytes(), weights.stat()
    weights.write_bytes(bytes(len(data)))
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with_local_files(recipe(), "train")  # as a file that was read and is as old as it was
    weights.touch()
    assert "other bytes" in error_of(recipe())


NOT_TO_BE_HAD = [
    ("model.checkpoint=hf:tiny", "model.checkpoint must be hf:ORG/NAME or"),
    ("model.checkpoint=hf:org/tiny/main", "model.checkpoint must be hf:ORG/NAME or"),
    ("model.checkpoint=hf:../../etc", "model.checkpoint must be hf:ORG/NAME or"),
    ("model.checkpoint=hf:org/tin", "must be a model of the Hub, got hf:org/tin, which is not"),
    ("model.checkpoint=hf:org/tiny@v9", "name a branch, tag or commit of"),
    ("model.tokenizer=hf:org/bare", "model.tokenizer must hold a tokenizer"),
    ("model.checkpoint=hf:org/bare", "must hold config.json"),
    ("model.checkpoint=hf:org/old", "got hf:org/old with pytorch_model.bin alone"),
    ("model.checkpoint=hf:org/index", "safetensors in its index, got 'evil.pkl'"),
    ("model.checkpoint=hf:org/large", "with room for 1,000,000,000,000,000,002 bytes more"),
    ("model.checkpoint=hf:org/closed", "which is gated: accept its terms at"),
    ("data.prompts=hf:org/none", "must be a dataset of the Hub, got hf:org/none, which is not"),
    ("data.prompts=hf:org/sums/dev", "name one of the splits default/test, default/train, got"),
    ("data.held_out=hf:org/sums", "name one of the splits default/test, default/train, got"),
    ("data.prompts=hf:org/../sums", "data.prompts must be hf:ORG/NAME, /SPLIT,"),
    ("data.prompts=hf:org/empty", "have files of splits"),
    ("data.prompts=hf:org/both", "name a file, as default/train has .jsonl and .parquet"),
    ("data.prompts=hf:org/head", "have YAML at the head of README.md"),
]


def test_what_cannot_be_had_is_one_line(hub: Hub) -> None:
    config = (CHECKPOINT / "config.json").read_bytes()
    index = json.dumps({"weight_map": {"a": "evil.pkl"}}).encode()
    hub.add("models/org/bare", {"README.md": b""})
    hub.add("models/org/old", {"config.json": config, "pytorch_model.bin": b"1"})
    hub.add("models/org/index", {"config.json": config, "model.safetensors.index.json": index})
    hub.add("models/org/large", {"config.json": b"{}", "tokenizer.json": b"{}"})
    hub.add("models/org/closed", {"config.json": config})
    hub.gated.add("models/org/closed")
    hub.add("datasets/org/empty", {"data.csv": b"", "load.py": b""})
    hub.add("datasets/org/both", {"train.jsonl": JSONL, "data/train.parquet": b""})
    hub.add("datasets/org/head", {"README.md": b"---\na: [\n---\n", "train.jsonl": JSONL})
    for values, words in NOT_TO_BE_HAD:
        hub.sizes.clear()
        if "large" in values:
            hub.sizes["tokenizer.json"] = 10**18
        assert words in error_of(recipe(values)), values


def test_a_disk_that_fills_up_is_one_line(hub: Hub) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        line = error_of(recipe())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "be in a cache that can be written to, got File too large" in line


def test_a_run_that_resumes_keeps_its_commits(hub: Hub, tmp_path: Path) -> None:
    _, pinned = with_local_files(recipe(), "train")
    saved = {"model": {"checkpoint": pinned["model.checkpoint"]}}
    saved["data"] = {name: pinned[f"data.{name}"] for name in ("prompts", "held_out")}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved))
    hub.add(MODEL, CHECKPOINT)
    hub.add(DATA, {"train.jsonl": JSONL + JSONL, "test.jsonl": JSONL})
    resumed = recipe("checkpoint.resume=auto")
    assert with_local_files(resumed, "train", str(tmp_path))[1] == pinned
    moved = with_local_files(recipe(), "train", str(tmp_path))[1]
    assert all(moved[key] != name for key, name in pinned.items())
    (tmp_path / "config.yaml").write_text("a: [")
    with pytest.raises(ValueError, match=r"config\.yaml must be the config of the run, got"):
        with_local_files(resumed, "train", str(tmp_path))
    no_names = compose_recipe(RECIPE, ["checkpoint.resume=auto"])
    assert with_local_files(no_names, "train", str(tmp_path)) == (no_names, {})


def test_several_names_are_sources_with_names_of_their_own(hub: Hub) -> None:
    names = "[hf:org/sums/test,hf:org/sums]"
    config, pinned = with_local_files(recipe("data.weights=[1,2]", prompts=names), "train")
    commit = hub.branches[f"{DATA}@main"]
    assert pinned["data.prompts"] == [f"hf:org/sums/test@{commit}", f"hf:org/sums@{commit}"]
    assert config.data.source_names == ["sums-test", "sums"]
    prompts = read_inputs(config).prompts
    assert [prompt.source for prompt in prompts] == [0, 1, 1, 1, 1, 1]


def test_held_out_sets_may_be_names_and_folders(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "rows.jsonl").write_bytes(JSONL)
    given = f"evaluation.sets={{sums:hf:org/sums/test,more:{tmp_path / 'more'}}}"
    config, pinned = with_local_files(recipe(given, held_out="null"), "evaluate")
    commit = hub.branches[f"{DATA}@main"]
    sets = {"sums": f"hf:org/sums/test@{commit}", "more": str(tmp_path / "more")}
    assert pinned["evaluation.sets"] == sets
    held_out = read_inputs(config, needs_prompts=False).held_out
    assert [prompt.held_out for prompt in held_out] == ["sums"] + ["more"] * len(JSONL.splitlines())
    repeated = recipe(as_argument("evaluation.sets", sets), held_out="null")
    assert repeated.evaluation.sets == sets


def test_the_files_of_a_split_are_read_in_their_order(hub: Hub) -> None:
    lines = JSONL.splitlines(keepends=True)
    halves = {
        "data/train-00001-of-00002.jsonl": b"".join(lines[2:]),
        "data/train-00000-of-00002.jsonl": b"".join(lines[:2]),
    }
    hub.add(DATA, halves | {"test.jsonl": JSONL})
    config, _ = with_local_files(recipe(), "train")
    rows = list(read_rows(Path(config.data.prompts)))
    assert [row for _, row in rows] == ROWS
    assert [number for number, _ in rows] == [1, 2, 3, 4, 5]
    assert Path(config.data.prompts).name == "sums"


def test_a_file_of_the_repository_may_be_named(hub: Hub) -> None:
    hub.add(DATA, {"a/b/Some Rows.jsonl": JSONL, "a/b/rows.jsonl": LINE})
    _, pinned = with_local_files(recipe("data.held_out=hf:org/sums/a/b/rows.jsonl"), "evaluate")
    assert hub.fetched() >= {"rows.jsonl"}
    assert pinned["data.held_out"].startswith("hf:org/sums/a/b/rows.jsonl@")


def test_an_adapter_is_fetched_with_what_it_says_of_itself(hub: Hub, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "tiny")
    lora, folder = LoraConfig(rank=3, alpha=5.0, targets=["q_proj"]), tmp_path / "adapter"
    adapters = random_adapters(read_architecture(checkpoint), lora).items()
    adapter_files.save(folder, adapters, lora=lora, source_folder=checkpoint, dtype=torch.float32)
    (folder / "optimizer.pt").write_bytes(b"a pickle")
    hub.add("models/org/adapter", folder)
    forecast, _ = with_local_files(recipe("model.adapter=hf:org/adapter"), "plan")
    assert forecast.trainer.lora == replace(lora, dropout=0.0)
    assert "model.safetensors" not in hub.fetched()
    config, pinned = with_local_files(recipe("model.adapter=hf:org/adapter"), "train")
    assert config.trainer.lora == replace(lora, dropout=0.0)
    assert "optimizer.pt" not in hub.fetched()
    assert (Path(config.model.adapter) / "adapter_model.safetensors").is_file()
    assert pinned["model.adapter"].startswith("hf:org/adapter@")
    hub.add("models/org/other", {"config.json": b"{}"})
    line = error_of(recipe("model.adapter=hf:org/other"))
    assert line == "model.adapter must hold adapter_config.json, got hf:org/other without"


def test_an_export_beside_a_model_of_the_hub_names_it_and_is_merged_with_it(
    hub: Hub, tmp_path: Path
) -> None:
    config, _ = with_local_files(recipe(), "train")
    folder, commit = config.model.checkpoint, hub.branches[f"{MODEL}@main"]
    lora = LoraConfig(rank=3)
    adapters = random_adapters(read_architecture(folder), lora).items()
    adapter_files.save(
        tmp_path / "adapter", adapters, lora=lora, source_folder=folder, dtype=torch.float32
    )
    values = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert values["base_model_name_or_path"] == "org/tiny"
    assert values["revision"] == commit
    said = merge([str(tmp_path / "adapter"), str(tmp_path / "whole")])
    assert said.startswith(f"{tmp_path}/whole is {folder} with an adapter of rank 3")
    assert (tmp_path / "whole" / "model.safetensors").is_file()


def test_a_list_or_size_of_other_types_is_one_line(hub: Hub) -> None:
    file = {"type": "file", "path": "config.json", "size": 1, "oid": "0" * 40}
    wrong: tuple[object, ...] = ("many", None, -1, 1.5, True, [], {})
    listed: list[object] = [{"error": 5}, ["config.json", 3, None], [file | {"path": 7}]]
    listed += [[file | {"lfs": "many"}], [file | {"lfs": {}}]]
    for each in listed + [[file | {"size": size}] for size in wrong]:
        hub.lists[MODEL] = each
        assert "model.checkpoint must " in error_of(recipe()), each
    hub.lists.clear()
    for size in wrong[:5]:
        hub.sizes["model.safetensors"] = size
        assert "model.checkpoint must " in error_of(recipe()), size


@pytest.mark.long
def test_a_hub_that_sends_a_byte_a_second_is_one_line(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_files, "ANSWER_S", 0.5)
    monkeypatch.setattr(hub_files, "PACE_S", 0.5)
    hub.dribbles = True
    assert "the Hub gave no whole answer in 0.5 s" in error_of(recipe())
    hub.dribbles = False
    hub.slow.add("model.safetensors")
    monkeypatch.setattr(hub_files, "PACE_BYTES", 10**6)
    line = error_of(recipe())
    assert "the Hub sent " in line
    assert " bytes in 0.5 s" in line
