"""Wrong bits never become a version: what a publish compares, on fakes."""

import pytest

from llamarl.core.errors import FingerprintMismatch
from llamarl.planner.simulation.clock import run
from llamarl.publish.comparison import compare
from tests.contract.publish_fakes import (
    NAMES,
    World,
)


def test_a_wrong_fingerprint_stops_the_run_names_everything_and_never_commits() -> None:
    async def main():
        world = await World("ab").connected()
        await world.publish(0)
        world.generators[1].damage = {NAMES[0]: 12345}
        with pytest.raises(FingerprintMismatch) as caught:
            await world.publish(1)
        for word in (NAMES[0], "generator 1", "version 1", f"{12345:016x}", f"{20:016x}"):
            assert word in str(caught.value)
        assert NAMES[1] not in str(caught.value)
        assert world.generators[1].version == 0
        assert world.steps(1)[-1] == "abort"
        assert world.generators[1].prepared is None

    run(main())


def test_what_a_relay_passes_on_is_compared_with_what_the_trainer_wrote() -> None:
    async def main():
        world = await World(("h",) * 2).connected()
        await world.publish(0)
        commit = world.generators[0].commit

        async def rotten(version):
            answer = await commit(version)
            world.generators[0].active["norm"] = 77  # memory changes after it was verified
            world.generators[0].weights = lambda version: world.generators[0].active
            return answer

        world.generators[0].commit = rotten
        with pytest.raises(FingerprintMismatch) as caught:
            await world.publish(1)
        assert "generator 1 from the trainer through generator-0: norm must" in str(caught.value)
        assert f"{20:016x}, got {77 * 20:016x}" in str(caught.value)
        assert world.generators[1].version == 0

        world = await World(("h",) * 3).connected()
        world.generators[2].damage = {"norm": 5}
        with pytest.raises(FingerprintMismatch, match="generator 2 from generator-0: norm"):
            await world.publish(1)

    run(main())


def test_all_wrong_parameters_are_named_up_to_a_limit() -> None:
    written = {f"p{i}": i for i in range(10)}
    with pytest.raises(FingerprintMismatch, match=r": p0, p1, .*p7 and 2 more must"):
        compare(written, dict.fromkeys(written, 77), 0, 1)
    with pytest.raises(FingerprintMismatch, match=r": p3, unknown must .*0003, got none"):
        compare({"p3": 3, "p4": 4}, {"p4": 4, "unknown": 5}, 0, 1)
