"""The figures of a publish.

Owns: the record. Does not own: measuring (`publish.py`) or showing it (`metrics/journal.py`).
Invariant: only flips that happened are counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from llamarl.weights.errors import ReplicaLost


@dataclass(slots=True, kw_only=True)
class PublishStats:
    """One publish, and what lanes did on their own since the one before.

    `num_bytes` counts what the trainer sent, `num_relayed_bytes` what replicas passed on, both for
    flips that happened. `num_running`: replica -> rollouts that were being decoded when it flipped;
    empty if the trainer had gone on before any replica could take the version. `lost`: replica ->
    why it is gone.
    """

    version: int = -1
    seconds: float = 0.0
    num_bytes: int = 0
    num_relayed_bytes: int = 0
    num_running: dict[int, int] = field(default_factory=dict)
    lost: dict[int, ReplicaLost] = field(default_factory=dict)
