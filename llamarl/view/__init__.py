"""A run's kept rollouts as one page that a browser shows offline (`llamarl view RUN`), and runs
compared."""
