"""Memory of every rank, found out without a process."""
