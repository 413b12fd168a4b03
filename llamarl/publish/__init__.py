"""How new weights get from the trainer into the generators."""
