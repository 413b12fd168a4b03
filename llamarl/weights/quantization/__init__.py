"""Weights in eight bits: made where a publish begins, as the engine would make them."""
