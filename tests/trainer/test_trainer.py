"""The trainer's gradient, step and checkpoints over real ranks."""

import dataclasses
import itertools
import uuid

import numpy as np
import pytest
import torch

from llamarl.core.config import PlacementConfig, TrainerConfig, TransformersConfig
from llamarl.core.records import (
    FINISH_CODES,
    GENERATOR_LOGPROBS,
    KEPT_IDS,
    PROMPT_IDS,
    RESPONSE_IDS,
    SAMPLING,
    TOKEN_VERSIONS,
    FinishReason,
    conversation_row,
)
from llamarl.trainer.losses.aipo import AIPOConfig
from tests.tiny_checkpoints import load, write_checkpoint
from tests.trainer.rollouts import TEMPERATURE, make_batch, make_rollouts
from tests.trainer.training import (
    Job,
    infer,
    infer_within_a_step,
    take_turns,
    train,
    write_beside_steps,
)

pytestmark = pytest.mark.full

SGD = TrainerConfig(optimizer="sgd", lr=0.5, max_grad_norm=1e6)
ADAM = TrainerConfig(lr=1e-3, eps=1e-4, warmup_steps=3)  # eps: no division by noise


def job(checkpoint, cells, steps, **fields):
    """A job with its own rendezvous file beside the checkpoint."""
    fields.setdefault("trainer", SGD)
    rendezvous = f"{checkpoint}-{uuid.uuid4()}"
    return Job(checkpoint=checkpoint, rendezvous=rendezvous, cells=cells, steps=steps, **fields)


def relative_errors(got, want):
    assert got.keys() == want.keys()
    return {
        name: float(np.linalg.norm(got[name] - want[name]) / np.linalg.norm(want[name]))
        for name in want
    }


def expected(checkpoint, cells, rows, config):
    """(summed gradients, log pi by row): one rollout at a time, AIPO written out."""
    model = load(checkpoint)
    logprobs = {}
    for row in rows:
        cell = cells[row.row_id]
        ids = torch.tensor(np.concatenate([cell[PROMPT_IDS], cell[RESPONSE_IDS]]).astype(np.int64))
        logits = model.logits(ids[:-1], [len(ids) - 1]).double() / TEMPERATURE
        if KEPT_IDS in cell:
            among = torch.tensor(cell[KEPT_IDS].reshape(row.num_tokens, -1).astype(np.int64))
            is_kept = torch.zeros(row.num_tokens, logits.shape[1] + 1, dtype=torch.bool)
            is_kept = is_kept.scatter_(1, among % is_kept.shape[1], True)[:, :-1]
            start = torch.ones(row.num_prompt_tokens - 1, logits.shape[1], dtype=torch.bool)
            logits = logits.masked_fill(~torch.cat([start, is_kept]), -torch.inf)
        chosen = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
        logprob = chosen[row.num_prompt_tokens - 1 :]
        ratio = (logprob.detach() - torch.tensor(cell[GENERATOR_LOGPROBS])).exp()
        weight = torch.tensor(cell[TOKEN_VERSIONS] >= row.oldest_version)
        if config.mask_truncated and cell[SAMPLING][-1] == FINISH_CODES[FinishReason.LENGTH]:
            weight = torch.zeros_like(weight)
        loss = -(weight * ratio.clamp(max=config.rho) * row.advantage * logprob).sum()
        loss.backward()
        logprobs[row.row_id] = logprob.detach().numpy()
    return {name: p.grad.numpy() for name, p in model.named_parameters()}, logprobs


def test_the_gradient_is_the_formula_s_whatever_the_ranks_budgets_and_parts(ranks, checkpoint):
    cells, rows = make_rollouts(oldest_version=1)
    algorithm = AIPOConfig(rho=2.0, mask_truncated=True)
    want, logprobs = expected(checkpoint, cells, rows, algorithm)
    num_tokens = sum(row.num_tokens for row in rows)
    weights, scalars = [], []
    split = {"tensor_parallel": 2, "reshard_after": "step"}
    for num_ranks, fields, budget, cut in (
        (1, {}, 4096, 13),
        (1, {}, 30, 5),
        (2, {}, 9, 8),
        (4, {"replicate": 2}, 40, 13),
        (4, split, 200, 8),
    ):
        config = dataclasses.replace(SGD, num_ranks=num_ranks, **fields)
        parts = [
            make_batch(part, config.num_data_ranks, budget)
            for part in (rows[:cut], rows[cut:])
            if part
        ]
        steps = job(checkpoint, cells, [parts], algorithm=algorithm, trainer=config)
        seen = ranks(num_ranks).run(train, steps)
        errors = relative_errors(seen[0]["gradients"][0], want)
        assert max(errors.values()) <= 1e-5, (num_ranks, budget, errors)
        for rank in seen:
            assert rank["stats"] == seen[0]["stats"]
            for row_id, logprob in rank["logprobs"].items():
                np.testing.assert_allclose(logprob, logprobs[row_id], atol=1e-5)
        written = [row_id for rank in seen for row_id in rank["logprobs"]]
        assert sorted(written) == [row.row_id for row in rows if row.advantage]
        weights.append(seen[0]["weights"])
        stats = seen[0]["stats"][0]
        scalars.append(stats.scalars)
        for name, value in scalars[0].items():  # counted once each, whichever rank ran them
            assert stats.scalars[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
        norm = np.sqrt(sum(np.sum(g.astype("f8") ** 2) for g in want.values())) / num_tokens
        assert stats.scalars["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert stats.scalars["num_tokens"] == num_tokens
        assert stats.scalars["masked_tokens"] > 0
        assert stats.version == 1
    for other in weights[1:]:
        assert max(relative_errors(other, weights[0]).values()) <= 1e-6
    start = load(checkpoint)
    for name, parameter in start.named_parameters():
        by_hand = parameter.detach().numpy() - 0.5 * want[name] / num_tokens
        np.testing.assert_allclose(weights[0][name], by_hand, rtol=0, atol=1e-6)


LAYOUTS = {
    "one": TrainerConfig(),
    "shard 2": TrainerConfig(num_ranks=2),
    "tensor 2": TrainerConfig(num_ranks=2, tensor_parallel=2),
    "shard 4": TrainerConfig(num_ranks=4),
    "replicate 2 x shard 2": TrainerConfig(num_ranks=4, replicate=2),
    "shard 2 x tensor 2": TrainerConfig(num_ranks=4, tensor_parallel=2, reshard_after="step"),
    "replicate 2 x tensor 2": TrainerConfig(num_ranks=4, tensor_parallel=2, replicate=2),
}


def laid_out(layout, config):
    """`config` under one of the LAYOUTS."""
    other = LAYOUTS[layout]
    names = ("num_ranks", "tensor_parallel", "replicate", "reshard_after")
    return dataclasses.replace(config, **{name: getattr(other, name) for name in names})


@pytest.mark.parametrize("kind", [TrainerConfig, TransformersConfig])
def test_the_gradient_is_the_formula_s_among_the_tokens_that_were_kept(ranks, checkpoint, kind):
    cells, rows = make_rollouts(num_rows=7)
    random = np.random.default_rng(2)
    for cell in cells.values():
        ids = cell[RESPONSE_IDS]
        among = random.permuted(np.tile(np.arange(-1, 50), (len(ids), 1)), axis=1)[:, :4]
        among = np.where(among == ids[:, None], -1, among).astype(np.int32)
        among[:, 1] = ids  # the token itself is among them
        cell[KEPT_IDS] = among.ravel()
    algorithm = AIPOConfig(rho=2.0)
    want, logprobs = expected(checkpoint, cells, rows, algorithm)
    layouts = [(1, {}), (2, {})]
    if kind is TrainerConfig:
        layouts.append((2, {"tensor_parallel": 2, "reshard_after": "step"}))
    for num_ranks, fields in layouts:
        config = kind(optimizer="sgd", lr=0.5, max_grad_norm=1e6, num_ranks=num_ranks, **fields)
        batch = make_batch(rows, config.num_data_ranks, 40)
        steps = job(checkpoint, cells, [[batch]], algorithm=algorithm, trainer=config, top_k=4)
        seen = ranks(num_ranks).run(train, steps)
        errors = relative_errors(seen[0]["gradients"][0], want)
        assert max(errors.values()) <= 1e-5, (num_ranks, fields, errors)
        for row_id, logprob in seen[0]["logprobs"].items():
            np.testing.assert_allclose(logprob, logprobs[row_id], atol=1e-5)


@pytest.mark.parametrize("normalization", ["tokens", "rollouts", "constant"])
def test_an_episode_counts_as_one_rollout_however_many_conversations_it_has(
    ranks, checkpoint, normalization
):
    """Rows 0 to 2 are one episode, 3 and 4 another; the oracle is a sum over single rows."""
    cells, rows = make_rollouts(num_rows=7)
    places = [(0, 0), (0, 1), (0, 2), (3, 0), (3, 2), (5, 0), (6, 0)]
    whole = {
        first: [r.num_tokens for r, at in zip(rows, places, strict=True) if at[0] == first]
        for first, _ in places
    }
    lengths = {first: sum(counts) for first, counts in whole.items()}
    algorithm = AIPOConfig(rho=2.0, normalization=normalization)
    want = {}
    for row, (first, _) in zip(rows, places, strict=True):
        grads, _ = expected(checkpoint, cells, [row], algorithm)
        share = lengths[first] if normalization == "rollouts" else 1
        want = {name: want.get(name, 0) + grad / share for name, grad in grads.items()}
    episodes = tuple(
        dataclasses.replace(row, row_id=conversation_row(*at), num_in_rollout=lengths[at[0]])
        for row, at in zip(rows, places, strict=True)
    )
    moved = {conversation_row(*at): cells[row.row_id] for row, at in zip(rows, places, strict=True)}
    for num_ranks in (1, 2):
        config = dataclasses.replace(SGD, num_ranks=num_ranks)
        batch = make_batch(episodes, num_ranks, 40)
        steps = job(checkpoint, moved, [[batch]], algorithm=algorithm, trainer=config)
        seen = ranks(num_ranks).run(train, steps)
        errors = relative_errors(seen[0]["gradients"][0], want)
        assert max(errors.values()) <= 1e-5, errors
        stats = seen[0]["stats"][0].scalars
        assert stats["num_rollouts"] == 4
        divisor = {"tokens": sum(lengths.values()), "rollouts": 4, "constant": 4 * 64}
        norm = np.sqrt(sum(np.sum(g.astype("f8") ** 2) for g in want.values()))
        assert stats["grad_norm"] == pytest.approx(norm / divisor[normalization], rel=1e-4)


def test_checkpointing_changes_nothing_and_bfloat16_little_while_masters_stay_float32(
    ranks, checkpoint
):
    cells, rows = make_rollouts()
    steps = [[make_batch(rows, 1, 64)]]

    def gradients(**fields):
        config = dataclasses.replace(SGD, **fields)
        seen = ranks(1).run(train, job(checkpoint, cells, steps, trainer=config))[0]
        assert {weight.dtype for weight in seen["weights"].values()} == {np.dtype("f4")}
        return seen["gradients"][0]

    plain = gradients()
    errors = relative_errors(gradients(activation_checkpointing="full"), plain)
    assert max(errors.values()) <= 1e-6
    rough = gradients(compute_dtype="bfloat16")
    # A bfloat16 number is off by up to 0.4 %, at random: so are the parts of a gradient, several
    # times over, but their sum along the right gradient is not: nothing is scaled or left out.
    errors = relative_errors(rough, plain)
    assert min(errors.values()) > 1e-3
    assert max(errors.values()) < 0.035, errors
    whole, roughly = (
        np.concatenate([g[name].ravel() for name in plain]).astype("f8") for g in (plain, rough)
    )
    assert np.linalg.norm(roughly - whole) < 0.025 * np.linalg.norm(whole)
    assert roughly @ whole == pytest.approx(whole @ whole, rel=1e-2)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_weight_decay_pulls_matrices_only(ranks, checkpoint, optimizer):
    cells, rows = make_rollouts(3)
    steps = [[make_batch(rows, 1, 99)]]
    start = load(checkpoint)
    kept, decayed = (
        ranks(1).run(train, job(checkpoint, cells, steps, trainer=config))[0]["weights"]
        for config in (
            TrainerConfig(optimizer=optimizer, lr=1e-2, weight_decay=decay) for decay in (0.0, 0.3)
        )
    )
    shapes = set()
    for name, parameter in start.named_parameters():
        pulled = 1e-2 * 0.3 * parameter.detach().numpy() if parameter.ndim > 1 else 0.0
        np.testing.assert_allclose(kept[name] - decayed[name], pulled, atol=1e-6, err_msg=name)
        shapes.add(parameter.ndim)
    assert shapes == {1, 2}


def test_a_gradient_that_is_not_finite_stops_the_run_with_step_and_rows(ranks, checkpoint):
    cells, rows = make_rollouts(3)
    cells[2][GENERATOR_LOGPROBS][0] = np.nan
    with pytest.raises(RuntimeError, match=r"the loss of step 0 is nan in rows \[.*2.*\]"):
        ranks(1).run(train, job(checkpoint, cells, [[make_batch(rows, 1, 999)]]))


@pytest.mark.parametrize(
    ("change", "num_gradients", "why"),
    [
        ({"advantage": 0.0}, 0, "advantages of all its rollouts are 0"),
        ({"oldest_version": 9}, 21, "older than staleness.max_staleness"),
    ],
)
def test_a_step_that_trains_no_token_changes_nothing_and_warns_once_why(
    ranks, checkpoint, change, num_gradients, why
):
    cells, rows = make_rollouts(5)
    empty = tuple(dataclasses.replace(row, **change) for row in rows)
    steps = [[make_batch(rows, 2, 40)], *([make_batch(empty, 2, 40, version=v)] for v in (1, 2))]
    decaying = {"trainer": dataclasses.replace(ADAM, weight_decay=0.3)}
    jobs = (job(checkpoint, cells, some, **decaying) for some in (steps[:1], steps))
    once, often = (ranks(2).run(train, each) for each in jobs)
    assert [*map(len, often[0]["gradients"])] == [21, num_gradients, num_gradients]
    for name, weights in once[0]["weights"].items():
        np.testing.assert_array_equal(often[0]["weights"][name], weights)
    (warning,) = often[0]["warnings"][len(once[0]["warnings"]) :]
    assert why in warning
    assert not often[1]["warnings"]


def test_steps_that_train_no_token_by_turns_with_others_are_one_warning(ranks, checkpoint):
    cells, rows = make_rollouts(5)
    empty = tuple(dataclasses.replace(row, advantage=0.0) for row in rows)
    steps = [
        [make_batch((rows, empty)[version % 2], 1, 40, version=version)] for version in range(6)
    ]
    (seen,) = ranks(1).run(train, job(checkpoint, cells, steps))
    assert sum("changed no weight" in text for text in seen["warnings"]) == 1


def test_a_batch_for_another_version_is_refused(ranks, checkpoint):
    cells, rows = make_rollouts(3)
    with pytest.raises(RuntimeError, match="batch for version 1 came at 0"):
        ranks(1).run(train, job(checkpoint, cells, [[make_batch(rows, 1, 99, version=1)]]))


def test_the_source_layouts_of_all_ranks_tile_every_parameter_with_its_values(ranks, checkpoint):
    cells, rows = make_rollouts(5)
    seen = ranks(4).run(train, job(checkpoint, cells, [[make_batch(rows, 4, 40)]]))
    for name, whole in seen[0]["weights"].items():
        rebuilt, times = np.zeros_like(whole), np.zeros(whole.shape, int)
        for rank in seen:
            layout = rank["layout"].parameters[name]
            assert (layout.shape, layout.dtype) == (whole.shape, "float32")
            for box in layout.boxes:
                place = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
                flat = rank["shards"][box.buffer].ravel()[box.offset :]
                shape = [b - a for a, b in zip(box.start, box.stop, strict=True)]
                strides = [4 * stride for stride in box.strides]
                rebuilt[place] = np.lib.stride_tricks.as_strided(flat, shape, strides)
                times[place] += 1
        assert (times == 1).all(), name
        np.testing.assert_array_equal(rebuilt, whole)


def test_a_write_beside_or_after_a_step_gets_the_whole_version_that_it_asked_for(ranks, tmp_path):
    wide = write_checkpoint(tmp_path / "wide", hidden_size=768, intermediate_size=1024)
    cells, rows = make_rollouts(3)
    steps = [[make_batch(rows, 1, 99, version)] for version in range(3)]
    placement = PlacementConfig(colocated=True, offload_folder=str(tmp_path))
    moving = job(wide, cells, steps, trainer=ADAM, placement=placement)
    seen = ranks(1).run(write_beside_steps, moving)[0]
    assert seen["was_running"], "the write ended before the step began: make the model larger"
    weights, written = seen["weights"], seen["written"]
    for before, after in itertools.pairwise(weights):
        assert (before != after).mean() > 0.5
    for name, version in {"beside": 0, "after": 1, "present": 2, "back": 3}.items():
        np.testing.assert_array_equal(written[name], weights[version], err_msg=name)
    assert written["too late"] == "version 2 is not there to be read, the present one is 3"
    assert written["away"] == "version 3 is not there to be read, the present one is None"


@pytest.mark.parametrize(
    "layout", ["one", "shard 2", pytest.param("shard 2 x tensor 2", marks=pytest.mark.slow)]
)
def test_differences_are_those_of_the_present_weights_and_change_nothing(ranks, checkpoint, layout):
    cells, rows = make_rollouts()
    config = laid_out(layout, ADAM)
    num_ranks, num_data_ranks = config.num_ranks, config.num_data_ranks
    parts = [make_batch(part, num_data_ranks, 90) for part in (rows[:7], rows[7:])]
    later = [make_batch(rows, num_data_ranks, 90, version=1)]
    asked = [11, 0, 5, 6, 2]  # shared out unevenly, no order
    job_ = job(checkpoint, cells, [parts, later], trainer=config)
    seen = ranks(num_ranks).run(infer_within_a_step, job_, asked)
    plain = ranks(num_ranks).run(train, dataclasses.replace(job_, rendezvous=job_.rendezvous + "x"))
    for rank, other in zip(seen, plain, strict=True):
        assert rank["changed"] == []
        assert rank["num_compared"] == 21 * 4 + 2  # weight, gradient, moments; RNG, statistics
        assert rank["differences"] == seen[0]["differences"]
        assert rank["nothing"] == []
        flat = np.concatenate([shard.ravel() for shard in other["shards"].values()])
        np.testing.assert_array_equal(rank["shards"], flat)
    first, again, after = seen[0]["differences"]
    assert first == again
    assert first != after
    _, want = expected(checkpoint, cells, rows, AIPOConfig(rho=2.0))
    for row_id, difference in zip(asked, first, strict=True):
        by_hand = np.abs(want[row_id] - cells[row_id][GENERATOR_LOGPROBS]).max()
        assert difference == pytest.approx(by_hand, abs=1e-5)


def test_the_reference_agrees_with_the_trainer_before_its_first_step(ranks, checkpoint):
    cells, rows = make_rollouts()
    trained = ranks(1).run(train, job(checkpoint, cells, [[make_batch(rows, 1, 64)]]))[0]
    alone = ranks(1).run(infer, checkpoint, "", cells, {})[0]
    for row_id, logprobs in trained["logprobs"].items():
        np.testing.assert_allclose(alone[row_id], logprobs, atol=1e-5)
    few = {row_id: cells[row_id] for row_id in range(5)}  # so one rank has more micro-batches
    for fields in ({"reshard_after": "backward"}, {"tensor_parallel": 2}):
        shares = ranks(2).run(infer, checkpoint, f"{checkpoint}-{uuid.uuid4()}", few, fields)
        split = [[0, 1, 2, 3, 4], []] if "tensor_parallel" in fields else [[0, 2, 4], [1, 3]]
        assert [sorted(share) for share in shares] == split
        for row_id, logprobs in (shares[0] | shares[1]).items():
            np.testing.assert_allclose(logprobs, alone[row_id], atol=1e-5)
    rough = ranks(2).run(
        infer, checkpoint, f"{checkpoint}-{uuid.uuid4()}", cells, {"compute_dtype": "bfloat16"}
    )
    for row_id, logprobs in (rough[0] | rough[1]).items():
        assert np.abs(logprobs - alone[row_id]).max() < 0.2


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_offloaded_trainer_learns_the_same_and_frees_its_memory(ranks, tmp_path, num_ranks):
    large = write_checkpoint(tmp_path / "large", hidden_size=384, intermediate_size=2048)
    cells, rows = make_rollouts(6)
    steps = [
        [make_batch(part, num_ranks, 60, version) for part in (rows[:3], rows[3:])]
        for version in range(2)
    ]
    config = dataclasses.replace(ADAM, reshard_after="step" if num_ranks > 1 else "forward")
    stays = job(large, cells, steps, trainer=config)
    placement = PlacementConfig(colocated=True, offload_folder=str(tmp_path))
    leaves = job(large, cells, steps, trainer=config, placement=placement)
    expected_ranks = ranks(num_ranks).run(train, stays)
    for rank, want in zip(ranks(num_ranks).run(take_turns, leaves), expected_ranks, strict=True):
        assert rank["stats"] == want["stats"]
        for name, shard in want["shards"].items():
            np.testing.assert_array_equal(rank["shards"][name], shard, err_msg=name)
        assert not rank["moved"]
        assert rank["errors"] == ["RuntimeError"] * 3 * len(steps)
        assert min(rank["left"]) > 5e6
        for shrunk, left in zip(rank["shrunk"], rank["left"], strict=True):
            assert shrunk >= 0.8 * left, (rank["shrunk"], rank["left"])
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".bin"] == []
