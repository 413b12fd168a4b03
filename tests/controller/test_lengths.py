"""Rankers, the latency of decode steps, and the split of replicas."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.controller.lengths import (
    LEAST_GAIN,
    History,
    Latency,
    Learnt,
    Limits,
    Oracle,
    Ranker,
    TailSplit,
    duration,
    features,
    find_split,
    make_ranker,
)
from llamarl.core.config import DispatchConfig, SamplingConfig
from llamarl.core.records import Request, Sampling
from tests.planner.planner_recipes import make_recipe


def ask(*prompt: int, max_tokens: int = 1000) -> Request:
    return Request(row_id=0, prompt_ids=prompt, sampling=Sampling(max_tokens=max_tokens), seed=0)


def learn(ranker: Ranker, lengths: dict[tuple[int, ...], int], times: int = 1) -> None:
    for _ in range(times):
        for prompt, length in lengths.items():
            ranker.observe(ask(*prompt), length)
        ranker.refit()


def words(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.randrange(40) for _ in range(rng.randint(5, 15)))


def length_of(prompt: tuple[int, ...]) -> int:
    """Ten tokens, and twenty more for each 7 in the prompt."""
    return 10 + 20 * prompt.count(7)


def recall(ranker: Ranker, prompts: list[tuple[int, ...]], long: int) -> float:
    """Of the prompts that are longer than `long`, the share among as many that are ranked first."""
    truly = {prompt for prompt in prompts if length_of(prompt) > long}
    expected = ranker.expect([ask(*prompt) for prompt in prompts])
    order = sorted(range(len(prompts)), key=lambda i: -expected[i])
    return len(truly & {prompts[i] for i in order[: len(truly)]}) / len(truly)


def test_the_config_names_each_ranker_and_an_oracle_needs_replayed_lengths() -> None:
    kinds = {"none": Ranker, "history": History, "model": Learnt, "oracle": Oracle}
    for name, kind in kinds.items():
        assert type(make_ranker(DispatchConfig(ranker=name))) is kind
    oracle = DispatchConfig(ranker="oracle")
    assert make_ranker(oracle).expect([replace(ask(1, max_tokens=20), replay_tokens=17)]) == [17]
    make_recipe(dispatch=oracle, sampling=SamplingConfig(max_tokens=16, replay_lengths="x"))


@pytest.mark.parametrize("kind", [Ranker, History, Learnt])
def test_nothing_is_expected_before_anything_was_seen(kind: type[Ranker]) -> None:
    ranker = kind()
    ranker.refit()
    assert ranker.expect([ask(1), ask(2)]) == [0, 0]
    assert ranker.expect([]) == []


def test_history_expects_what_a_prompts_rollouts_were_and_the_mean_of_a_new_one() -> None:
    history = History()
    lengths = {(i,): 10 * i for i in range(1, 20)}
    learn(history, lengths)
    assert set(history.expect([ask(1), ask(19)])) == {100}, "no guess was confirmed yet"
    learn(history, lengths)
    assert history.expect([ask(1), ask(19), ask(99)]) == [10, 190, 100]
    assert history.expect([ask(19, max_tokens=50)]) == [50]


def test_expectations_follow_lengths_that_grow_for_all_prompts() -> None:
    history = History()
    learn(history, {(i,): 10 * i for i in range(1, 20)}, times=3)
    learn(history, {(i,): 40 * i for i in range(1, 20)}, times=200)
    assert history.expect([ask(1), ask(19)]) == pytest.approx([40, 760], rel=0.05)


@pytest.mark.parametrize("kind", [History, Learnt])
def test_a_ranker_whose_guesses_do_not_come_true_ranks_nothing(kind: type[Ranker]) -> None:
    ranker, rng = kind(), random.Random(3)
    prompts = [words(rng) for _ in range(60)]
    for _ in range(6):
        learn(ranker, {prompt: rng.randint(1, 200) for prompt in prompts})
    assert len(set(ranker.expect([ask(*prompt) for prompt in prompts]))) == 1


def test_the_model_ranks_prompts_that_it_has_not_seen() -> None:
    model, rng = Learnt(), random.Random(0)
    for _ in range(6):
        learn(model, {prompt: length_of(prompt) for prompt in (words(rng) for _ in range(64))})
    new = [words(rng) for _ in range(300)]
    assert recall(model, new, 10) > 0.9
    history = History()
    learn(history, {prompt: length_of(prompt) for prompt in new[:100]}, times=3)
    assert recall(history, [words(rng) for _ in range(300)], 10) < 0.5  # else why a model


def test_the_model_follows_a_drift_that_turns_the_ranking_round() -> None:
    model, rng = Learnt(), random.Random(0)

    def learn_more(steps: int, sign: int) -> None:
        for _ in range(steps):
            prompts = [words(rng) for _ in range(64)]
            learn(model, {prompt: 100 + sign * length_of(prompt) for prompt in prompts})

    learn_more(8, -1)
    learn_more(5, 1)
    assert recall(model, [words(rng) for _ in range(300)], 10) > 0.6


def test_a_prompts_features_do_not_depend_on_the_prompts_beside_it() -> None:
    rng = random.Random(1)
    prompts = [words(rng) for _ in range(20)] + [(1,), (1, 2)]
    alone = np.concatenate([features([prompt]) for prompt in prompts])
    np.testing.assert_allclose(features(prompts), alone)
    assert len(np.unique(alone, axis=0)) == len(prompts)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 300), st.floats(0, 1)), max_size=60))
def test_the_latency_never_falls_with_the_batch_size(steps: list[tuple[int, float]]) -> None:
    latency = Latency()
    latency.fit(steps)
    if latency.is_known:
        seconds = [latency(size) for size in range(1, 600, 7)]
        assert seconds == sorted(seconds)
        assert seconds[0] > 0
    elif not any(size and time for size, time in steps):
        with pytest.raises(ValueError, match="must be fitted"):
            latency(1)


def test_the_latency_is_found_again_despite_slow_steps_now_and_then() -> None:
    latency, rng = Latency(), random.Random(0)

    def seconds(size: float) -> float:
        return 0.01 + max(0.0, size - 32) * 0.0002

    sizes = [rng.randint(1, 256) for _ in range(3000)]
    latency.fit([(n, seconds(n) * (20 if rng.random() < 0.05 else 1)) for n in sizes])
    for size in (1, 8, 64, 128, 250, 400):
        assert latency(size) == pytest.approx(seconds(size), rel=0.15)


def linear(size: float) -> float:
    return 0.01 + 0.001 * size


SPLITS = {
    "lengths": st.lists(st.integers(1, 500), min_size=1, max_size=40),
    "num_replicas": st.integers(1, 8),
    "num_rollouts": st.integers(1, 8),
    "limits": st.builds(
        Limits, max_num_seqs=st.integers(1, 64), kv_tokens=st.sampled_from((0, 100, 5000))
    ),
    "tail_share": st.sampled_from((0.0, 0.2, 0.5, 1.0)),
}


@settings(max_examples=100, deadline=None)
@given(**SPLITS)
def test_no_other_split_costs_less(
    lengths: list[int],
    num_replicas: int,
    num_rollouts: int,
    limits: Limits,
    tail_share: float,
) -> None:
    split = find_split(
        lengths,
        num_replicas,
        num_rollouts,
        linear,
        limits,
        tail_share=tail_share,
    )

    def cost(num_long: int, long_from: int) -> float:
        def side(some: list[int], count: int) -> float:
            return duration(some, count, num_rollouts, linear, limits)

        if not num_long:
            return side(lengths, num_replicas)
        sides = (
            side([n for n in lengths if n >= long_from], num_long),
            side([n for n in lengths if n < long_from], num_replicas - num_long),
        )
        return max(sides)

    assert 0 <= split.num_long < num_replicas
    if split.num_long:
        found = cost(split.num_long, split.long_from)
        assert found <= (1 - LEAST_GAIN) * cost(0, 0)
        for count in range(1, num_replicas):
            assert found <= cost(count, split.long_from) + 1e-9


@given(limits=SPLITS["limits"], num_rollouts=st.integers(1, 500), mean_tokens=st.floats(1, 90))
def test_no_more_rollouts_run_at_once_than_the_replica_holds(
    limits: Limits, num_rollouts: int, mean_tokens: float
) -> None:
    size = limits.batch_size(num_rollouts, mean_tokens)
    assert 1 <= size <= min(num_rollouts, limits.max_num_seqs)
    assert not limits.kv_tokens or size * mean_tokens <= max(limits.kv_tokens, mean_tokens)


def test_a_long_tail_gets_replicas_of_its_own_with_small_batches() -> None:
    limits = Limits(max_num_seqs=256)
    lengths = [400] * 4 + [20] * 60
    split = find_split(lengths, 8, 8, linear, limits, tail_share=0.0625)
    assert split == TailSplit(num_long=4, long_from=400)
    alike = find_split([20] * 64, 8, 8, linear, limits, tail_share=0.2)
    assert alike == TailSplit()
