"""What runs between generate and train, checked before any process starts."""
