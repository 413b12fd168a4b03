"""Losses, advantages and group filters: pure functions of tensors and rewards."""
