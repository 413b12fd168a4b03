"""vLLM as an engine: optional, pinned to one version, and met in no other room."""
