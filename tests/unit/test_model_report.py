"""`llamarl models` says which families there are, and what runs a checkpoint."""

from __future__ import annotations

import importlib.metadata
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llamarl.cli.reports import models
from llamarl.model.architecture import FAMILIES, read_architecture
from llamarl.model.inventory import parameter_shapes
from tests.hub_server import Hub
from tests.places import CHECKPOINT
from tests.tiny_checkpoints import CONFIG, write_checkpoint, write_reference
from tests.unit.hub_client import client_of_hub


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with client_of_hub(tmp_path) as hub:
        yield hub


def rows_of(checkpoint: str | Path) -> dict[str, str]:
    _, *lines = models([str(checkpoint)]).splitlines()
    return {line[2:24].strip(): line[24:] for line in lines}


def test_all_families_are_listed() -> None:
    said = models([])
    for name, family in FAMILIES.items():
        assert f"  {name:<12}{family.model_class}\n" in said
    listed = {name.strip() for name in said.replace("\n", " ").split(",")}
    assert {"gemma2", "gpt2", "mistral", "gemma3_text"} <= listed
    others = {"bert", "roberta", "bart", "whisper", "marian", "musicgen", "pegasus", "xlm-roberta"}
    assert not others & listed, "no causal language models"
    assert f"transformers {importlib.metadata.version('transformers')}" in said


def test_a_checkpoint_of_our_families_runs_everywhere() -> None:
    found = rows_of(CHECKPOINT)
    shapes = parameter_shapes(read_architecture(CHECKPOINT)).values()
    num_parameters = sum(math.prod(shape) for shape in shapes)
    assert found["family"] == "llama (LlamaForCausalLM)"
    assert found["parameters"] == f"{num_parameters:,}"
    size = (CHECKPOINT / "model.safetensors").stat().st_size
    assert found["weights"] == f"{size:,} bytes in 1 safetensors file"
    assert found["trainer=native"] == found["generator=embedded"] == "yes"
    assert found["trainer=transformers"].startswith("yes")
    assert found["generator=vllm"].startswith("yes")


def test_a_checkpoint_of_another_family_runs_with_transformers(tmp_path: Path) -> None:
    model = write_reference(tmp_path, "olmo2")
    found = rows_of(tmp_path)
    assert found["parameters"] == f"{sum(p.numel() for p in model.parameters()):,}"
    assert found["trainer=native"].startswith("no: model_type in ")
    assert found["generator=embedded"].startswith("no")
    assert found["trainer=transformers"].startswith("yes")


@pytest.mark.parametrize(
    ("changes", "row", "words"),
    [
        ({"quantization_config": {"bits": 4}}, "trainer=transformers", "no: its weights are quant"),
        ({"model_type": "x", "auto_map": {"A": "b"}}, "trainer=transformers", "no: its code is in"),
        ({"model_type": "x"}, "trainer=transformers", "no: transformers "),
        ({"model_type": "x", "architectures": ["X"]}, "generator=vllm", "not known: |no: vLLM"),
        ({"vocab_size": 63}, "trainer=native", "no: model.embed_tokens.weight in "),
        ({"hidden_act": "gelu"}, "trainer=native", "no: hidden_act in "),
    ],
)
def test_what_does_not_run_has_its_reason(
    tmp_path: Path, changes: dict[str, Any], row: str, words: str
) -> None:
    write_checkpoint(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG | changes))
    assert rows_of(tmp_path / "model")[row].startswith(tuple(words.split("|")))


def test_vllm_is_asked_by_the_names_of_its_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = tmp_path / "vllm" / "model_executor" / "models" / "registry.py"
    registry.parent.mkdir(parents=True)
    registry.write_text('MODELS = {"LlamaForCausalLM": ("llama", "LlamaForCausalLM")}')
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('is not imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert rows_of(CHECKPOINT)["generator=vllm"] == "yes"
    registry.write_text("MODELS = {}")
    assert rows_of(CHECKPOINT)["generator=vllm"] == "no: vLLM has no LlamaForCausalLM"


def test_weights_that_are_not_here_are_said_to_be(tmp_path: Path) -> None:
    shutil.copy(CHECKPOINT / "config.json", tmp_path)
    found = rows_of(tmp_path)
    assert found["weights"] == "0 bytes in 0 safetensors files, not all of them here"
    assert found["trainer=native"] == "yes"


def test_a_name_is_described_without_its_weights(hub: Hub) -> None:
    found = rows_of("hf:org/tiny")
    size = (CHECKPOINT / "model.safetensors").stat().st_size
    assert found["weights"] == f"{size:,} bytes in 1 safetensors file, not all of them here"
    assert found["parameters"] == rows_of(CHECKPOINT)["parameters"]
    assert "model.safetensors" not in hub.fetched()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/none"], "the checkpoint must be an existing folder, got '/none'"),
        (["hf:none"], "CHECKPOINT must be hf:ORG/NAME or"),
        (["hf:org/none"], "CHECKPOINT must be a model of the Hub, got hf:org/none"),
        (["a", "b"], "CHECKPOINT must be one folder or name"),
    ],
)
def test_what_is_no_checkpoint_is_one_line(hub: Hub, arguments: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=" must ") as caught:
        models(arguments)
    assert words in str(caught.value)
