"""What `gpu_probe.py` asks of a card, a kind of question per module, and the scripts that bring
llamarl to one and run all that measures it there."""
