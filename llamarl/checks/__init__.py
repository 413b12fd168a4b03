"""`llamarl check`: whether this machine computes a recipe rightly, asked before its first step."""
