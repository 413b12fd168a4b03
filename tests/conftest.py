"""What every test wants of the interpreter: that it leaves the imports alone.

Looking for garbage among them took a third of the collection, and time in every test after it.
"""

import gc

gc.set_threshold(100_000, 50, 100)


def pytest_collection_finish():
    gc.collect()
    gc.freeze()
