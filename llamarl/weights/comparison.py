"""The comparison of fingerprints: what was written against what was found.

Owns: adding up what ranks computed, and the error that names what differs. Does not own: computing
fingerprints (`fingerprint.py`). Invariant: standard library only, because the controller compares.
"""

from __future__ import annotations

from collections.abc import Iterable

from llamarl.weights.errors import FingerprintMismatch

MODULUS = 1 << 64  # of fingerprints
MAX_NAMED = 8  # parameters that an error lists


def compare(
    written: dict[str, int], found: dict[str, int], replica: int, version: int, way: str = ""
) -> None:
    """FingerprintMismatch, naming the parameters, unless both fingerprints are equal.

    `way` says how they came to the replica, such as " from generator-0".
    """
    wrong = sorted(
        name for name in written.keys() | found.keys() if written.get(name) != found.get(name)
    )
    if wrong:
        names = ", ".join(wrong[:MAX_NAMED])
        more = f" and {len(wrong) - MAX_NAMED} more" if len(wrong) > MAX_NAMED else ""
        raise FingerprintMismatch(
            f"publish of version {version} to generator {replica}{way}: {names}{more} must arrive "
            f"as written, fingerprint {_hex(written, wrong[0])}, got {_hex(found, wrong[0])}"
        )


def add_up(ranks: Iterable[dict[str, int]]) -> dict[str, int]:
    """Partial fingerprints of all ranks, added up modulo MODULUS."""
    total: dict[str, int] = {}
    for fingerprints in ranks:
        for name, value in fingerprints.items():
            total[name] = (total.get(name, 0) + value) % MODULUS
    return total


def _hex(fingerprints: dict[str, int], name: str) -> str:
    return f"{fingerprints[name]:016x}" if name in fingerprints else "none"
