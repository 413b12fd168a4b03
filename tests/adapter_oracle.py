"""Random adapters, and the model that they make of another: W + scale B A, written down once."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from llamarl.core.config import LoraConfig
from llamarl.model.adapter_inventory import adapted_modules, adapter_shapes

if TYPE_CHECKING:
    from llamarl.model.architecture import Architecture


def random_adapters(
    architecture: Architecture, lora: LoraConfig, seed: int = 0
) -> dict[str, torch.Tensor]:
    """By name; as large as the weights of the tests' models, so that they change every logit."""
    source = torch.Generator().manual_seed(seed)
    return {
        name: 0.2 * torch.randn(shape, generator=source)
        for name, shape in adapter_shapes(architecture, lora).items()
    }


def deltas(adapters: dict[str, torch.Tensor], lora: LoraConfig) -> dict[str, torch.Tensor]:
    """What is added to each matrix, by its parameter's name; differentiable in the adapters."""
    return {
        f"{module}.weight": lora.alpha
        / lora.rank
        * adapters[f"{module}.lora_B.weight"]
        @ adapters[f"{module}.lora_A.weight"]
        for module in adapted_modules({name: tuple(each.shape) for name, each in adapters.items()})
    }


def merged(
    model: torch.nn.Module, adapters: dict[str, torch.Tensor], lora: LoraConfig
) -> torch.nn.Module:
    """A copy of the model with the adapters in its weights."""
    found = copy.deepcopy(model)
    parameters = dict(found.named_parameters())
    with torch.no_grad():
        for name, delta in deltas(adapters, lora).items():
            parameters[name] += delta
    return found
