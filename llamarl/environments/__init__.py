"""Prompts, the requests made of them, and the rewards of what comes back."""
