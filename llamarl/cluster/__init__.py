"""Processes: the only code that knows how executors are started, called and stopped."""
