"""Which rollouts will be long, and what follows from it for the replicas."""
