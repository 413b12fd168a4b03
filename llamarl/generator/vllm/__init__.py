"""The vLLM engine in an executor's own process."""
