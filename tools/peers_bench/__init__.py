"""The parts of `bench_peers.py`: the task, one run of each side, and TRL's own program."""
