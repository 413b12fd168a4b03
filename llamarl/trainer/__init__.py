"""The trainer, which learns from rollouts: its worker, passes, losses, packing, the parallel model
and checkpoints."""
