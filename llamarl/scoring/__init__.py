"""What runs between generate and train: rewards, stages, environments, agents, and the processes
of user code."""
