"""The embedded generator engine: continuous batching on one device."""
