"""Simulated runs for forecasts of time: the real controller on a virtual clock, with simulated
executors."""
