"""What can go wrong between the two ends of a publish, and the end of the last replica.

Owns: these exceptions. Does not own: which of them ends a run (`publish.py`, the controller).
Invariant: importable without torch, and picklable.
"""

from __future__ import annotations


class FingerprintMismatch(RuntimeError):  # noqa: N818 - names what was found
    """What lies in a generator's memory is not what was written; ends the run."""


class StaleVersion(RuntimeError):  # noqa: N818 - names what was found
    """The source no longer holds the version it should write; the target takes a newer one."""


class TargetLost(RuntimeError):  # noqa: N818 - an outcome more than an error
    """A source cannot reach a replica's memory; only that replica is given up."""


class ReplicaLost(Exception):  # noqa: N818 - an outcome more than an error
    """A replica raised (the cause) or did not answer in time; it is connected no more."""


class NoGenerator(RuntimeError):  # noqa: N818 - what happened, as in the log line
    """Every generator replica is lost, so no rollout can be written."""
