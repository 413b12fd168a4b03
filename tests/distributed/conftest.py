"""One pool of processes per rank count for the whole session."""

import pytest

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def ranks():
    """`ranks(n)`: the pool of n processes."""
    pools = {}

    def pool(num_ranks):
        if num_ranks not in pools or not pools[num_ranks].is_alive:
            pools[num_ranks] = Ranks(num_ranks)
        return pools[num_ranks]

    yield pool
    for running in pools.values():
        running.close()
