"""What all tests share: an interpreter that leaves the imports alone, commands that have done them.

Looking for garbage among the imports took a third of the collection, and time in every test. Hydra
composes a recipe twice, first only to ask whether it chooses hydra.mode, which none does.
"""

import asyncio
import gc
import inspect
import resource

import pytest
from hydra._internal.hydra import Hydra
from hypothesis import settings

OPEN_FILES = 1024  # that a process of the tests may need, which runs hundreds of them

ASYNC_LIMIT_S = 300.0  # a test that waits for ever fails

gc.set_threshold(100_000, 50, 100)
settings.register_profile("llamarl", deadline=None)  # a loaded machine is no mistake
settings.load_profile("llamarl")
Hydra.get_mode = lambda *_, **__: None


def pytest_configure():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < OPEN_FILES:
        pytest.exit(f"the tests need {OPEN_FILES} open files, got ulimit -n {hard}", returncode=2)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, hard))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test that is a coroutine in an event loop of its own, on a virtual clock if its module
    says so: `RUN_TESTS = clock.run`."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    if run := getattr(pyfuncitem.module, "RUN_TESTS", None):
        run(pyfuncitem.obj(**given))
    else:
        asyncio.run(asyncio.wait_for(pyfuncitem.obj(**given), ASYNC_LIMIT_S))
    return True


def pytest_collection_finish():
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    """Runs `llamarl` commands in forks of a process that has done the imports."""
    from tests.e2e.forks import Forks

    forks = Forks(tmp_path_factory.mktemp("forks"))
    yield forks
    forks.close()


@pytest.fixture(scope="session")
def ranks():
    """`ranks(n)`: the pool of n processes."""
    from tests.trainer.ranks import Ranks

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
    from tests.tiny_checkpoints import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")
