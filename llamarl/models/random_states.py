"""The random numbers of one trainer rank: where they start, and what a checkpoint keeps of them.

Owns: the streams of the host and of the rank's device, and their names in a checkpoint. Does not
own: what draws from them (the dropout of adapters; a loss of the user's). Invariant: the ranks of
one tensor-parallel group have one stream, for they work on the same tokens, and no two groups have
the same one.
"""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from llamarl.device.devices import platform_of
from llamarl.device.names import CPU

PREFIX = "random."


class RandomStates:
    """Those of data-parallel rank `data_rank`, which computes on `device`. Making them starts the
    streams of version 0."""

    def __init__(
        self, seed: int, data_rank: int, num_data_ranks: int, device: torch.device
    ) -> None:
        self._seed, self._data_rank, self._num_data_ranks = seed, data_rank, num_data_ranks
        self._devices = {each.type: each for each in (torch.device(CPU), device)}
        self.derive(0)

    def derive(self, version: int) -> None:
        """Start streams that follow from seed, version and data rank alone."""
        text = f"{self._seed} {version} {self._data_rank}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        torch.manual_seed(int.from_bytes(digest, "little") >> 1)  # the device's too

    def present(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of this rank: uint8, in host memory."""
        return {
            self._name(kind, self._data_rank): platform_of(device).random_state(device)
            for kind, device in self._devices.items()
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on where what `present` returned was taken."""
        for kind, device in self._devices.items():
            platform_of(device).set_random_state(device, state[self._name(kind, self._data_rank)])

    def are_those_of(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether a checkpoint with tensors of these shapes has the states of as many data ranks as
        there are now, for devices of this kind; all ranks find the same."""
        expected = {
            self._name(kind, rank): tuple(platform_of(device).random_state(device).shape)
            for kind, device in self._devices.items()
            for rank in range(self._num_data_ranks)
        }
        return expected == {name: shape for name, shape in shapes.items() if is_state(name)}

    def _name(self, kind: str, data_rank: int) -> str:
        return f"{PREFIX}{kind}.{data_rank}"


def is_state(name: str) -> bool:
    """Whether a checkpoint's tensor of this name is a random state."""
    return name.startswith(PREFIX)
