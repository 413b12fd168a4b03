"""Time: the real controller on a virtual clock, with simulated executors."""
