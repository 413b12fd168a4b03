"""The figures of a publish.

Owns: the record. Does not own: measuring (`publisher.py`) or showing it (`metrics/run logger.py`).
Invariant: only commits that happened are counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from llamarl.errors import ReplicaLost


@dataclass(slots=True, kw_only=True)
class PublishStats:
    """One publish, and what replica syncs did on their own since the one before.

    `num_bytes` counts what the trainer sent, `num_relayed_bytes` what replicas passed on, both for
    commits that happened. `num_running`: replica -> rollouts that were being decoded when it
    committed; empty if the trainer had gone on before any replica could take the version. `lost`:
    replica -> why it is gone.
    """

    version: int = -1
    seconds: float = 0.0
    num_bytes: int = 0
    num_relayed_bytes: int = 0
    num_running: dict[int, int] = field(default_factory=dict)
    lost: dict[int, ReplicaLost] = field(default_factory=dict)
