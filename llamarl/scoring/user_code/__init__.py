"""Processes that run a user's functions: whatever these do, the run goes on."""
