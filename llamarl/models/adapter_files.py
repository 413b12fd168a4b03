"""Adapters as the peft library's files, in and out, and merged into a checkpoint.

Owns: adapter_config.json, and reading and writing adapter_model.safetensors. Does not own: names
and shapes (`adapter_inventory.py`) or a checkpoint's files (`hf.py`). Invariant: what is written is
read by peft as the same model, and a folder under its final name is complete.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from llamarl.checkpoints import manifest
from llamarl.checkpoints.tokenizer_files import END_FILE, TOKENIZER_FILES, copy_files
from llamarl.config import LoraConfig
from llamarl.config.trainer_keys import ALL_LINEAR
from llamarl.json_file import read_object
from llamarl.models import hf
from llamarl.models.adapter_inventory import (
    ADAPTER_FILE,
    CONFIG_FILE,
    FILE_PREFIX,
    adapted_modules,
    adapter_shapes,
    check_adapter,
    locate_adapter,
    parameter_of,
    read_lora,
)
from llamarl.models.families import LORA_A, LORA_B
from llamarl.models.inventory import locate, parameter_shapes
from llamarl.models.other_architecture import AnyArchitecture, read_any_architecture
from llamarl.models.safetensors_file import FileBox, read_boxes


@torch.no_grad()
def load_into(parameters: Mapping[str, Tensor], folder: str) -> None:
    """Copy an adapter into all `parameters` of adapters, by name, casting each; a DTensor gets its
    rank's shard. ValueError if the file does not fit or a number is not finite."""
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    files = locate_adapter(Path(folder), shapes)
    read_boxes(files, lambda name: [hf.local_box(parameters[parameter_of(name)])])


def save(
    folder: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    lora: LoraConfig,
    source_folder: str | Path,
    tokenizer_folder: str | Path | None = None,
    dtype: torch.dtype,
) -> None:
    """Write an adapter of the checkpoint in `source_folder`, with the tokenizer's files beside it
    (None: the checkpoint's). An existing `folder` is replaced only when the new one is complete."""
    shapes = adapter_shapes(read_any_architecture(source_folder), lora)
    with hf.replacing(Path(folder)) as unfinished:
        copy_files(source_folder, (END_FILE,), unfinished)
        copy_files(tokenizer_folder or source_folder, TOKENIZER_FILES, unfinished)
        values = _config(shapes, lora, str(source_folder))
        text = json.dumps(values, indent=2, sort_keys=True) + "\n"
        (unfinished / CONFIG_FILE).write_text(text, encoding="utf-8")
        held = {
            f"{FILE_PREFIX}{name}": tensor.detach().to(device="cpu", dtype=dtype).contiguous()
            for name, tensor in tensors
        }
        assert held.keys() == {f"{FILE_PREFIX}{name}" for name in shapes}, "not all adapters"
        hf.write_file(unfinished / ADAPTER_FILE, held, CONFIG_FILE)
        manifest.write(unfinished)


def merge(checkpoint: str, adapter: str, folder: str, dtype: str | None = None) -> None:
    """Write the checkpoint W + scale B A of an adapter, rounded to `dtype` (None: as the
    checkpoint says) once, tensor by tensor. ValueError if the adapter is not of this checkpoint."""
    architecture = read_any_architecture(checkpoint)
    lora = read_lora(adapter)
    check_adapter(adapter, architecture, lora)
    config = read_object(Path(checkpoint, "config.json"))
    name = dtype or str(config.get("dtype") or config.get("torch_dtype") or "float32")
    hf.save(
        folder,
        _merged(checkpoint, adapter, architecture, lora),
        source_folder=checkpoint,
        tokenizer_folder=adapter,
        dtype=getattr(torch, name),
    )


def _merged(
    checkpoint: str, adapter: str, architecture: AnyArchitecture, lora: LoraConfig
) -> Iterator[tuple[str, Tensor]]:
    shapes = adapter_shapes(architecture, lora)
    halves = {name: torch.empty(shape) for name, shape in shapes.items()}
    load_into(halves, adapter)
    adapted = {*adapted_modules(shapes)}
    files = locate(Path(checkpoint), architecture)
    for name, shape in parameter_shapes(architecture).items():
        weight = torch.empty(shape)
        box: FileBox = (0,) * weight.ndim, weight
        read_boxes({name: files[name]}, lambda _, box=box: [box])  # type: ignore[misc]
        module = name.removesuffix(".weight")
        if module in adapted:
            a, b = (halves[f"{module}.{half}.weight"] for half in (LORA_A, LORA_B))
            weight.addmm_(b, a, alpha=lora.scale)
        yield name, weight


def _config(
    shapes: Mapping[str, tuple[int, ...]], lora: LoraConfig, checkpoint: str
) -> dict[str, object]:
    """adapter_config.json."""
    modules = adapted_modules(shapes)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": checkpoint,
        "revision": None,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted({*_targets(modules, lora)}),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }


def _targets(modules: list[str], lora: LoraConfig) -> list[str]:
    """As the recipe names them; for all of them, their last names."""
    is_named = ALL_LINEAR not in lora.targets
    return [*lora.targets] if is_named else [module.rpartition(".")[2] for module in modules]
