"""Ranked dispatch in the real loop, on simulated executors and a virtual clock."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from llamarl.controller.balance import Balance, Replica, Skew
from llamarl.controller.lengths import History, Learnt, Limits, Oracle, Ranker
from llamarl.core.config import DispatchConfig
from llamarl.core.records import FinishReason, Prompt, Purpose, Request, Sampling
from llamarl.planner.simulation.clock import run
from llamarl.planner.simulation.simulated_run import make_skew
from tests.fakes import stopped
from tests.simulation.faults import Faults
from tests.simulation.loop import COSTS, Loop, slower

ROWS_COST = replace(COSTS, decode_row_s=0.0005, part_s=0.05)  # a step takes longer with more rows


def skewed(request: Request) -> int:
    """1 to 512 tokens: 25 times what is hard about the prompt, and some noise."""
    prompt, rollout = random.Random(request.prompt_ids[0]), random.Random(request.seed)
    return max(1, min(512, round(25 * math.exp(prompt.gauss(0, 1) + rollout.gauss(0, 0.3)))))


def play(folder: Path, ranker: Ranker, **changes: object) -> Loop:
    """A run whose prompts come back every two steps, or as `changes` say."""
    settings: dict[str, object] = {
        "num_steps": 9,
        "groups_per_step": 24,
        "rollouts_per_prompt": 2,
        "num_replicas": 4,
        "max_num_seqs": 8,
        "length": skewed,
        "costs": ROWS_COST,
        "prompts": [Prompt(prompt_id=i, text="", token_ids=(i, 0)) for i in range(48)],
    }
    loop = Loop(**settings | changes)  # type: ignore[arg-type]
    loop.skew = make_skew(loop.config, loop.costs, ranker, 50)
    run(loop.run(folder))
    return loop


def step_s(loop: Loop) -> float:
    """Seconds of a step, the first third left out."""
    ends = loop.timeline.step_ends_s
    first = len(ends) // 3
    return (ends[-1] - ends[first]) / (len(ends) - 1 - first)


@pytest.mark.parametrize("ranker", [Ranker, History, Learnt, lambda: Oracle(skewed)])
@pytest.mark.parametrize("max_staleness", [2, pytest.param(0, marks=pytest.mark.long)])
def test_the_bound_stands_with_each_ranker(
    ranker: type[Ranker], max_staleness: int, tmp_path: Path
) -> None:
    loop = play(
        tmp_path,
        ranker(),
        num_steps=12,
        groups_per_step=8,
        max_staleness=max_staleness,
        segment_tokens=64,
        drop_share=0.2,
        faults={
            "generator-1": slower(decode_step_s=0.05, commit_s=0.2),
            "generator-2": Faults(dies_at_s=2.0),
        },
    )
    assert loop.trainer.version == 12
    assert max(loop.staleness() + loop.masked()) == max_staleness
    trained = [row.group_id for batch in loop.batches for row in batch.rows]
    assert trained == sorted(trained), "the order across steps is that of admission"


@pytest.mark.long
@pytest.mark.parametrize("max_staleness", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_tail_is_shorter_when_it_is_foreseen(max_staleness: int, tmp_path: Path) -> None:
    def seconds(name: str, ranker: Ranker) -> float:
        return step_s(play(tmp_path / name, ranker, max_staleness=max_staleness))

    unranked, history = seconds("none", Ranker()), seconds("history", History())
    oracle = seconds("oracle", Oracle(skewed))
    assert history < 0.98 * unranked
    assert oracle < 1.02 * history


def test_the_clock_of_a_run_does_not_depend_on_the_threads_of_its_refits(tmp_path: Path) -> None:
    ends = [play(tmp_path / n, Learnt(), num_steps=3).timeline.step_ends_s for n in "ab"]
    assert ends[0] == ends[1]


def balance(num_replicas: int, ranker: Ranker) -> tuple[Balance, Skew]:
    skew = Skew(
        DispatchConfig(ranker="none"),
        Limits(max_num_seqs=64),
        lambda: [(size, 0.01 + 0.001 * size) for size in (1, 8, 64)],
        ranker,
    )
    found = Balance(skew=skew)
    for index in range(num_replicas):
        found.replicas[index] = Replica(generator=None)  # type: ignore[arg-type]
    return found, skew


def ask(row_id: int, prompt: int, step: int, tokens: int) -> Request:
    sampling = Sampling(max_tokens=tokens)
    return Request(row_id=row_id, prompt_ids=(prompt,), sampling=sampling, seed=0, step=step)


def test_long_groups_get_replicas_of_their_own_and_every_group_is_whole() -> None:
    """The oracle takes `max_tokens` for the length."""
    lengths = [400] * 4 + [20] * 16

    async def main() -> None:
        some, skew = balance(4, Oracle(lambda request: request.sampling.max_tokens))
        skew._latency.fit([(size, 0.01 + 0.001 * size) for size in (1, 8, 64)])
        requests = [ask(8 * i + j, i, 0, n) for i, n in enumerate(lengths) for j in range(8)]
        shares, left = some.spread(requests)
        assert not left
        homes = {request.prompt_ids: index for index in shares for request in shares[index]}
        assert sorted(r.row_id for share in shares.values() for r in share) == list(range(160))
        for index, share in shares.items():
            assert {homes[request.prompt_ids] for request in share} == {index}
        assert skew.split.num_long in (1, 2, 3)
        assert {homes[i,] for i in range(4)} == set(range(skew.split.num_long))
        assert {homes[i,] for i in range(4, 20)} == set(range(skew.split.num_long, 4))
        late, _ = some.spread([ask(999, 99, 0, 400)])
        assert set(late) <= set(range(skew.split.num_long)), (
            "a group that comes alone joins its set"
        )
        held = sum(replica.load for replica in some.replicas.values())
        assert held == 8 * sum(lengths) + 400
        for index, replica in some.replicas.items():
            for row_id in list(replica.running):
                assert some.release(index, stopped(row_id, (0, 20)))
                assert not some.release(index, stopped(row_id, (0, 20)))
        assert [replica.load for replica in some.replicas.values()] == [0] * 4

    run(main())


def test_only_training_rollouts_that_ended_are_learnt_from() -> None:
    history = History()
    some, _ = balance(1, history)
    reasons = [FinishReason.STOP, FinishReason.SEGMENT, FinishReason.ABORTED]
    for row_id, reason in enumerate(reasons):
        some.hold(0, ask(row_id, 7, 0, 99))
        assert some.release(0, stopped(row_id, (0, 50 + row_id), reason=reason))
    evaluated = replace(ask(9, 7, 0, 99), purpose=Purpose.EVALUATE)
    some.hold(0, evaluated)
    assert some.release(0, stopped(9, (0, 1)))
    history.refit()
    assert history.expect([ask(10, 7, 0, 99)]) == [50]


def test_an_error_of_a_refit_is_raised_with_the_next_step() -> None:
    class Broken(History):
        def refit(self) -> None:
            raise ArithmeticError("refit")

    async def main() -> None:
        some, skew = balance(1, Broken())
        some.spread([ask(0, 0, 0, 5), ask(1, 1, 0, 5)])
        with pytest.raises(ArithmeticError):
            await skew._refitting  # type: ignore[misc]
        with pytest.raises(ArithmeticError):
            some.spread([ask(2, 2, 1, 5), ask(3, 3, 1, 5)])

    run(main())


@pytest.mark.parametrize(
    ("is_streamed", "tail_share", "first"),
    [(True, 0.25, [90, 80]), (True, 0.0, []), (False, 0.25, [90, 80, 70, 60, 50, 40, 30, 20])],
)
def test_only_the_tail_starts_first_where_parts_are_trained_early(
    is_streamed: bool, tail_share: float, first: list[int]
) -> None:
    skew = Skew(
        DispatchConfig(ranker="none", tail_share=tail_share),
        Limits(max_num_seqs=64),
        ranker=Oracle(lambda request: request.sampling.max_tokens),
        is_streamed=is_streamed,
    )
    requests = [ask(i, i, 0, n) for i, n in enumerate([30, 90, 50, 20, 70, 80, 60, 40])]

    found = sorted(skew.expect(requests), key=lambda each: each.urgency)
    assert [each.expected_tokens for each in found][: len(first)] == first
    rest = [each.row_id for each in found[len(first) :]]
    assert rest == sorted(rest), "the others follow as they were admitted"
    assert skew.expect(requests[:1])[0].precedence == (0 if is_streamed else 30), "it came alone"
