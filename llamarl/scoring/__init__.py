"""The work between generation and training: rewards, stages, environments, agents, and the
processes that run user code."""
