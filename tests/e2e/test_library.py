"""llamarl under a loop of the caller's own: what each call does, and what it refuses."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import llamarl
from llamarl.controller.library import LibraryEngines
from llamarl.core.groups import Group
from tests.e2e.commands import read_archive
from tests.e2e.forks import Forks
from tests.places import RECIPE, ROOT

SMALL = [
    "cluster=inline",
    "num_steps=2",
    "trainer.groups_per_step=4",
    "trainer.warmup_steps=0",
    "sampling.max_tokens=24",
]
ONLY_GENERATOR = ("generator",)

torch.set_num_threads(1)  # as in an executor's process, to the bit
Work = Callable[[LibraryEngines], Awaitable[None]]


def run(work: Work, run_dir: Path, *overrides: str, recipe: Path = RECIPE, **more: object) -> None:
    async def block() -> None:
        async with llamarl.start_engines(
            recipe, [*SMALL, *overrides], run_dir=run_dir, **more
        ) as engines:
            await work(engines)

    asyncio.run(block())


async def train(engines: LibraryEngines, num_steps: int = 1) -> list[Group]:
    """Steps of the synchronous loop; the groups of the last one."""
    groups: list[Group] = []
    for _ in range(num_steps):
        groups = await engines.generate(itertools.islice(engines.prompts, 4))
        await engines.score(groups)
        assert [await engines.settle(group) for group in groups] == [None] * 4
        await engines.forward_backward(groups, oldest_version=engines.version)
        await engines.optim_step()
        await engines.sync_weights()
    return groups


def test_importing_llamarl_loads_no_heavy_module() -> None:
    heavy = "{'torch', 'monarch', 'hydra', 'numpy'} & set(sys.modules)"
    code = f"import sys, llamarl; sys.exit(str({heavy}) if {heavy} else 0)"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'start_engine'"):
        llamarl.start_engine  # noqa: B018 - the look-up is what raises


def test_synchronous_steps_give_the_weights_of_a_run(tmp_path: Path, forks: Forks) -> None:
    same = ["staleness.max_staleness=0", "weights.logprob_check=off", "data.held_out=null"]
    done = forks.run("train", f"--config-dir={RECIPE}", *SMALL, *same, f"run_dir={tmp_path}/run")
    assert done.returncode == 0, done.stderr

    async def work(engines: LibraryEngines) -> None:
        await engines.sync_weights()
        await train(engines, 2)
        await engines.save_weights(tmp_path / "export")

    run(work, tmp_path / "own", *same)
    expected = (tmp_path / "run" / "export" / "model.safetensors").read_bytes()
    assert (tmp_path / "export" / "model.safetensors").read_bytes() == expected
    assert (RECIPE / "checkpoint" / "model.safetensors").read_bytes() != expected
    keys = ("row_id", "outcome", "version", "oldest_version", "reward", "spans", "sampling")
    lines = [
        sorted(tuple(map(str, map(line.get, keys))) for line in read_archive(tmp_path / name))
        for name in ("run", "own")
    ]
    trained = [[line for line in each if line[1] == "trained"] for each in lines]
    assert len(trained[0]) == 64
    assert trained[0] == trained[1]


def test_a_kept_group_is_trained_on_by_a_later_step_too(tmp_path: Path) -> None:
    async def work(engines: LibraryEngines) -> None:
        await engines.sync_weights()
        groups = await engines.generate(itertools.islice(engines.prompts, 2))
        for group in groups:
            group.advantages = (1.0, -1.0) * 4
        for part in (groups, groups[:1]):  # the first group twice in one step
            await engines.forward_backward(part)
        await engines.optim_step(keep=groups[1:])
        await engines.forward_backward(groups[1:])
        assert (await engines.optim_step()).version == 2

    run(work, tmp_path)
    by_row = {line["row_id"]: line for line in read_archive(tmp_path)}
    assert [by_row[row_id]["version"] for row_id in range(16)] == [0] * 8 + [1] * 8


def test_a_group_that_the_sampler_does_not_consume_is_trained_on_again(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe"
    shutil.copytree(RECIPE, recipe)
    (recipe / "task.py").write_text(
        "def sample(ready, count):\n"
        "    ids = [item.item_id for item in ready[:count]]\n"
        "    return ids, ids if ready[0].times_taken else []\n"
    )

    async def work(engines: LibraryEngines) -> None:
        await engines.sync_weights()
        for group in await engines.generate(await engines.gate.admit()):
            group.advantages = (1.0, -1.0) * 4
            await engines.gate.settle(group, group.advantages)
        taken = []
        for _ in range(3):
            groups = await engines.gate.take(1, 1)
            await engines.forward_backward(groups)
            await engines.gate.advance((await engines.optim_step()).version)
            taken += [group.group_id for group in groups]
        assert taken == [0, 0, 1]

    again = ["experience.sampler=task", "staleness.late=mask", "trainer.groups_per_step=1"]
    run(work, tmp_path / "run", *again, recipe=recipe)
    by_row = {line["row_id"]: line for line in read_archive(tmp_path / "run")}
    assert [by_row[row_id].get("version") for row_id in range(16)] == [1] * 8 + [2] * 8
    assert [by_row[row_id].get("num_uses") for row_id in range(16)] == [2] * 8 + [None] * 8


def test_a_loop_walks_through_a_batch_in_passes_and_finds_its_proximal_log_probs(
    tmp_path: Path,
) -> None:
    async def work(engines: LibraryEngines) -> None:
        await engines.sync_weights()
        gate, taken = engines.gate, []
        for group in await engines.generate(await gate.admit()):
            group.advantages = (1.0, -1.0) * 4
            await gate.settle(group, group.advantages)
        with pytest.raises(ValueError, match="groups must hold at least one rollout, got 'none'"):
            await engines.look_ahead([])
        for _ in range(4):
            groups = await gate.take(1, 1)
            taken += [group.group_id for group in groups]
            await engines.forward_backward(groups)
            if gate.num_ahead:
                await engines.look_ahead(await gate.take(gate.num_ahead, gate.num_ahead))
            await gate.advance((await engines.optim_step()).version)
        assert taken == [0, 1, 0, 1]

    several = ["trainer.num_mini_batches=2", "trainer.num_passes=2", "trainer.groups_per_step=1"]
    several += ["staleness.max_staleness=3", "algorithm=ppo", "algorithm.proximal=recompute"]
    run(work, tmp_path, *several)
    by_row = {line["row_id"]: line for line in read_archive(tmp_path)}
    assert [by_row[row_id]["version"] for row_id in range(16)] == [2] * 8 + [3] * 8


@pytest.mark.parametrize(
    ("recipe", "overrides", "more", "line"),
    [
        ("recipes", [], {}, r"--config-dir must hold run.yaml, got .*recipes' without"),
        ("", ["trainer.lrr=1"], {}, r"trainer.lrr must be a known key, .*mean trainer.lr\?\)"),
        ("", ["--multirun"], {}, r"overrides must be KEY=VALUE each, got '--multirun'"),
        (
            "",
            ["placement=colocated"],
            {"executors": ["generator"]},
            r"placement.colocated must be false unless generator and trainer are .*, got True",
        ),
        ("", ["checkpoint.resume=auto"], {}, r"checkpoint.resume must be off under .* 'auto'"),
        ("", [], {"executors": ["actor"]}, r"executors must be some of generator, .*, got 'actor'"),
        ("", [], {"executors": []}, r"executors must be some of generator, .*, got 'none'"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    recipe: str, overrides: list[str], more: dict, line: str, tmp_path: Path
) -> None:
    async def block() -> None:
        place = ROOT / (recipe or "recipes/quickstart")
        async with llamarl.start_engines(place, overrides, run_dir=tmp_path / "run", **more):
            raise AssertionError("it must not start")

    with pytest.raises(ValueError, match=line) as error:
        asyncio.run(block())
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_calls_in_a_wrong_order_say_what_must_come_first(tmp_path: Path) -> None:
    kept: list[LibraryEngines] = []

    async def work(engines: LibraryEngines) -> None:
        kept.append(engines)
        with pytest.raises(RuntimeError, match="generate must come after the first sync_weights"):
            await engines.generate(["1+1="])
        await engines.sync_weights()
        with pytest.raises(RuntimeError, match="version 0 must be newer than 0, the last one"):
            await engines.sync_weights()
        group, other = await engines.generate(itertools.islice(engines.prompts, 2))
        with pytest.raises(RuntimeError, match="settle must come after score, or get rewards"):
            await engines.settle(group)
        with pytest.raises(ValueError, match=r"advantages of group 0 must be 8 finite .* got \(\)"):
            await engines.forward_backward([group])
        with pytest.raises(ValueError, match="groups must hold at least one rollout, got 'none'"):
            await engines.forward_backward([])
        with pytest.raises(RuntimeError, match="step must follow accumulate, got no batch"):
            await engines.optim_step()
        await engines.score([group])
        with pytest.raises(RuntimeError, match="score must get each group once"):
            await engines.score([group])
        with pytest.raises(RuntimeError, match="load_state must come before rollouts"):
            await engines.load_state(tmp_path)
        group.advantages = (0.5,) * 8
        engines.version = -1
        with pytest.raises(RuntimeError, match="up to -1, the trainer's, got tokens of version 0"):
            await engines.forward_backward([group])
        engines.version = 0
        await engines.retire([group], "unused")
        with pytest.raises(RuntimeError, match="groups must be written and open, got 0, retired"):
            await engines.forward_backward([group])
        with pytest.raises(RuntimeError, match="source must come without the trainer"):
            await engines.sync_weights({})
        (greedy,) = await engines.generate([other.prompt], temperature=0.0)
        greedy.advantages = (1.0,) * 8
        with pytest.raises(ValueError, match=r"sampled as the recipe says \(temperature 1\) .* 0'"):
            await engines.forward_backward([greedy])

    run(work, tmp_path / "run")
    with pytest.raises(RuntimeError, match="calls must come before the end of the block"):
        asyncio.run(kept[0].generate(["1+1="]))


def test_prompts_of_one_s_own_are_checked_like_those_of_a_file(tmp_path: Path) -> None:
    async def work(engines: LibraryEngines) -> None:
        ids = engines.tokenizer.encode("2+3=")
        questions = ["2+3=", {"question": "2+3=", "answer": "5"}, ids]
        groups = await engines.generate(questions, num_rollouts=3, max_tokens=4)
        assert [group.prompt.token_ids for group in groups] == [tuple(ids)] * 3
        assert groups[1].prompt.fields["answer"] == "5"
        assert len({group.prompt.prompt_id for group in groups}) == 3, "each has its own seeds"
        for group in groups:
            texts = await engines.texts(group)
            assert len(texts) == len(group.row_ids) == 3
            assert all(rollout.num_tokens <= 4 for rollout in group.rollouts.values())
            columns = await engines.get_experience(group.row_ids, ["prompt_ids", "response_ids"])
            assert [cell.tolist() for cell in columns["prompt_ids"]] == [ids] * 3
        with pytest.raises(ValueError, match=r"token ids must be 0 to \d+, got \[0, 1000000\]"):
            await engines.generate([[0, 10**6]])
        with pytest.raises(
            ValueError, match=r"sampling.max_tokens must leave room for the longest"
        ):
            await engines.generate(["1+1="], max_tokens=127)
        with pytest.raises(RuntimeError, match="sync_weights without a source must have the trai"):
            await engines.sync_weights()
        with pytest.raises(
            RuntimeError, match="score must have the scorer among executors, got gen"
        ):
            await engines.score(groups)

    run(work, tmp_path / "run", executors=ONLY_GENERATOR)


def test_columns_of_one_s_own_lie_beside_the_rollout_s(tmp_path: Path) -> None:
    async def work(engines: LibraryEngines) -> None:
        (group,) = await engines.generate([next(engines.prompts)], num_rollouts=2)
        sizes = [rollout.num_tokens for rollout in group.rollouts.values()]
        await engines.put_experience(group.row_ids, {"teacher": [np.arange(n) for n in sizes]})
        found = await engines.get_experience(group.row_ids, ["teacher", "token_versions"])
        assert [len(cell) for cell in found["teacher"]] == sizes
        assert await engines.settle(group, rewards=[1.0, 0.0]) is None
        assert group.advantages == (0.5, -0.5)
        assert await engines.settle(group, rewards=[0.0, 1.0]) is None
        assert group.advantages == (-0.5, 0.5)
        with pytest.raises(KeyError, match="has no column ref_logprobs"):
            await engines.get_experience(group.row_ids, ["ref_logprobs"])

    run(work, tmp_path, executors=ONLY_GENERATOR)
    (first, second) = sorted(read_archive(tmp_path), key=lambda line: line["row_id"])
    assert (first["reward"], second["reward"]) == (0.0, 1.0)
    assert first["outcome"] == second["outcome"] == "unused"


def test_groups_come_as_they_finish_and_a_cancelled_one_is_stopped(tmp_path: Path) -> None:
    async def work(engines: LibraryEngines) -> None:
        first, second, third = await engines.submit(itertools.islice(engines.prompts, 3))
        second.cancel()
        done = [await each for each in asyncio.as_completed([first, third])]
        assert {group.group_id for group in done} == {0, 2}
        while not any(line["outcome"] == "dropped" for line in read_archive(tmp_path)):
            await asyncio.sleep(0.02)
        waiting = asyncio.ensure_future(engines.generate(["1+1="], max_tokens=8))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    cut = ["sampling.segment_tokens=3"]
    run(work, tmp_path, *cut, executors=ONLY_GENERATOR)
    by_row = {line["row_id"]: line for line in read_archive(tmp_path)}
    assert {by_row[row_id]["reason"] for row_id in range(8, 16) if row_id in by_row} == {
        "cancelled"
    }
    written = [line for line in by_row.values() if line["outcome"] == "unused"]
    assert len(written) == 16
    assert any(line["num_tokens"] > 3 for line in written), "cut rollouts went on"


def test_a_saved_state_is_gone_on_from(tmp_path: Path) -> None:
    saved: list[object] = []

    async def save(engines: LibraryEngines) -> None:
        await engines.sync_weights()
        await train(engines)
        saved.append(await engines.save_state())
        saved.append(next(engines.prompts))
        await engines.save_weights(tmp_path / "first")
        with pytest.raises(ValueError, match=r"checkpoint.export_dtype must be one of float32"):
            await engines.save_weights(tmp_path / "other", "int8")

    async def load(engines: LibraryEngines) -> None:
        with pytest.raises(ValueError, match="not the name of a committed checkpoint"):
            await engines.load_state(tmp_path)
        assert await engines.load_state(str(saved[0])) == engines.version == 1
        assert next(engines.prompts) == saved[1]
        await engines.save_weights(tmp_path / "second")
        await engines.sync_weights()
        (group,) = await train(engines, 1) and [await engines.generate([next(engines.prompts)])][0]
        assert {span.version for row in group.rollouts.values() for span in row.spans} == {2}

    run(save, tmp_path / "a")
    run(load, tmp_path / "b")
    first, second = (tmp_path / name / "model.safetensors" for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    with pytest.raises(ValueError, match="run_dir must be a new folder"):
        run(load, tmp_path / "a")


def test_the_caller_s_own_module_is_what_the_generators_write_with(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(RECIPE / "checkpoint", dtype=torch.float32)

    async def agrees(engines: LibraryEngines, version: int) -> bool:
        (group,) = await engines.generate([next(engines.prompts)], num_rollouts=4)
        rollouts = [group.rollouts[row_id] for row_id in group.row_ids]
        assert {span.version for row in rollouts for span in row.spans} == {version}
        names = ["prompt_ids", "response_ids", "generator_logprobs"]
        columns = await engines.get_experience(group.row_ids, names)
        differences = []
        for prompt, response, found in zip(*map(columns.get, names), strict=True):
            ids = torch.tensor([[*prompt, *response]])
            with torch.no_grad():
                logits = model(ids).logits[0, len(prompt) - 1 : -1]
            own = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
            differences.append((own - torch.from_numpy(found)).abs().max().item())
        return max(differences) < 1e-4

    async def work(engines: LibraryEngines) -> None:
        assert await agrees(engines, 0)
        for version in (1, 5):
            with torch.no_grad():
                for parameter in model.parameters():  # in place: the generators notice nothing
                    parameter += 0.1 * parameter.std() * torch.randn_like(parameter)
            assert not await agrees(engines, engines.version)
            await engines.sync_weights(model, version)
            assert engines.version == version
            assert await agrees(engines, version)
        copies = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        await engines.sync_weights(copies)  # other tensors, of the next version
        assert await agrees(engines, 6)
        with pytest.raises(ValueError, match=r"source must have the parameter lm_head\.weight,"):
            await engines.sync_weights({})
        with pytest.raises(RuntimeError, match="version must be above 6, got 6"):
            await engines.sync_weights(model, 6)
        assert await agrees(engines, 6)

    run(work, tmp_path, "generator.num_replicas=2", executors=ONLY_GENERATOR)


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
