"""The embedded generation engine: continuous batching on any device torch runs on."""
