"""The states of a replica in a publish, and the only moves between them.

Owns: the table. Does not own: what is done in a state (`replica_sync.py`) or who decides on it
(`replicas.py`). Invariant: no bucket is committed that was not verified, and a replica that has
begun to commit reaches the new version or is gone.

`docs/weights.md` has the picture; a test compares it with the table.
"""

from enum import Enum


class State(Enum):
    """Where a replica stands. It decodes in those that are `is_whole`."""

    # No route leads here from its source: at the start, after an abort, after a new source.
    DISCONNECTED = "disconnected"
    # Connected, with one whole version active and nothing prepared.
    IDLE = "idle"
    # The first bucket is prepared: its source writes it, and both fingerprints are compared.
    STAGING = "staging"
    # The first bucket is what was written, and waits until this replica may commit.
    VERIFIED = "verified"
    # A verified bucket becomes active.
    COMMITTING = "committing"
    # Some buckets of the new version are active; the next one is prepared and being written.
    MIXED = "mixed"
    # Lost or dropped.
    GONE = "gone"

    @property
    def is_whole(self) -> bool:
        """True if all active weights are of one version, so that siblings may read them."""
        return self not in (State.COMMITTING, State.MIXED, State.GONE)


class Event(Enum):
    """What happens to a replica."""

    CONNECT = "connect"  # both ends have the route
    DETACH = "detach"  # another source feeds it from now on
    PREPARE = "prepare"  # its ranks have opened their staging memory for a bucket
    VERIFY = "verify"  # the fingerprints of what was written and of what arrived are equal
    COMMIT = "commit"  # it is its turn, and its source keeps the version
    FINISH = "finish"  # the last bucket is active
    ABORT = "abort"  # the write, the comparison or the source failed; what was prepared is given up
    LEAVE = "leave"  # it failed, or was dropped


TRANSITIONS = {
    (State.DISCONNECTED, Event.CONNECT): State.IDLE,
    (State.IDLE, Event.DETACH): State.DISCONNECTED,
    (State.IDLE, Event.PREPARE): State.STAGING,
    (State.STAGING, Event.VERIFY): State.VERIFIED,
    # Ranks of the source may still write into what was prepared: only a new route ends that.
    (State.STAGING, Event.ABORT): State.DISCONNECTED,
    (State.VERIFIED, Event.ABORT): State.DISCONNECTED,
    (State.VERIFIED, Event.COMMIT): State.COMMITTING,
    (State.COMMITTING, Event.PREPARE): State.MIXED,
    (State.MIXED, Event.VERIFY): State.COMMITTING,
    (State.MIXED, Event.ABORT): State.GONE,
    (State.COMMITTING, Event.FINISH): State.IDLE,
    (State.GONE, Event.ABORT): State.GONE,
    **{(state, Event.LEAVE): State.GONE for state in State},
}


def next_state(state: State, event: Event) -> State:
    """The state after `event`; RuntimeError if the table does not allow it."""
    if (state, event) not in TRANSITIONS:
        raise RuntimeError(f"event {event.value} must not happen in state {state.value}")
    return TRANSITIONS[state, event]
