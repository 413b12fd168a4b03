"""Losses and advantages: pure functions of tensors and rewards.

Owns: the maths of every algorithm. Does not own: sampling, collectives or optimizers. Invariant:
importing this package loads no torch; `losses` does, `advantages` does not.
"""
