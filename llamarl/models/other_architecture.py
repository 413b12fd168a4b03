"""The architecture of a checkpoint whose family only transformers and vLLM know.

Owns: what a run must know of such a checkpoint before a process starts. Does not own: what it
computes (transformers and vLLM read its config.json themselves). Invariant: torch-free, because the
controller's process reads it; the tensors are those that the files hold.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llamarl.models.architecture import Architecture, Fields, read_architecture, read_settings
from llamarl.models.safetensors_file import IGNORED_SUFFIX, read_header, weight_files

UNBOUNDED_POSITIONS = 2**24  # as many as generator.max_model_len may be
VOLATILE = ("dtype", "torch_dtype", "transformers_version", "_name_or_path", "eos_token_id")


@dataclass(frozen=True, kw_only=True)
class OtherArchitecture:
    """`model_class` is the first of config.json's `architectures`; `settings` a digest of what the
    file says about the computation; `shapes` those of the files' tensors, by name."""

    model_type: str
    model_class: str
    vocab_size: int
    max_positions: int
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...]
    settings: str
    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)


AnyArchitecture = Architecture | OtherArchitecture


def read_any_architecture(folder: str | Path) -> AnyArchitecture:
    """That of a family we know, if nothing in config.json is unsupported; else what there is.

    ValueError if the folder holds no checkpoint of a language model.
    """
    try:
        return read_architecture(folder)
    except ValueError:
        return _read(Path(folder))


def _read(folder: Path) -> OtherArchitecture:
    values, eos_token_ids = read_settings(folder)
    fields = Fields(folder / "config.json", values)
    for key in ("model_type", "architectures"):
        if not values.get(key):
            raise fields.error(key, "be given", values.get(key))
    if values.get("quantization_config") is not None:
        method = values["quantization_config"]
        raise fields.error("quantization_config", "be absent: weights cannot be quantised", method)
    tie_embeddings = fields.flag("tie_word_embeddings")
    shapes = {
        name: entry.shape
        for path in weight_files(folder)
        for name, entry in read_header(path).items()
        if not (tie_embeddings and name == "lm_head.weight") and not name.endswith(IGNORED_SUFFIX)
    }
    kept = {key: value for key, value in values.items() if key not in VOLATILE}
    return OtherArchitecture(
        model_type=str(values["model_type"]),
        model_class=str(values["architectures"][0]),
        vocab_size=fields.size("vocab_size"),
        max_positions=fields.size("max_position_embeddings", UNBOUNDED_POSITIONS),
        tie_embeddings=tie_embeddings,
        eos_token_ids=eos_token_ids,
        settings=hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest(),
        shapes={name: shapes[name] for name in sorted(shapes, key=_place)},
    )


def _place(name: str) -> list[str]:
    """Sorts layers by number, so that an export holds one file's tensors at a time."""
    return [part.zfill(6) if part.isdigit() else part for part in name.split(".")]
