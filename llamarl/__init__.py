"""llamarl: asynchronous reinforcement learning for pretrained language models.

Read `controller.py` first: it is the whole loop. `types.py` holds the glossary.
"""

__version__ = "0.1.0"
