"""What a loop of the caller's own may check and when: log-probs, and phases of a shared device."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamarl.controller.library import LibraryEngines
from tests.e2e.commands import read_archive
from tests.e2e.test_library import run, train


def test_each_replica_is_asked_whether_it_writes_with_the_trainer_s_policy(tmp_path: Path) -> None:
    async def work(engines: LibraryEngines) -> None:
        with pytest.raises(RuntimeError, match=r"must come when generators have .* 0, got -1"):
            await engines.check_logprobs()
        await engines.sync_weights()
        found = await engines.check_logprobs()
        assert found["logprob_check_rows"] == 32, "16 of each replica, the first time"
        assert found["logprob_check_difference"] < 1e-3
        await train(engines)
        assert (await engines.check_logprobs())["logprob_check_rows"] == 2
        with pytest.raises(ValueError, match=r"phase must be one of sync, train, got 'roll'"):
            async with engines.phase("roll"):
                pass

    run(work, tmp_path, "generator.num_replicas=2")
    outcomes = [line["outcome"] for line in read_archive(tmp_path)]
    assert outcomes.count("logprob_check") == 34


def test_calls_in_the_wrong_phase_are_refused(tmp_path: Path) -> None:
    async def work(engines: LibraryEngines) -> None:
        with pytest.raises(
            RuntimeError, match=r'sync_weights must come in phase "sync" .* got none'
        ):
            await engines.sync_weights()
        async with engines.phase("sync"):
            await engines.sync_weights()
            with pytest.raises(RuntimeError, match=r'generate must come outside .* got "sync"'):
                await engines.generate(["1+1="])
            with pytest.raises(
                RuntimeError, match=r'optim_step must come in phase "train" .* "sync"'
            ):
                await engines.optim_step()
        await engines.generate(["1+1="])
        with pytest.raises(
            ValueError, match=r"placement.colocated must be false for check_logprobs"
        ):
            await engines.check_logprobs()

    run(work, tmp_path, "placement=colocated")
