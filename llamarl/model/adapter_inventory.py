"""The inventory of a model's adapters: the matrices that get one, and the adapters' parameters.

    model.layers.0.self_attn.q_proj.weight          W [outputs, inputs]
    model.layers.0.self_attn.q_proj.lora_A.weight   A [rank, inputs]
    model.layers.0.self_attn.q_proj.lora_B.weight   B [outputs, rank]

Files are those of the peft library, in which FILE_PREFIX stands before each name. This module is
free of torch, because the controller's process checks recipes; trainer, generators, planner and
files take names and shapes from here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llamarl.core.config import LoraConfig
from llamarl.core.config.trainer import ALL_LINEAR
from llamarl.core.fields import require
from llamarl.core.files import read_object
from llamarl.model.architecture import LINEARS, LORA_A, LORA_B, AnyArchitecture, OtherArchitecture
from llamarl.model.inventory import WEIGHT_DTYPES, parameter_shapes
from llamarl.model.safetensors_file import Piece, read_header, whole

WEIGHT = ".weight"
CONFIG_FILE, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
FILE_PREFIX = "base_model.model."
DESCRIBED = {"peft_type", "r", "lora_alpha", "target_modules"}  # checked by themselves
UNUSED = {"task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"}
UNUSED |= {"inference_mode", "lora_dropout", "megatron_core", "qalora_group_size", "eva_config"}
PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),  # others change the base as well
}
"""What adapter_config.json may say of an adapter as `trainer.lora` describes one: keys that change
nothing, and values of others; all other keys must be empty, also those that we do not know."""
EMPTY: tuple[Any, ...] = (None, False, "", [], {})
Shape = tuple[int, ...]


def adapter_shapes(architecture: AnyArchitecture, lora: LoraConfig) -> dict[str, Shape]:
    """Return name -> shape of every parameter of the adapters, in the order of the layers; none if
    all weights are trained. Raises ValueError if the targets match nothing, or the rank is above a
    size."""
    shapes: dict[str, Shape] = {}
    if not lora.is_used:
        return shapes
    matrices = _matrices(architecture)
    for target in lora.targets:
        is_found = target == ALL_LINEAR or any(_is_end(module, target) for module in matrices)
        names = ", ".join(dict.fromkeys(module.rpartition(".")[2] for module in matrices))
        require(is_found, "trainer.lora.targets", f"be {ALL_LINEAR}, or name {names}", target)
    for module, (num_outputs, num_inputs) in matrices.items():
        if not any(target == ALL_LINEAR or _is_end(module, target) for target in lora.targets):
            continue
        least = min(num_outputs, num_inputs)
        must = f"be at most {least}, the smaller size of {module} ({num_outputs} x {num_inputs})"
        require(lora.rank <= least, "trainer.lora.rank", must, lora.rank)
        shapes[f"{module}.{LORA_A}{WEIGHT}"] = (lora.rank, num_inputs)
        shapes[f"{module}.{LORA_B}{WEIGHT}"] = (num_outputs, lora.rank)
    return shapes


def trained_shapes(architecture: AnyArchitecture, lora: LoraConfig) -> dict[str, Shape]:
    """Return name -> shape of the parameters that are trained and published: adapters, or all
    parameters."""
    return adapter_shapes(architecture, lora) or parameter_shapes(architecture)


def adapted_modules(shapes: Mapping[str, Shape]) -> list[str]:
    """Return the modules of the matrices that these names of adapters belong to."""
    end = f".{LORA_A}{WEIGHT}"
    return [name.removesuffix(end) for name in shapes if name.endswith(end)]


def parameter_of(name: str) -> str:
    """Return the parameter's name for a name in an adapter's file."""
    return name.removeprefix(FILE_PREFIX)


def check_adapter(
    folder: str | Path | None, architecture: AnyArchitecture, lora: LoraConfig
) -> None:
    """Raise ValueError, naming what differs, unless `lora` fits the model, and `folder` (if there
    is one) holds an adapter of it as `lora` describes. It reads headers only."""
    shapes = adapter_shapes(architecture, lora)
    if folder is None:
        return
    path = _config_file(folder)
    values = read_object(path)
    kind = values.get("peft_type")
    require(kind == "LORA", f"peft_type in {path}", "be LORA", kind)
    for key in sorted(values.keys() - DESCRIBED - UNUSED):
        some, got = PLAIN.get(key, ()), values[key]
        words = " or ".join([*map(repr, some), "absent"])
        must = f"be {words}, as in plain LoRA, which llamarl computes"
        require(got in (*EMPTY, *some), f"{key} in {path}", must, got)
    for key, name, wanted in (("r", "rank", lora.rank), ("lora_alpha", "alpha", lora.alpha)):
        got = values.get(key)
        must = f"be {got!r}, as in {path}"
        require(got == wanted, f"trainer.lora.{name}", must, wanted)
    locate_adapter(Path(folder), shapes)


def read_lora(adapter: str | Path, key: str = "model.adapter") -> LoraConfig:
    """Return the `trainer.lora` of the adapter in this folder, which `key` names. Raises ValueError
    if the folder holds none."""
    path = _config_file(adapter, key)
    values = read_object(path)
    rank, alpha, targets = (values.get(key) for key in ("r", "lora_alpha", "target_modules"))
    targets = [targets] if isinstance(targets, str) else targets
    match rank, alpha, targets:
        case int(), int() | float(), [str(), *_]:
            return LoraConfig(rank=rank, alpha=float(alpha), targets=[*map(str, targets)])
    raise ValueError(f"{path} must have r, lora_alpha and target_modules, got {values!r:.200}")


def locate_adapter(folder: Path, shapes: Mapping[str, Shape]) -> dict[str, tuple[Piece]]:
    """Return parameter name -> where the file has it, after every check that its header allows."""
    path = folder / ADAPTER_FILE
    entries = {parameter_of(name): entry for name, entry in read_header(path).items()}
    for name in sorted(entries.keys() ^ shapes.keys()):
        got = "one more" if name in entries else "a file without it"
        must = f"hold the adapters of trainer.lora.targets: got {got}, {name}"
        raise ValueError(f"{path} must {must}")
    for name, shape in shapes.items():
        entry = entries[name]
        must = f"have shape {shape}, as this model's"
        require(entry.shape == shape, f"{name} in {path}", must, entry.shape)
        must = f"be one of {', '.join(WEIGHT_DTYPES)}"
        require(entry.dtype in WEIGHT_DTYPES, f"{name} in {path}", must, entry.dtype)
    return {name: whole(path, FILE_PREFIX + name, shape) for name, shape in shapes.items()}


def _config_file(folder: str | Path, key: str = "model.adapter") -> Path:
    files = [Path(folder, name) for name in (CONFIG_FILE, ADAPTER_FILE)]
    must = f"be the folder of an adapter ({CONFIG_FILE}, {ADAPTER_FILE})"
    require(all(path.is_file() for path in files), key, must, str(folder))
    return files[0]


def _matrices(architecture: AnyArchitecture) -> dict[str, tuple[int, int]]:
    """Return module -> [outputs, inputs] of each linear layer of the decoder's layers. In a family
    that we do not know these are the two-dimensional weights of modules with a number in their
    names."""
    found: dict[str, tuple[int, int]] = {}
    is_other = isinstance(architecture, OtherArchitecture)
    for name, shape in parameter_shapes(architecture).items():
        module = name.removesuffix(WEIGHT)
        parts = module.split(".")
        is_linear = any(map(str.isdigit, parts)) if is_other else ".".join(parts[-2:]) in LINEARS
        if name.endswith(WEIGHT) and len(shape) == 2 and is_linear:
            found[module] = shape[0], shape[1]
    return found


def _is_end(module: str, target: str) -> bool:
    return module == target or module.endswith(f".{target}")
