"""The models, sizes and configs that the sections share, and what the device can do at most."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from llamarl.core.config import (
    CheckpointConfig,
    ClusterConfig,
    Config,
    DataConfig,
    EmbeddedConfig,
    MetricsConfig,
    ModelConfig,
    PlacementConfig,
    RewardConfig,
    SamplingConfig,
    StalenessConfig,
    TrainerConfig,
    WeightsConfig,
)
from llamarl.core.device.devices import check_gpu
from llamarl.core.device.hardware import CPU, GPUS, Gpu
from llamarl.model.architecture import Architecture, read_architecture
from llamarl.model.inventory import parameter_shapes
from llamarl.trainer.losses.aipo import AIPOConfig

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart"
RANDOM_REWARD = Path(__file__).resolve().parents[1] / "gpu_session"  # whose task.py draws it
LLAMA_1B = {  # Llama 3.2 1B
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
SMALL = {  # a run saves its optimizer state at the end: keep that small
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
TINY = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Sizes of one benchmark; `folder` takes what is written. Bytes and tokens as names say."""

    device: str
    folder: str
    model: dict[str, int]
    loop_model: dict[str, int]
    batches: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    train_rows: int
    train_tokens: int
    micro_batch_tokens: int
    offload_bytes: int
    loop_groups: int
    loop_tokens: int
    loop_steps: int

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.is_cuda else "float32"


def full(device: str, folder: str) -> Setting:
    """About a billion parameters, on a GPU with 80 GB."""
    return Setting(
        device=device,
        folder=folder,
        model=LLAMA_1B,
        loop_model=SMALL,
        batches=(1, 16, 64, 256),
        prompt_tokens=128,
        new_tokens=256,
        train_rows=64,
        train_tokens=1024,
        micro_batch_tokens=8192,
        offload_bytes=4 << 30,
        loop_groups=16,
        loop_tokens=512,
        loop_steps=8,
    )


def tiny(device: str, folder: str) -> Setting:
    """Seconds on a CPU."""
    return Setting(
        device=device,
        folder=folder,
        model=TINY,
        loop_model=TINY,
        batches=(1, 4),
        prompt_tokens=6,
        new_tokens=12,
        train_rows=4,
        train_tokens=24,
        micro_batch_tokens=64,
        offload_bytes=1 << 20,
        loop_groups=2,
        loop_tokens=12,
        loop_steps=3,
    )


def make_checkpoint(setting: Setting, model: dict[str, int], *, has_weights: bool) -> str:
    """A folder with config.json, the quickstart's tokenizer and, if wanted, random weights."""
    folder = Path(setting.folder, f"model-{model['hidden_size']}-{model['num_hidden_layers']}")
    folder.mkdir(exist_ok=True)
    config = json.loads((QUICKSTART / "checkpoint" / "config.json").read_text())
    config |= model | {"tie_word_embeddings": True, "max_position_embeddings": 8192}
    (folder / "config.json").write_text(json.dumps(config))
    for path in (QUICKSTART / "checkpoint").glob("*token*"):
        (folder / path.name).write_bytes(path.read_bytes())
    if has_weights and not (folder / "model.safetensors").exists():
        from safetensors.torch import save_file

        random = torch.Generator(setting.device).manual_seed(0)
        tensors = {
            name: torch.ones(shape, dtype=torch.bfloat16)
            if len(shape) == 1
            else torch.empty(shape, dtype=torch.bfloat16, device=setting.device)
            .normal_(0, 0.02, generator=random)
            .cpu()
            for name, shape in parameter_shapes(read_architecture(folder)).items()
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def make_lengths(setting: Setting) -> str:
    """A file of lengths for rollouts, up to `loop_tokens` and mostly far below."""
    path, drawn, longest = Path(setting.folder, "lengths.json"), Random(0), setting.loop_tokens
    lengths = [
        min(longest, int(drawn.lognormvariate(0, 0.8) * longest / 3) + 1) for _ in range(512)
    ]
    path.write_text(json.dumps(lengths))
    return str(path)


def make_config(setting: Setting, checkpoint: str, **sections: dict[str, Any]) -> Config:
    """A whole config; `sections` change fields of sections, by the section's name."""
    device, dtype = setting.device, setting.dtype
    context = setting.prompt_tokens + setting.new_tokens
    defaults: dict[str, tuple[type, dict[str, Any]]] = {
        "generator": (
            EmbeddedConfig,
            {
                "device": device,
                "dtype": dtype,
                "max_num_seqs": max(setting.batches),
                "max_model_len": context,
            },
        ),
        "trainer": (
            TrainerConfig,
            {
                "device": device,
                "compute_dtype": dtype,
                "tokens_per_micro_batch": setting.micro_batch_tokens,
            },
        ),
        "weights": (
            WeightsConfig,
            {"transport": "cuda_ipc" if setting.is_cuda else "shared_memory"},
        ),
        "sampling": (SamplingConfig, {"max_tokens": setting.new_tokens}),
        "algorithm": (AIPOConfig, {"filters": []}),
        "reward": (RewardConfig, {"functions": ["exact"]}),
        "data": (DataConfig, {"prompts": str(QUICKSTART / "prompts.jsonl")}),
        "model": (ModelConfig, {"checkpoint": checkpoint}),
        "placement": (PlacementConfig, {}),
        "cluster": (ClusterConfig, {"gpu": gpu_kind(setting)[0]}),
        "staleness": (StalenessConfig, {}),
        "checkpoint": (CheckpointConfig, {"export": False, "keep": 1}),
        "metrics": (MetricsConfig, {"trackers": [], "live": False}),
    }
    made = {
        name: kind(**fields | sections.pop(name, {})) for name, (kind, fields) in defaults.items()
    }
    return Config(**made, **sections.pop("run", {}))


def gpu_kind(setting: Setting) -> tuple[str, Gpu]:
    """The kind of this GPU in the planner's table; ValueError if it does not stand there."""
    if not setting.is_cuda:
        return CPU, GPUS[CPU]
    found = torch.cuda.get_device_properties(0)
    for name, gpu in GPUS.items():
        if name == CPU:
            continue
        try:
            check_gpu(name, found.name, found.total_memory)
        except ValueError:
            continue
        return name, gpu
    raise ValueError(f"core/device/hardware.py must know the GPU, got {found.name}")


def num_parameters(architecture: Architecture) -> int:
    """Elements of all parameters, tied ones once."""
    return sum(torch.Size(shape).numel() for shape in parameter_shapes(architecture).values())


def synchronize(setting: Setting) -> None:
    """Wait for the GPU, if there is one."""
    if setting.is_cuda:
        torch.cuda.synchronize()


def best_s(setting: Setting, work: Callable[[], object], repeats: int = 3) -> float:
    """The shortest of some runs, after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        synchronize(setting)
        start_s = time.perf_counter()
        work()
        synchronize(setting)
        times.append(time.perf_counter() - start_s)
    return min(times[1:])
