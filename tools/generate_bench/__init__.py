"""The parts of `bench_generate.py`: models and prompts, and the engines that are compared."""
