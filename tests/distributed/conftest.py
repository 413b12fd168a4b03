"""One pool of processes per rank count, and one checkpoint, for the whole session."""

import pytest

from tests.distributed.ranks import Ranks
from tests.tiny_checkpoints import write_checkpoint


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


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")
