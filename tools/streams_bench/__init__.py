"""The simulated part of bench_streams.py."""
