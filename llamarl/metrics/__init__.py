"""What a run measures, shows and writes of itself."""
