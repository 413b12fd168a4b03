"""Fingerprints that are taken while the rest of a version is on its way."""

from __future__ import annotations

import random
import threading

import pytest

from llamarl.publish.target import EarlySums
from tests.random_search import case, searched


@searched(few=300, many=5000)
def test_each_sum_is_taken_once_and_after_its_parameter_has_come(seeds: range) -> None:
    """Parameters come in any order, from several threads, or are never said to have come."""
    for seed in seeds:
        with case(seed):
            check_a_version(random.Random(seed))


def check_a_version(rng: random.Random) -> None:
    names = [f"w{i}" for i in range(rng.randint(0, 12))]
    values = {name: rng.randrange(1 << 40) for name in names}
    memory: dict[str, int] = {}
    taken: list[str] = []

    def take(name: str) -> int:
        taken.append(name)
        return memory[name]

    sums = EarlySums(take)
    said = [name for name in names if rng.random() < 0.7]
    rng.shuffle(said)

    def come(part: list[str]) -> None:
        for name in part:
            memory[name] = values[name]
            sums.add(name)

    cut = rng.randint(0, len(said))
    threads = [threading.Thread(target=come, args=(part,)) for part in (said[:cut], said[cut:])]
    for thread in threads:
        thread.start()
    if rng.random() < 0.3:
        sums.stop()
        num_taken = len(taken)
        for thread in threads:
            thread.join()
        with pytest.raises(RuntimeError, match="the version was given up"):
            sums.finish(names)
        assert len(taken) == num_taken, "nothing is read any more"
        return
    for thread in threads:
        thread.join()
    memory |= values
    assert sums.finish(names) == values
    assert sorted(taken) == sorted(names)


def test_what_a_sum_raises_comes_out_of_finish() -> None:
    def take(name: str) -> int:
        raise RuntimeError(f"{name} cannot be read")

    sums = EarlySums(take)
    sums.add("w")
    with pytest.raises(RuntimeError, match="w cannot be read"):
        sums.finish(["w"])
