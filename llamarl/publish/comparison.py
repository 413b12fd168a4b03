"""The comparison of the fingerprints of written weights with those of the weights that arrived. It
uses the standard library only, as the controller compares."""

from __future__ import annotations

import functools
import zlib
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

from llamarl.core.errors import FingerprintMismatch

MODULUS = 1 << 64  # of fingerprints
MAX_NAMED = 8  # parameters that an error lists


class Fingerprints(dict[str, int]):
    """Partial fingerprints by parameter.

    They are small when pickled, and those of several ranks merge on the way to the controller
    (`cluster.executor.MergeableResult`), which gets two per replica and version, whatever the
    number of ranks."""

    def merge(self, other: Mapping[str, int]) -> None:
        """Add the fingerprints of another rank, modulo MODULUS."""
        if not self:
            return self.update(other)
        for name, value in other.items():
            self.add(name, value)

    def add(self, name: str, value: int) -> None:
        """Add the fingerprint of another part of the parameter, modulo MODULUS."""
        self[name] = (self.get(name, 0) + value) % MODULUS

    def __reduce__(self) -> Any:
        return _unpack, (_packed(tuple(self)), array("Q", self.values()))


def _unpack(names: bytes, values: array[int]) -> Fingerprints:
    return Fingerprints(zip(_unpacked(names), values, strict=True) if values else ())


@functools.lru_cache(maxsize=64)  # all replicas have the same names
def _packed(names: tuple[str, ...]) -> bytes:
    return zlib.compress("\n".join(names).encode())


@functools.lru_cache(maxsize=64)
def _unpacked(names: bytes) -> tuple[str, ...]:
    return tuple(zlib.decompress(names).decode().split("\n"))


def compare(
    written: dict[str, int], found: dict[str, int], replica: int, version: int, way: str = ""
) -> None:
    """Raise FingerprintMismatch, naming the parameters, unless both fingerprints are equal.

    `way` says how the weights came to the replica, such as " from generator-0"."""
    if written == found:
        return
    wrong = sorted(
        name for name in written.keys() | found.keys() if written.get(name) != found.get(name)
    )
    raise FingerprintMismatch(
        f"publish of version {version} to generator {replica}{way}: {_named(wrong)} must arrive "
        f"as written, fingerprint {_hex(written, wrong[0])}, got {_hex(found, wrong[0])}"
    )


def compare_frozen(
    source: Iterable[Mapping[str, Mapping[str, int]]],
    target: Iterable[Mapping[str, Mapping[str, int]]],
    replica: int,
) -> None:
    """Raise FingerprintMismatch, naming the parameters, unless the weights beside a replica's
    adapters equal the trainer's. Both arguments have the sums of each rank, by kind and name."""
    ranks = [*target]
    held = [*source]
    for kind in dict.fromkeys(kind for rank in ranks for kind in rank):
        found = add_up(dict(rank.get(kind, {})) for rank in ranks)
        expected = add_up(dict(rank.get(kind, {})) for rank in held)
        wrong = sorted(name for name in found if found[name] != expected.get(name))
        if wrong:
            raise FingerprintMismatch(
                f"the weights beside adapters of generator {replica} must be the trainer's, got "
                f"others for {_named(wrong)}, fingerprint {_hex(found, wrong[0])} instead of "
                f"{_hex(expected, wrong[0])}"
            )


def add_up(ranks: Iterable[dict[str, int]]) -> Fingerprints:
    """Return the sum of all ranks' partial fingerprints, modulo MODULUS."""
    total = Fingerprints()
    for fingerprints in ranks:
        total.merge(fingerprints)
    return total


def _named(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def _hex(fingerprints: dict[str, int], name: str) -> str:
    return f"{fingerprints[name]:016x}" if name in fingerprints else "none"
