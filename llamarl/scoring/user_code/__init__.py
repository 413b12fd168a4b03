"""Processes that run a user's functions, whose failures never end the run's own processes."""
