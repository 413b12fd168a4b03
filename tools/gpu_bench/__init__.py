"""What `bench_gpu.py` measures, a section per module."""
