"""The parts of bench_staging.py."""
