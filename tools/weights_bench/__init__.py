"""The parts of `bench_weights.py`: a model's two layouts, processes, ranks, decoding beside it."""
