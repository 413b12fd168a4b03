"""The publish, which brings new weights from the trainer into the generators."""
