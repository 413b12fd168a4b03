"""The commands of llamarl."""
