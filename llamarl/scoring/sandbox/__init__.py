"""The sandbox for programs that a model wrote."""
