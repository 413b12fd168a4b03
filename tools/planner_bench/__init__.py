"""What `tools/bench_planner.py` runs beside the planner itself."""
