"""Checkpoint folders of a run: written, committed, verified, pruned."""
