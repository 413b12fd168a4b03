"""Which replicas hold equal bytes, so that one may pass a version on to the other.

Owns: the record, and what it follows from. Does not own: who feeds whom (`sync/assignment.py`).
Invariant: a replica of another kind may have fewer bits, or memory that cannot be mapped.
"""

from dataclasses import dataclass

from llamarl.config import GeneratorConfig
from llamarl.config.pools import generator_of


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightKind:
    """`device`, cpu or cuda, is where the weights are; `form` is all else that replicas of a kind
    have in common: engine, dtype, quantisation, ranks."""

    device: str
    form: tuple[str, ...] = ()


def weight_kind(generator: GeneratorConfig, replica: int) -> WeightKind:
    """Of one replica of a run with this `generator`."""
    own = generator_of(generator, replica)
    form = type(own).__name__, own.dtype, own.quantization, str(own.num_ranks)
    return WeightKind(device=own.device, form=form)
