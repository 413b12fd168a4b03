"""What a trainer saves: a checkpoint between layouts, a kill amid a save."""

import asyncio
import itertools
import json
import signal
import time

import numpy as np
import pytest
import torch

from llamarl.core import checkpoint as checkpoints
from llamarl.core.checkpoint import begin, latest, read_state
from llamarl.trainer import policy
from tests.fakes import WatchedStorage
from tests.tiny_checkpoints import load, write_checkpoint
from tests.trainer.ranks import Ranks
from tests.trainer.rollouts import make_batch, make_rollouts
from tests.trainer.test_trainer import ADAM, LAYOUTS, job, laid_out
from tests.trainer.training import flat, make_executor, train

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("tensor 2", "shard 2"),
        pytest.param("shard 2 x tensor 2", "one", marks=pytest.mark.slow),
        *(
            pytest.param(before, after, marks=pytest.mark.slow)
            for before, after in [*itertools.permutations(LAYOUTS, 2)][1::4]
        ),
    ],
)
def test_a_checkpoint_of_one_layout_takes_the_same_next_step_under_another(
    ranks, checkpoint, tmp_path, before, after
):
    cells, rows = make_rollouts()
    writer, reader = laid_out(before, ADAM), laid_out(after, ADAM)
    steps = [[make_batch(rows, writer.num_data_ranks, 40, version)] for version in (0, 1)]
    exported_to, saved_to = tmp_path / "exported", tmp_path / "saved"
    saved_to.mkdir()
    whole = ranks(writer.num_ranks).run(
        train,
        job(checkpoint, cells, steps, trainer=writer, save=str(saved_to), export=str(exported_to)),
    )
    parts = [json.loads(path.read_text())["files"] for path in saved_to.glob("*manifest*")]
    hashed = [name for part in parts for name in part]
    assert sorted(hashed) == sorted(path.name for path in saved_to.glob("*.distcp"))
    assert len(parts) == writer.num_ranks, "each rank hashes its own file"
    last = [[make_batch(rows, reader.num_data_ranks, 64, version=1)]]
    resumed = ranks(reader.num_ranks).run(
        train, job(checkpoint, cells, last, trainer=reader, restore=str(saved_to))
    )[0]
    assert resumed["version"] == 1
    assert resumed["stats"][0].version == 2
    assert resumed["stats"][0].scalars["lr"] == whole[0]["stats"][1].scalars["lr"] == 2e-3 / 3
    for name, want in whole[0]["weights"].items():
        np.testing.assert_allclose(resumed["weights"][name], want, rtol=0, atol=1e-6, err_msg=name)
    exported = load(exported_to)
    for name, parameter in exported.named_parameters():
        np.testing.assert_array_equal(parameter.detach().numpy(), whole[0]["weights"][name])


@pytest.mark.parametrize("layout", ["one", "shard 2 x tensor 2"])
def test_a_copy_written_while_later_steps_run_is_the_version_that_was_copied(
    layout, ranks, checkpoint, tmp_path
):
    cells, rows = make_rollouts(4)
    config = laid_out(layout, ADAM)
    steps = [[make_batch(rows, config.num_data_ranks, 99, version)] for version in (0, 1)]
    saving = job(checkpoint, cells, steps, trainer=config)
    answers = ranks(config.num_ranks).run(save_beside_a_step, saving, str(tmp_path), 1 << 40)
    last = job(checkpoint, cells, [], trainer=config, restore=str(tmp_path))
    resumed = ranks(config.num_ranks).run(train, last)
    for (is_copied, before, after), seen in zip(answers, resumed, strict=True):
        shards = np.concatenate([shard.ravel() for shard in seen["shards"].values()])
        assert (is_copied, seen["version"]) == (True, 0)
        np.testing.assert_array_equal(shards, before)
        assert (shards != after).any()


def test_no_copy_is_made_that_would_take_most_of_the_memory_left(ranks, checkpoint, tmp_path):
    cells, rows = make_rollouts(4)
    saving = job(checkpoint, cells, [[make_batch(rows, 2, 99)]], trainer=laid_out("shard 2", ADAM))
    answers = ranks(2).run(save_beside_a_step, saving, str(tmp_path), 1 << 10)
    assert [is_copied for is_copied, *_ in answers] == [False, False]


def test_the_checkpoint_of_another_model_is_refused_in_one_line(ranks, checkpoint, tmp_path):
    cells, rows = make_rollouts(3)
    steps = [[make_batch(rows, 1, 99)]]
    (tmp_path / "saved").mkdir()
    ranks(1).run(train, job(checkpoint, cells, steps, save=str(tmp_path / "saved")))
    other = write_checkpoint(tmp_path / "other", hidden_size=32)
    with pytest.raises(RuntimeError, match=r"ValueError: .* of this model .* shape"):
        ranks(1).run(train, job(other, cells, steps, restore=str(tmp_path / "saved")))
    with pytest.raises(RuntimeError, match=r"ValueError: .*/\.metadata must be the index of a ch"):
        ranks(1).run(train, job(checkpoint, cells, steps, restore=str(tmp_path)))


@pytest.mark.parametrize("breaks_amid_update", [False, True])
def test_weights_of_a_step_that_broke_are_saved_only_if_it_changed_none(
    breaks_amid_update, ranks, checkpoint, tmp_path
):
    cells, rows = make_rollouts(4)
    broken = job(checkpoint, cells, [[make_batch(rows, 1, 99)]])
    ((failures, has_changed),) = ranks(1).run(
        save_after_a_broken_step, broken, str(tmp_path), breaks_amid_update
    )
    assert has_changed == breaks_amid_update
    assert ["broke amid its update" in failure for failure in failures[1:]] == (
        [True] if breaks_amid_update else []
    )
    assert ("the optimizer broke" if breaks_amid_update else "norm nan") in failures[0]
    assert any(tmp_path.iterdir()) != breaks_amid_update


def test_a_kill_in_the_middle_of_a_save_leaves_the_checkpoint_before(ranks, checkpoint, tmp_path):
    cells, rows = make_rollouts(4)
    steps = [[make_batch(rows, 1, 99, version)] for version in range(2000)]
    cells_only = job(checkpoint, cells, steps, trainer=ADAM)
    victim = Ranks(1)
    victim.start(save_for_ever, cells_only, str(tmp_path))
    folder = tmp_path / "checkpoints"
    deadline = time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline, "never met in the middle of a save"
        victim.signal(signal.SIGSTOP)
        half = [path for path in folder.glob("unfinished-step-*") if any(path.iterdir())]
        if half and latest(tmp_path) is not None:
            break
        victim.signal(signal.SIGCONT)
        time.sleep(0.003)
    victim.close()
    version = read_state(latest(tmp_path))["version"]
    last = [[make_batch(rows, 1, 99, version)]]
    resumed = job(checkpoint, cells, last, trainer=ADAM, restore=str(latest(tmp_path)))
    seen = ranks(1).run(train, resumed)[0]
    assert seen["version"] == version
    assert begin(tmp_path, version + 1).is_dir()
    assert len(list(folder.glob("unfinished-step-*"))) == 1


async def save_for_ever(rank, num_ranks, job, run_dir):
    """Commits one checkpoint after another until killed."""
    executor = make_executor(rank, num_ranks, job, WatchedStorage(cells=job.cells))
    await executor.start()
    for batches in job.steps:
        await executor.accumulate(batches[0])
        stats = await executor.step()
        await checkpoints.save(run_dir, executor, {"version": stats.version}, keep=2)


async def save_beside_a_step(rank, num_ranks, job, folder, available_bytes):
    """Copies version 0, makes version 1, then writes the copy; whether it could be made, and the
    shards before and after."""
    policy.available_bytes = lambda: available_bytes
    executor = make_executor(rank, num_ranks, job, WatchedStorage(cells=job.cells))
    await executor.start()
    before = flat(executor)
    is_copied = await executor.snapshot()
    await executor.accumulate(job.steps[0][0])
    await executor.step()
    if is_copied:
        writing = asyncio.create_task(executor.save(folder, True))
        await executor.accumulate(job.steps[1][0])
        await executor.step()
        await writing
    seen = is_copied, before, flat(executor)
    await executor.close()
    return seen


async def save_after_a_broken_step(rank, num_ranks, job, folder, breaks_amid_update):
    """What a save says after a step that failed, and whether any weight had changed by then."""
    executor = make_executor(rank, num_ranks, job, WatchedStorage(cells=job.cells))
    await executor.start()
    update = executor.policy_step.policy.update
    before = [tensor.clone() for tensor in executor.policy_step.policy.movable("weights")]

    def broken_update(lr):
        update(lr)
        raise MemoryError("the optimizer broke")

    if breaks_amid_update:
        executor.policy_step.policy.update = broken_update
    await executor.accumulate(job.steps[0][0])
    if not breaks_amid_update:
        next(iter(executor.policy_step.policy.parameters.values())).grad.fill_(float("nan"))
    failures = []
    for call in (executor.step, lambda: executor.save(folder)):
        try:
            await call()
        except Exception as error:
            failures.append(repr(error))
    after = executor.policy_step.policy.movable("weights")
    has_changed = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    await executor.close()
    return failures, has_changed
