"""The parts of `bench_turns.py`: the program that asks, and TRL's way for it to the model."""
