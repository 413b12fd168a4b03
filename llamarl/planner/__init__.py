"""Forecasts of a recipe, made on a CPU before any GPU is rented: memory, publish, step time. They
use the run's own controller, gate, packing and publish plan."""
