"""The stages of a publish: what goes on at once, what one after the other.

Owns: how the seconds of ranks and ways add up to those of a publish. Does not own: these seconds
(`delivery.py`, `publish.py`). Invariant: the stages add up to the whole, and no more of a part
makes the whole shorter.

A source packs one message while another is sent, and a target unpacks one while the next arrives.
So a stream of messages takes as long as packing, sending, receiving or unpacking, whichever is
longest, and for what begins before or ends after that one message more. The sums of parameters that
have come are taken meanwhile.
"""

from dataclasses import dataclass

NUM_PHASES = 4
"""Calls to all ranks: prepare, write, verify, commit."""

STAGES = {
    "maxima": "the trainer reads its shards, for the scales of 8-bit weights",
    "packing": "the trainer casts, sums and copies",
    "wire": "messages or copies between devices",
    "unpacking": "replicas copy messages to their places",
    "relay": "replicas pass the version on to others",
    "verify": "replicas sum what arrived",
    "commit": "replicas take it over",
    "phases": "calls to all ranks and back",
}
"""In their order; how much of a stage counts that another one hides is what is left of it."""


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Seconds of the busiest rank, all messages to all replicas together: packing, sending,
    receiving, unpacking. `first` is the share of packing, and `last` that of unpacking, which one
    message has; `num_rounds` messages go from a source to a target. Unless it `overlaps`, all go on
    one after the other."""

    packing_s: float
    sending_s: float
    receiving_s: float
    unpacking_s: float
    first: float = 1.0
    last: float = 1.0
    num_rounds: float = 1.0
    overlaps: bool = True

    def stages(self) -> dict[str, float]:
        """Packing, wire and unpacking, as far as each makes the stream longer."""
        wire_s = max(self.sending_s, self.receiving_s)
        begin_s, end_s = self.first * self.packing_s, self.last * self.unpacking_s
        ways = [(self.packing_s, wire_s, self.unpacking_s)]
        if self.overlaps:
            ways = [
                (self.packing_s, self.last * wire_s, end_s),
                (begin_s, self.sending_s, end_s),
                (begin_s, self.receiving_s, end_s),
                (begin_s, self.last * wire_s, self.unpacking_s),
            ]
        longest = max(ways, key=sum)
        return dict(zip(("packing", "wire", "unpacking"), longest, strict=True))


def hidden_s(verify_s: float, stream: Stream) -> float:
    """What of the sums of a version is taken while its messages come, if there is time: all but
    those of the last round. All sources send the same parameters in a round, and a parameter is
    summed when it has come from each of them."""
    taken_s = sum(stream.stages().values())
    return min((1 - 1 / stream.num_rounds) * verify_s, taken_s) if stream.overlaps else 0.0


def mapped_stages(writing_s: float, way_s: float) -> dict[str, float]:
    """Where the trainer writes straight into the replicas' memory: its work, and what the way to
    them takes longer than that."""
    return {"packing": writing_s, "wire": max(0.0, way_s - writing_s)}


def publish_stages(
    moved: dict[str, float],
    *,
    phase_s: float,
    verify_s: float,
    commit_s: float,
    maxima_s: float = 0.0,
    relay_s: float = 0.0,
    hidden_s: float = 0.0,
) -> dict[str, float]:
    """Seconds by stage. `moved` are those in which the version gets to the replicas that the
    trainer feeds, `hidden_s` of `verify_s` among them; if these pass it on, in `relay_s`, it is
    checked and committed there again."""
    num_rounds = 1 + (relay_s > 0)
    found = moved | {
        "maxima": maxima_s,
        "relay": relay_s,
        "verify": num_rounds * verify_s - hidden_s,
        "commit": num_rounds * commit_s,
        "phases": num_rounds * NUM_PHASES * phase_s,
    }
    return {name: found.get(name, 0.0) for name in STAGES}
