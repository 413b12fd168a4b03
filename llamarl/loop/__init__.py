"""The loop: which rollouts are asked for, scored, trained on and retired, and in what order."""
