"""What runs a job on a cluster scheduler."""
