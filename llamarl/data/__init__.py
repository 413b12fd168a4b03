"""The tokenizer, and packing of rollouts onto ranks and micro-batches."""
