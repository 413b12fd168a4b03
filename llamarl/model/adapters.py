"""Adapters beside the matrices of a model, their files in peft's layout, and merged checkpoints."""

from __future__ import annotations

import hashlib
import json
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from llamarl.core import files as manifest
from llamarl.core.config import LoraConfig
from llamarl.core.config.trainer import ALL_LINEAR
from llamarl.core.files import read_object
from llamarl.model import hf
from llamarl.model.adapter_inventory import (
    ADAPTER_FILE,
    CONFIG_FILE,
    FILE_PREFIX,
    adapted_modules,
    adapter_shapes,
    check_adapter,
    locate_adapter,
    read_lora,
)
from llamarl.model.architecture import (
    LORA_A,
    LORA_B,
    AnyArchitecture,
    is_adapter,
    read_any_architecture,
    split_dimension,
)
from llamarl.model.inventory import locate, parameter_shapes
from llamarl.model.safetensors_file import FileBox, read_boxes
from llamarl.model.tokenizer import END_FILE, TOKENIZER_FILES, copy_files


@dataclass(eq=False)
class AdapterSwitch:
    """A switch that says whether the adapters of a model take part in its passes."""

    is_on: bool = True

    @contextmanager
    def off(self) -> Iterator[None]:
        """Compute the model of the checkpoint, without adapters, inside the block."""
        before, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = before


def attach(
    root: nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    lora: LoraConfig,
    mesh: DeviceMesh | None = None,
) -> AdapterSwitch:
    """Give modules of `root` adapters of these `shapes`, float32, on the meta device; all else is
    frozen.

    Raises ValueError if one of the modules is no linear layer. `mesh` is that of tensor
    parallelism, which divides the matrices already. Frozen weights may have any dtype: FSDP brings
    all to the compute dtype."""
    switch = AdapterSwitch()
    root.requires_grad_(False)
    for module in adapted_modules(shapes):
        linear = _linear(root, module)
        for part in (LORA_A, LORA_B):
            name = f"{module}.{part}.weight"
            num_outputs, num_inputs = shapes[name]
            half = nn.Linear(num_inputs, num_outputs, False, "meta", torch.float32)
            if mesh is not None:
                split = split_dimension(name)
                place = [Replicate() if split is None else Shard(split)]
                half.weight = nn.Parameter(distribute_tensor(half.weight, mesh, place))
            linear.add_module(part, half)
        # It runs before the hook by which tensor parallelism hands on the matrix's output.
        linear.register_forward_hook(partial(_add, switch, lora), prepend=True)
    return switch


def _linear(root: nn.Module, name: str) -> nn.Linear:
    """Return the linear layer of this name. Raises ValueError, with the kind of what is there,
    unless it is one: GPT-2 has a convolution there, a mixture of experts one tensor for all
    experts."""
    try:
        found: object = root.get_submodule(name)
    except AttributeError:
        found = None
    if not isinstance(found, nn.Linear):
        got = "none" if found is None else type(found).__name__
        raise ValueError(
            f"trainer.lora.targets must name linear layers of {type(root).__name__}, got {name}, "
            f"which is {got}"
        )
    return found


def _add(
    switch: AdapterSwitch, lora: LoraConfig, linear: nn.Module, inputs: tuple[Any, ...], out: Tensor
) -> Tensor:
    """Add scale * B A x to a matrix's output `out`, as a hook behind it."""
    if not switch.is_on:
        return out
    a, b = (_local(linear.get_parameter(f"{half}.weight")) for half in (LORA_A, LORA_B))
    # It is each rank's part of B A x, or its addend, like the matrix's own product.
    product = F.linear(F.linear(_dropped(inputs[0], lora), a), b)
    if isinstance(out, DTensor):
        product = DTensor.from_local(product, out.device_mesh, out.placements, run_check=False)
    return torch.add(out, product, alpha=lora.scale)


def _dropped(x: Tensor, lora: LoraConfig) -> Tensor:
    """Return this rank's part of x, with a share of zeros where gradients are wanted. The ranks
    that tensor parallelism splits x over draw the same numbers, those for all of x, so that they
    drop what one process would."""
    rate = lora.dropout if torch.is_grad_enabled() else 0.0
    local = _local(x)
    if rate == 0.0:
        return local
    if local.shape == x.shape:
        return F.dropout(local, rate)
    assert isinstance(x, DTensor)
    (split,) = x.placements
    assert isinstance(split, Shard)
    size = local.shape[split.dim]
    with torch.no_grad():
        scales = F.dropout(local.new_ones(x.shape), rate)
        first = x.device_mesh.get_local_rank() * size
        scales = scales.narrow(split.dim, first, size).clone()
    return local * scales


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part. The gradient of a tensor that all ranks hold is the sum of theirs,
    because each rank's comes through one part of the other half."""
    if not isinstance(tensor, DTensor):
        return tensor
    is_whole = all(placement.is_replicate() for placement in tensor.placements)
    return tensor.to_local(grad_placements=[Partial()] if is_whole else None)


@torch.no_grad()
def initialize(parameters: Mapping[str, Tensor], seed: int) -> None:
    """Set adapters to their first values: A uniform within 1 / sqrt(inputs), B zeros, as PEFT does.

    They follow from seed and name alone, not from the sharding.
    """
    for name, parameter in parameters.items():
        if not is_adapter(name):
            continue
        whole = torch.zeros(parameter.shape)
        if name.endswith(f".{LORA_A}.weight"):
            digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            whole.uniform_(-1.0, 1.0, generator=generator).div_(math.sqrt(parameter.shape[1]))
        start, local = hf.local_box(parameter)
        stop = map(operator.add, start, local.shape)
        local.copy_(whole[tuple(map(slice, start, stop))])


SNAPSHOT = re.compile(r".*/models--(.+?)--(.+)/snapshots/([0-9a-f]{40})")
"""Matches the folder of a model in the cache of huggingface_hub."""


@torch.no_grad()
def load_into(parameters: Mapping[str, Tensor], folder: str) -> None:
    """Copy an adapter into all `parameters` of adapters, by name, casting each; a DTensor gets its
    rank's shard. Raises ValueError if the file does not fit or a number is not finite."""
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    files = locate_adapter(Path(folder), shapes)
    read_boxes(files, lambda name: [hf.local_box(parameters[name])])


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
    """Write the checkpoint W + scale B A of an adapter, rounded to `dtype` (None: as the checkpoint
    says) once, tensor by tensor. Raises ValueError if the adapter is not of this checkpoint."""
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
    """Return the content of adapter_config.json. It has name and revision that the checkpoint has
    on the Hub, if its folder is one of the Hub's cache, and the targets as the recipe names them;
    for all matrices, the last parts of their names."""
    of_hub = SNAPSHOT.fullmatch(checkpoint)
    targets = {*lora.targets}
    if ALL_LINEAR in targets:
        targets = {module.rpartition(".")[2] for module in adapted_modules(shapes)}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": f"{of_hub[1]}/{of_hub[2]}" if of_hub else checkpoint,
        "revision": of_hub[3] if of_hub else None,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }
