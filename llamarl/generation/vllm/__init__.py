"""vLLM as an engine: optional, pinned to one version, and imported by no other package."""
