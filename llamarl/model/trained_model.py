"""The interface of a model for trainer and reference; its code may be ours or another library's.

Sharding, optimizer, checkpoints, export and publishing work on this alone."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import nn

from llamarl.model.adapters import AdapterSwitch
from llamarl.model.attention import Packing
from llamarl.model.head import TokenStats


class TrainedModel(nn.Module, ABC):
    """A language model on packed rollouts, built on the meta device.

    Its `named_parameters` have the names and shapes of the checkpoint's tensors, and of adapters if
    it has any; `adapters` switches these off and on.
    """

    adapters: AdapterSwitch | None = None

    num_tensor_ranks = 1
    """The number of ranks that split the model by tensor parallelism: it computes a multiple of as
    many tokens."""

    @property
    def root(self) -> nn.Module:
        """The module whose submodules have the names of the checkpoint."""
        return self

    @property
    @abstractmethod
    def layers(self) -> Sequence[nn.Module]:
        """The decoder's layers, each of which is gathered by itself."""

    @abstractmethod
    def set_checkpointing(self, checkpointing: str) -> None:
        """Choose what the layers' backward pass recomputes (see TrainerConfig). It is applied
        inside the layers, below FSDP's hooks, so that recomputing gathers no weights."""

    @abstractmethod
    def prepare(self) -> None:
        """Set buffers that no file holds; called on all ranks when the weights are in place."""

    @abstractmethod
    def forward(
        self,
        token_ids: torch.Tensor,
        packing: Packing,
        targets: torch.Tensor,
        temperature: float,
        chosen: torch.Tensor | None = None,
    ) -> TokenStats:
        """Return log-probs of `targets` and entropies at `temperature` for packed rollouts.

        `token_ids`, `targets` int64 [N]; `packing` of the rollouts' N tokens, made a multiple of
        `num_tensor_ranks`, on the same device. Returns float32 [N] each; with `chosen` int64 [T],
        different tokens, these only, [T]: prompts need no logits. No rollout sees another one."""
