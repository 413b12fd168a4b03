"""What writes rollouts: the worker, its episodes, the embedded engine, and vLLM beside it."""
