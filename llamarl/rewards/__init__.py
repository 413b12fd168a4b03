"""Reward functions and the process pool that runs them."""
