"""The parts of `bench_store.py`: the rows, llamarl's own store, and TransferQueue."""
