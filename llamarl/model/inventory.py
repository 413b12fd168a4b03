"""The inventory of a checkpoint: the tensors that it must hold, and the check that it does.

This module is free of torch, because the controller's process checks checkpoints before any other
process starts."""

import math
from pathlib import Path

from llamarl.core.config import EmbeddedConfig, GeneratorConfig, TrainerConfig
from llamarl.model.architecture import (
    LINEARS,
    AnyArchitecture,
    Architecture,
    OtherArchitecture,
    read_any_architecture,
    read_architecture,
)
from llamarl.model.safetensors_file import (
    IGNORED_SUFFIX,
    TensorEntry,
    have_equal_bytes,
    read_header,
    weight_files,
)

HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
WEIGHT_DTYPES = ("F32", "F16", "BF16")  # in the format's spelling


def parameter_shapes(architecture: AnyArchitecture) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every parameter, in the order of the layers if we know the family."""
    if isinstance(architecture, OtherArchitecture):
        return dict(architecture.shapes)
    hidden_size, vocab_size = architecture.hidden_size, architecture.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab_size, hidden_size)}
    for i in range(architecture.num_layers):
        for name, shape in _layer_shapes(architecture).items():
            shapes[f"model.layers.{i}.{name}"] = shape
    shapes["model.norm.weight"] = (hidden_size,)
    if not architecture.tie_embeddings:
        shapes["lm_head.weight"] = (vocab_size, hidden_size)
    return shapes


def _layer_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    a = architecture
    norm = (a.hidden_size,)
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": norm}
    for name, linear in LINEARS.items():
        shapes[f"{name}.weight"] = (a.size(linear.outputs), a.size(linear.inputs))
        if getattr(a, linear.bias):
            shapes[f"{name}.bias"] = (a.size(linear.outputs),)
    if a.qk_norm:
        for name in ("q_norm", "k_norm"):
            shapes[f"self_attn.{name}.weight"] = (a.head_dim,)
    shapes["post_attention_layernorm.weight"] = norm
    return shapes


def attention_cost(architecture: AnyArchitecture) -> float:
    """Return the cost of attention by which a rollout of l tokens costs as much as l +
    attention_cost * l**2 tokens without attention.

    A token takes 2 operations per parameter of the layers and the head; scores and values of a
    causal pass take 2 per layer and channel of the queries for each of l**2 pairs. For a family
    that we do not know it is 0."""
    if isinstance(architecture, OtherArchitecture):
        return 0.0
    a = architecture
    num_layer_parameters = sum(map(math.prod, _layer_shapes(a).values()))
    num_parameters = a.num_layers * num_layer_parameters + a.vocab_size * a.hidden_size
    return a.num_layers * a.num_heads * a.head_dim / num_parameters


def check_checkpoint(folder: str | Path, *, is_any: bool = False) -> AnyArchitecture:
    """Run every check that needs file headers only, before a run starts.

    Returns the architecture, of any family if `is_any`. Raises ValueError naming the file or tensor
    if a file is missing, truncated or quantised, or if names or shapes do not fit config.json."""
    architecture = read_any_architecture(folder) if is_any else read_architecture(folder)
    locate(Path(folder), architecture)
    if architecture.tie_embeddings:
        _check_tied(Path(folder))
    return architecture


def _check_tied(folder: Path) -> None:
    """Raise ValueError if the files hold a head that is another matrix than the embedding it is
    tied to: libraries differ in which of the two they take."""
    files = {name: path for path in weight_files(folder) for name in read_header(path)}
    tied = next((name for name in files if name.endswith(EMBEDDING)), None)
    if HEAD not in files or tied is None:
        return
    if not have_equal_bytes(files[HEAD], HEAD, files[tied], tied):
        raise ValueError(
            f"{HEAD} in {files[HEAD]} must equal {tied}, as tie_word_embeddings in config.json is "
            "true, got another matrix: remove it, or set that to false"
        )


def check_parallel(
    architecture: AnyArchitecture, trainer: TrainerConfig, generator: GeneratorConfig
) -> None:
    """Raise ValueError, in one line, unless every tensor-parallel rank gets an equal share."""
    if isinstance(architecture, OtherArchitecture):
        return  # the trainer does not split it, and vLLM checks itself
    check_num_ranks("trainer.tensor_parallel", trainer.tensor_parallel, architecture)
    if isinstance(generator, EmbeddedConfig):  # vLLM's limits: `generator/vllm/limits.py`
        check_num_ranks("generator.num_ranks", generator.num_ranks, architecture)


def check_num_ranks(key: str, num_ranks: int, architecture: Architecture) -> None:
    """Raise ValueError, naming the config's `key`, unless `num_ranks` divides the sizes that the
    ranks split."""
    a = architecture
    split = {
        "attention heads": a.num_heads,
        "key-value heads": a.num_kv_heads,
        "intermediate channels": a.intermediate_size,
        "tokens of the vocabulary": a.vocab_size,
    }
    if any(size % num_ranks for size in split.values()):
        listed = ", ".join(f"{size} {what}" for what, size in split.items())
        raise ValueError(f"{key} must divide the checkpoint's {listed}, got {num_ranks}")


def locate(folder: Path, architecture: AnyArchitecture) -> dict[str, Path]:
    """Return parameter name -> its file, after every check that headers allow."""
    expected = parameter_shapes(architecture)
    entries: dict[str, tuple[Path, TensorEntry]] = {}
    for path in weight_files(folder):
        for name, entry in read_header(path).items():
            entries[name] = (path, entry)
    ignored = {HEAD} if architecture.tie_embeddings else set()
    extra = [
        name
        for name in entries.keys() - expected.keys() - ignored
        if not name.endswith(IGNORED_SUFFIX)
    ]
    if extra:
        raise ValueError(
            f"{folder} must hold only the tensors that its config.json implies, got {min(extra)} "
            f"({len(extra)} such tensors)"
        )
    for name, shape in expected.items():
        if name not in entries:
            raise ValueError(f"{folder} must hold the tensor {name}, got files without it")
        path, entry = entries[name]
        if entry.shape != shape:
            raise ValueError(
                f"{name} in {path} must have shape {shape} as config.json says, got {entry.shape}"
            )
        if entry.dtype not in WEIGHT_DTYPES:
            raise ValueError(
                f"{name} in {path} must be one of {', '.join(WEIGHT_DTYPES)}, got {entry.dtype}"
            )
    return {name: entries[name][0] for name in expected}
