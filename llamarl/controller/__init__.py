"""The loop, the objects around it, and the supervisor of the executors."""
