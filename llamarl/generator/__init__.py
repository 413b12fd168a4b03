"""The generator, which writes rollouts: its worker, the episodes, the embedded engine, and vLLM
beside it."""
