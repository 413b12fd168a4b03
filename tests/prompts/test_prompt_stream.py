"""The order of prompts: exact after a resume, sources by weight, silent ones more rarely; and the
requests that a group becomes."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.core.groups import Group
from llamarl.core.records import SOURCE_ROWS, Prompt, Sampling
from llamarl.prompts.stream import PromptStream, make_requests, read_lengths
from tests.random_search import case, searched

ORDER_OF_SEED_17 = [7, 6, 1, 3, 5, 4, 8, 2]


def prompts_of(*counts: int) -> list[Prompt]:
    """Of sources with so many prompts."""
    return [
        Prompt(prompt_id=source * SOURCE_ROWS + i + 1, text=str(i), token_ids=(i,))
        for source, count in enumerate(counts)
        for i in range(count)
    ]


def take(stream: PromptStream, count: int) -> list[Prompt]:
    return [next(stream) for _ in range(count)]


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(-(2**70), 2**70), st.booleans())
def test_every_epoch_hands_out_every_prompt_once(count, seed, shuffle):
    stream = PromptStream(prompts_of(count), seed=seed, shuffle=shuffle)
    for epoch in range(3):
        drawn = take(stream, count)
        assert {prompt.epoch for prompt in drawn} == {epoch}
        assert Counter(p.prompt_id for p in drawn) == Counter(range(1, count + 1))


def test_order_differs_by_seed_and_epoch_and_is_the_file_order_without_shuffle():
    prompts = prompts_of(50)

    def order(seed, shuffle=True):
        stream = PromptStream(prompts, seed=seed, shuffle=shuffle)
        return [p.prompt_id for p in take(stream, 50)], [p.prompt_id for p in take(stream, 50)]

    assert order(0) == order(0)
    assert len({tuple(epoch) for seed in (0, 1, -1) for epoch in order(seed)}) == 6
    assert order(3, shuffle=False) == ([*range(1, 51)],) * 2


def test_the_order_never_changes_between_releases():
    stream = PromptStream(prompts_of(8), seed=17, shuffle=True)
    assert [p.prompt_id for p in take(stream, 8)] == ORDER_OF_SEED_17


WEIGHTS = st.lists(st.floats(0.01, 100), min_size=2, max_size=8)


@given(WEIGHTS, st.integers(1, 400))
def test_each_source_has_given_its_share_at_any_time(weights: list[float], count: int) -> None:
    sizes = [3] * len(weights)
    stream = PromptStream(prompts_of(*sizes), seed=0, shuffle=True, weights=weights)
    found: Counter[int] = Counter()
    for number in range(1, count + 1):
        found[next(stream).source] += 1
        for source, weight in enumerate(weights):
            share = weight / sum(weights)
            assert -2 < found[source] - share * number < 1 + 1e-9


def test_each_source_has_epochs_of_its_own_with_weights_and_a_common_one_without() -> None:
    prompts = prompts_of(2, 10)
    weighted = PromptStream(prompts, seed=0, shuffle=True, weights=[1, 1])
    drawn = take(weighted, 20)
    assert Counter(each.source for each in drawn) == {0: 10, 1: 10}
    assert {each.epoch for each in drawn if each.source == 0} == {0, 1, 2, 3, 4}
    assert {each.epoch for each in drawn if each.source == 1} == {0}
    common = PromptStream(prompts, seed=0, shuffle=True)
    assert Counter(each.source for each in take(common, 12)) == {0: 2, 1: 10}
    assert next(common).epoch == 1


def test_a_stream_ends_with_its_last_epoch_after_what_was_open() -> None:
    stream = PromptStream(prompts_of(4), seed=0, shuffle=True, num_epochs=1.6, first=[(0, 2)])
    assert stream.num_left == 1 + 7
    assert len([*stream]) == 8
    assert stream.is_exhausted
    assert stream.num_left == 0
    resumed = PromptStream(prompts_of(4), seed=0, shuffle=True, num_epochs=2, position=7)
    assert not resumed.is_exhausted, "with more epochs it goes on"
    assert len([*resumed]) == 1


def test_a_prompt_without_a_signal_comes_more_rarely_until_it_has_one() -> None:
    prompts = prompts_of(1000)
    stream = PromptStream(prompts, seed=0, shuffle=True, repeat_share=0.25)
    for prompt in take(stream, 1000):
        stream.learn(prompt, has_signal=prompt.prompt_id % 2 == 0)
    assert stream.take_metrics()["prompts/without_signal"] == 500
    second: list[Prompt] = []
    while (prompt := next(stream)).epoch == 1:
        second.append(prompt)
    odd = sum(prompt.prompt_id % 2 for prompt in second)
    assert len(second) - odd == 500
    assert 90 < odd < 160
    metrics = stream.take_metrics()
    assert 500 - odd <= metrics["prompts/skipped"] < 500 - odd + 50, "some of the next epoch"
    assert stream.take_metrics()["prompts/skipped"] == 0
    for prompt in prompts:
        stream.learn(prompt, has_signal=True)
    take(stream, 2000)
    assert stream.take_metrics() == {
        "prompts/epoch": pytest.approx(4.0, abs=0.1),
        "prompts/skipped": 0,
        "prompts/without_signal": 0,
    }


@pytest.mark.parametrize("text", ["%", "AAAA", "eJwDAAAAAAE="])
def test_bits_that_no_state_has_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="silent of the state must"):
        PromptStream(prompts_of(9), seed=0, shuffle=True, repeat_share=0.5, silent=text)


def play(rng: random.Random) -> None:
    """Streams that are saved and made again at any time against one that is not."""
    sizes = [rng.randint(1, 5) for _ in range(rng.randint(1, 3))]
    prompts = prompts_of(*sizes)
    options: dict[str, Any] = {
        "seed": rng.randrange(3),
        "shuffle": rng.random() < 0.5,
        "weights": [rng.choice([0.5, 1, 3]) for _ in sizes] if rng.random() < 0.6 else [],
        "num_epochs": rng.choice([0, 0.5, 2, 3.3]),
        "repeat_share": rng.choice([1.0, 0.5, 0.2]),
    }
    stream, again = PromptStream(prompts, **options), PromptStream(prompts, **options)
    drawn: list[Prompt] = []
    open_ones: list[Prompt] = []  # drawn, and neither trained nor dropped when it is saved
    waiting: list[Prompt] = []  # of those, what is handed out again
    for _ in range(60):
        if rng.random() < 0.2 and not waiting:
            state = json.loads(json.dumps(again.state()))
            first = [(each.epoch, each.prompt_id) for each in open_ones]
            for name in ("backlog", "identity"):
                del state[name]
            again = PromptStream(prompts, **options, **state, first=first)
            waiting, open_ones = open_ones, []
        if waiting:
            assert next(again) == waiting.pop(0)
            continue
        expected, found = next(stream, None), next(again, None)
        assert found == expected
        if found is None:
            assert options["num_epochs"]
            assert stream.num_left == again.num_left == 0
            break
        drawn.append(found)
        if rng.random() < 0.3:
            open_ones.append(found)
        else:
            has_signal = rng.random() < 0.4
            stream.learn(found, has_signal=has_signal)
            again.learn(found, has_signal=has_signal)
        assert again.position == stream.position == len(drawn)
    seen = Counter((each.epoch, each.prompt_id) for each in drawn)
    assert set(seen.values()) <= {1}, "once per epoch"
    if options["num_epochs"]:
        assert len(drawn) <= -(-options["num_epochs"] * len(prompts) // 1)


@searched(few=200, many=5000)
def test_a_stream_saved_at_any_time_goes_on_as_one_that_is_not(seeds: Sequence[int]) -> None:
    for seed in seeds:
        with case(seed):
            play(random.Random(seed))


SAMPLING = Sampling(max_tokens=9, stop_token_ids=(2,))


def group(group_id: int, first_row: int) -> Group:
    prompt = Prompt(prompt_id=7, text="q", token_ids=(1, 2, 3), epoch=1)
    row_ids = tuple(range(first_row, first_row + 3))
    return Group(group_id=group_id, prompt=prompt, row_ids=row_ids, min_version=3)


def test_the_same_prompt_draws_the_same_rollouts_after_a_resume() -> None:
    before = make_requests(group(5, 10), sampling=SAMPLING, seed=1, segment_tokens=0)
    after = make_requests(group(8, 90), sampling=SAMPLING, seed=1, segment_tokens=0)
    assert [r.seed for r in before] == [r.seed for r in after]
    assert len({r.seed for r in before}) == 3
    assert {r.min_version for r in before} == {3}
    other = make_requests(group(5, 10), sampling=SAMPLING, seed=2, segment_tokens=0)
    assert not {r.seed for r in before} & {r.seed for r in other}


def test_replayed_lengths_are_written_in_order_and_nothing_else_ends_a_rollout() -> None:
    requests = make_requests(
        group(2, 0), sampling=SAMPLING, seed=0, segment_tokens=0, replay_lengths=[4, 5, 6, 7]
    )
    assert [r.replay_tokens for r in requests] == [6, 7, 4]
    assert {r.sampling.max_tokens for r in requests} == {SAMPLING.max_tokens}  # dispatch sees none
    assert {r.sampling.stop_token_ids for r in requests} == {()}


@pytest.mark.parametrize("content", ["[1, 0]", "[10]", "[]", "[1.5]", '{"a": 1}', "[1", "[true]"])
def test_wrong_lengths_are_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="lengths"):
        read_lengths(path, 9)
    path.write_text(json.dumps([1, 9]))
    assert read_lengths(path, 9) == [1, 9]
