"""Episodes that a program of the recipe's own plays, as a client of an API that serves the model on
this machine's loopback interface."""

from llamarl.scoring.agent.environment import AgentEnvironment

__all__ = ["AgentEnvironment"]
