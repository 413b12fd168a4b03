"""The inventory of a checkpoint: the tensors that it must hold, and the check that it does.

This module is free of torch, because the controller's process checks checkpoints before any other
process starts."""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from llamarl.core.config import (
    Config,
    EmbeddedConfig,
    GeneratorConfig,
    TrainerConfig,
    TransformersConfig,
)
from llamarl.core.config.trainer import OF_EXPERTS
from llamarl.core.fields import require
from llamarl.model.architecture import (
    DOWN,
    FAMILIES,
    GATE_UP,
    LINEARS,
    ROUTER,
    AnyArchitecture,
    Architecture,
    OtherArchitecture,
    read_any_architecture,
    read_architecture,
)
from llamarl.model.safetensors_file import (
    IGNORED_SUFFIX,
    Piece,
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
        return dict(_stack(architecture.shapes)[0])
    hidden_size, vocab_size = architecture.hidden_size, architecture.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab_size, hidden_size)}
    for i in range(architecture.num_layers):
        for name, shape in layer_shapes(architecture, i).items():
            shapes[f"model.layers.{i}.{name}"] = shape
    shapes["model.norm.weight"] = (hidden_size,)
    if not architecture.tie_embeddings:
        shapes["lm_head.weight"] = (vocab_size, hidden_size)
    return shapes


def layer_shapes(architecture: Architecture, layer: int) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the parameters of a layer, by their names in it."""
    a = architecture
    norm = (a.hidden_size,)
    experts = a.experts if layer in a.sparse_layers else None
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": norm}
    for name, linear in LINEARS.items():
        if experts is not None and name.startswith("mlp."):
            continue
        shapes[f"{name}.weight"] = (a.size(linear.outputs), a.size(linear.inputs))
        if getattr(a, linear.bias):
            shapes[f"{name}.bias"] = (a.size(linear.outputs),)
    if experts is not None:
        number, inner = experts.num_experts, experts.intermediate_size
        shapes[ROUTER] = (number, a.hidden_size)
        shapes[GATE_UP] = (number, 2 * inner, a.hidden_size)
        shapes[DOWN] = (number, a.hidden_size, inner)
    if a.qk_norm:
        for name, width in (("q_norm", "queries"), ("k_norm", "keys")):
            size = a.size(width) if a.norms_all_heads else a.head_dim
            shapes[f"self_attn.{name}.weight"] = (size,)
    shapes["post_attention_layernorm.weight"] = norm
    return shapes


def active_sizes(architecture: Architecture, layer: int) -> dict[str, int]:
    """Return name -> number of elements that a token meets, of the parameters of a layer: of
    stacked experts those of the chosen ones."""
    found = {name: math.prod(shape) for name, shape in layer_shapes(architecture, layer).items()}
    if (experts := architecture.experts) is not None:
        for name in (GATE_UP, DOWN):
            if name in found:
                found[name] = found[name] // experts.num_experts * experts.num_chosen
    return found


class FilePiece(NamedTuple):
    """The `tensor` of a file that holds a part of a `parameter`: its first index in that, its shape
    there, and its own shape, which lacks the dimension of experts if it is one expert's."""

    parameter: str
    tensor: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    file_shape: tuple[int, ...]


def whole_piece(name: str, shape: tuple[int, ...], tensor: str = "") -> FilePiece:
    """Return the piece of a parameter that is one `tensor` of a file (empty: of its name)."""
    return FilePiece(name, tensor or name, (0,) * len(shape), shape, shape)


def file_pieces(architecture: AnyArchitecture) -> Iterator[FilePiece]:
    """Yield the pieces of all tensors of the Hub's files, parameter by parameter. A stacked
    parameter has one matrix per expert there, or two; every other parameter is one tensor of its
    own name, or of the family's for a router."""
    if isinstance(architecture, OtherArchitecture):
        yield from _stack(architecture.shapes)[1]
        return
    has_experts = isinstance(architecture, Architecture) and architecture.experts is not None
    experts = FAMILIES[architecture.model_type].experts if has_experts else None
    for name, shape in parameter_shapes(architecture).items():
        layer, _, last = name.partition(".mlp.")
        if experts is None or not last:
            yield whole_piece(name, shape)
        elif name.endswith(ROUTER):
            yield whole_piece(name, shape, f"{layer}.{experts.block}.gate.weight")
        elif name.endswith((GATE_UP, DOWN)):
            gate, up, down = experts.matrices
            matrices = (gate, up) if name.endswith(GATE_UP) else (down,)
            rows = shape[1] // len(matrices)
            for expert in range(shape[0]):
                for i, matrix in enumerate(matrices):
                    tensor = f"{layer}.{experts.block}.experts.{expert}.{matrix}.weight"
                    start, size = (expert, i * rows, 0), (1, rows, shape[2])
                    yield FilePiece(name, tensor, start, size, size[1:])
        else:
            yield whole_piece(name, shape)


OF_EXPERT = re.compile(r"(.+\.experts)\.(0|[1-9]\d*)\.(gate_proj|up_proj|down_proj)\.weight")


def _stack(
    tensors: Mapping[str, tuple[int, ...]],
) -> tuple[dict[str, tuple[int, ...]], list[FilePiece]]:
    """Return the shapes of the parameters that transformers makes of the `tensors` of files, by
    name, and the pieces that the files hold of them, in the order of the parameters. It stacks the
    matrices of a mixture's gated experts as our own model does; any other parameter is one tensor.

    Raises ValueError unless such a mixture has three matrices for each expert, of the same
    shapes."""
    mixtures: dict[str, dict[tuple[int, str], tuple[int, ...]]] = {}
    for tensor, shape in tensors.items():
        if found := OF_EXPERT.fullmatch(tensor):
            mixtures.setdefault(found[1], {})[int(found[2]), found[3]] = shape
    stacks = {
        name: _check_mixture(name, matrices)
        for name, matrices in mixtures.items()
        if any(kind == "gate_proj" for _, kind in matrices)
    }
    shapes: dict[str, tuple[int, ...]] = {}
    pieces: dict[str, list[FilePiece]] = {}
    for tensor, shape in tensors.items():
        piece = whole_piece(tensor, shape)
        if (found := OF_EXPERT.fullmatch(tensor)) and found[1] in stacks:
            number, inner, hidden = stacks[found[1]]
            expert, is_down = int(found[2]), found[3] == "down_proj"
            name = f"{found[1]}.{'down_proj' if is_down else 'gate_up_proj'}"
            start = (expert, inner if found[3] == "up_proj" else 0, 0)
            piece = FilePiece(name, tensor, start, (1, *shape), shape)
            shape = (number, hidden, inner) if is_down else (number, 2 * inner, hidden)
        shapes.setdefault(piece.parameter, shape)
        pieces.setdefault(piece.parameter, []).append(piece)
    return shapes, [piece for name in shapes for piece in pieces[name]]


def _check_mixture(
    name: str, matrices: Mapping[tuple[int, str], tuple[int, ...]]
) -> tuple[int, int, int]:
    """Return the number of experts, their intermediate size and the hidden size."""
    kinds = ("gate_proj", "up_proj", "down_proj")
    number = 1 + max(expert for expert, _ in matrices)
    inner, hidden = (*matrices.get((0, "gate_proj"), ()), 0, 0)[:2]
    for expert in range(number):
        for kind in kinds:
            tensor = f"{name}.{expert}.{kind}.weight"
            shape = matrices.get((expert, kind))
            if shape is None:
                must = f"hold three matrices for each of {number} experts"
                raise ValueError(f"the checkpoint must {must}, got no {tensor}")
            expected = (hidden, inner) if kind == "down_proj" else (inner, hidden)
            require(shape == expected, tensor, f"have the shape {expected} of its kind", shape)
    return number, inner, hidden


def attention_cost(architecture: AnyArchitecture) -> float:
    """Return the cost of attention by which a rollout of l tokens costs as much as l +
    attention_cost * l**2 tokens without attention.

    A token takes 2 operations per parameter that it meets in the layers and the head; scores and
    values of a causal pass take 2 per layer and channel of the queries for each of l**2 pairs. For
    a family that we do not know it is 0."""
    if isinstance(architecture, OtherArchitecture):
        return 0.0
    a = architecture
    sizes = (sum(active_sizes(a, layer).values()) for layer in range(a.num_layers))
    num_parameters = sum(sizes) + a.vocab_size * a.hidden_size
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
    """Raise ValueError, in one line, unless every tensor-parallel and every expert-parallel rank
    gets an equal share."""
    if isinstance(architecture, OtherArchitecture):
        return  # the trainer does not split it, and vLLM checks itself
    check_experts(architecture, trainer)
    check_num_ranks("trainer.tensor_parallel", trainer.tensor_parallel, architecture)
    if isinstance(generator, EmbeddedConfig):  # vLLM's limits: `generator/vllm/limits.py`
        check_engine_ranks(generator.num_ranks, architecture)


def replays_routing(config: Config, architecture: AnyArchitecture) -> bool:
    """Return whether generators record the experts of each token, and the trainer routes by that
    record."""
    trainer = config.trainer
    has_experts = isinstance(architecture, Architecture) and architecture.experts is not None
    is_own = has_experts and not isinstance(trainer, TransformersConfig)
    return is_own and trainer.routing_replay == "auto" and not config.algorithm.is_sft


def check_engine_ranks(num_ranks: int, architecture: Architecture) -> None:
    """Raise ValueError unless so many ranks of an embedded replica can share the model: all that
    tensor-parallel ranks split, and whole experts."""
    key, experts = "generator.num_ranks", architecture.experts
    check_num_ranks(key, num_ranks, architecture)
    if experts is not None:
        must = f"divide the checkpoint's {experts.num_experts} experts"
        require(experts.num_experts % num_ranks == 0, key, must, num_ranks)


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
    if a.experts is not None and not a.experts.dense_layers:
        del split["intermediate channels"]
    if any(size % num_ranks for size in split.values()):
        listed = ", ".join(f"{size} {what}" for what, size in split.items())
        raise ValueError(f"{key} must divide the checkpoint's {listed}, got {num_ranks}")
    if a.norms_all_heads:
        must = f"be 1 with a {a.model_type}, whose attention normalises all heads together"
        require(num_ranks == 1, key, must, num_ranks)


def check_experts(architecture: Architecture, trainer: TrainerConfig) -> None:
    """Raise ValueError, in one line, unless the expert-parallel ranks get whole experts, and the
    ranks that share those get equal parts of them; or if a dense model is to be trained with
    options of experts."""
    key, num_ranks = "trainer.expert_parallel", trainer.expert_parallel
    experts = architecture.experts
    if experts is None:
        for name, value in OF_EXPERTS.items():
            must = f"be {value} with a {architecture.model_type}, which has no experts"
            trainer.require(getattr(trainer, name) == value, name, must)
        return
    must = f"divide the checkpoint's {experts.num_experts} experts"
    require(experts.num_experts % num_ranks == 0, key, must, num_ranks)
    number = trainer.num_expert_shard_ranks
    shapes = layer_shapes(architecture, architecture.sparse_layers[0])
    for name in (GATE_UP, DOWN):
        if expert_shard_dim(shapes[name], trainer) is None:
            must = (
                f"leave a number of ranks that divides a dimension of each expert, got {number} "
                f"ranks to share each of them, with trainer.num_ranks={trainer.num_ranks} and"
            )
            raise ValueError(f"{key} must {must} {num_ranks}")


def expert_shard_dim(shape: tuple[int, ...], trainer: TrainerConfig) -> int | None:
    """Return the dimension along which the ranks that share stacked experts of this whole `shape`
    cut them: the experts where no other rank does and they divide evenly, else another one that
    does; None if there is none. FSDP cuts unevenly along the first dimension only."""
    number, is_whole = trainer.num_expert_shard_ranks, trainer.expert_parallel == 1
    for dim, size in enumerate(shape):
        if size % number == 0 and (dim > 0 or is_whole):
            return dim
    return 0 if is_whole else None


def locate(folder: Path, architecture: AnyArchitecture) -> dict[str, tuple[Piece, ...]]:
    """Return parameter name -> the tensors of the files that hold it, after every check that
    headers allow. Experts may have one matrix each, or be stacked as the parameter is."""
    shapes = parameter_shapes(architecture)
    entries: dict[str, tuple[Path, TensorEntry]] = {}
    for path in weight_files(folder):
        for name, entry in read_header(path).items():
            if name in entries:
                must = f"be in one file of {folder}"
                raise ValueError(f"{name} must {must}, got {entries[name][0].name} and {path.name}")
            entries[name] = (path, entry)
    found: dict[str, list[Piece]] = {name: [] for name in shapes}
    for piece in file_pieces(architecture):
        name = piece.parameter
        if name in entries and piece.tensor != name:  # stacked in the file, too
            if found[name]:
                continue
            piece = whole_piece(name, shapes[name])
        if piece.tensor not in entries:
            raise ValueError(f"{folder} must hold the tensor {piece.tensor}, got files without it")
        path, entry = entries[piece.tensor]
        if entry.shape != piece.file_shape:
            raise ValueError(
                f"{piece.tensor} in {path} must have shape {piece.file_shape} as config.json says, "
                f"got {entry.shape}"
            )
        if entry.dtype not in WEIGHT_DTYPES:
            allowed = ", ".join(WEIGHT_DTYPES)
            raise ValueError(
                f"{piece.tensor} in {path} must be one of {allowed}, got {entry.dtype}"
            )
        found[name].append(Piece(path, piece.tensor, piece.start, piece.shape))
    used = {piece.name for pieces in found.values() for piece in pieces}
    ignored = {HEAD} if architecture.tie_embeddings else set()
    extra = [name for name in entries.keys() - used - ignored if not name.endswith(IGNORED_SUFFIX)]
    if extra:
        raise ValueError(
            f"{folder} must hold only the tensors that its config.json implies, got {min(extra)} "
            f"({len(extra)} such tensors)"
        )
    return {name: tuple(pieces) for name, pieces in found.items()}
