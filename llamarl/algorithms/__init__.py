"""Losses and advantages: pure functions of tensors and rewards."""
