"""Which replica writes which rollouts.

Owns: the fields of `dispatch`. Does not own: the rankers (`lengths/`) or the choice
(`loop/balance.py`). Invariant: nothing here changes which rollouts are trained, or in which order.
"""

from dataclasses import dataclass

from llamarl.config.check import Section, choice, number


@dataclass(kw_only=True)
class DispatchConfig(Section):
    """How the length of rollouts that are still to be written is guessed, and used."""

    ranker: str = choice("none", "history", "model", "oracle")
    """Where the expected length of a rollout comes from: none (rollouts start in the order of
    admission) | history (from earlier rollouts of its prompt) | model (from these, and for new
    prompts from a linear model over the prompt's tokens that the run fits) | oracle (the true
    length; only with `sampling.replay_lengths`). With one, the longest rollouts of a step start
    first (`trainer.parts=batch`: all in order of length), and may get replicas of their own."""
    objective: str = choice("max", "sum")
    """What the split of the replicas between long and other rollouts minimises: max (the seconds of
    the side that ends last) | sum (of both sides)."""
    tail_share: float = number(0.2, least=0, most=1)
    """Share of a step's groups, the longest, that start before the others unless `trainer.parts` is
    batch, and may get replicas of their own where replicas are idle when a step begins
    (`staleness.max_staleness=0`); 0: none do."""
