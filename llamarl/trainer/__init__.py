"""What learns from rollouts: the worker, its passes, losses, packing, the parallel model and
checkpoints."""
