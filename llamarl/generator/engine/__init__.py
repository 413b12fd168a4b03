"""The embedded engine: continuous batching over a KV cache allocated once."""
