"""The figures of a publish; only commits that happened are counted."""

from dataclasses import dataclass, field

from llamarl.errors import ReplicaLost


@dataclass(slots=True, kw_only=True)
class PublishStats:
    """One publish, and what the replicas took between the one before and this one.

    `num_bytes` counts what the trainer sent, `num_relayed_bytes` what replicas passed on.
    `num_running`: replica -> rollouts that were being decoded when it committed; empty if the
    trainer had gone on before any replica could take the version. `lost`: replica -> why.
    """

    version: int = -1
    seconds: float = 0.0
    num_bytes: int = 0
    num_relayed_bytes: int = 0
    num_running: dict[int, int] = field(default_factory=dict)
    lost: dict[int, ReplicaLost] = field(default_factory=dict)
