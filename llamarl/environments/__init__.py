"""Prompts, the requests made from them, and the rewards of their completions."""
