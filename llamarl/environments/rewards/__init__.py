"""Reward functions, and the pool of processes that runs them.

Every reward is `(prompt, completion, finished, config) -> float`: the text after the prompt
without special tokens, and whether the generator stopped by itself. Importing this package loads
neither torch nor a maths library.
"""
