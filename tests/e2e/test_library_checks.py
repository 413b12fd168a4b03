"""What a recipe may not hold is refused of the calls of a loop of one's own too."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from llamarl.library.own_loop import LibraryEngines
from llamarl.recipe.inputs import read_inputs
from llamarl.recipe.sampling_rules import replace_sampling, train_sampling
from tests.e2e.test_library import RECIPE, run
from tests.unit.test_mistakes import compose


def test_rewards_may_be_given_in_place_of_those_of_score_and_be_corrected(tmp_path: Path) -> None:
    async def work(engines: LibraryEngines) -> None:
        await engines.sync_weights()
        (group,) = await engines.generate(itertools.islice(engines.prompts, 1))
        await engines.score([group])
        assert await engines.settle(group, [float("nan")] + [1.0] * 7) == "failed_reward"
        assert await engines.settle(group, [float("inf")] + [1.0] * 7) == "failed_reward"
        assert await engines.settle(group, [1e300] + [1.0] * 7) == "failed_reward"
        assert await engines.settle(group, [1.0] + [0.0] * 7) is None
        (rewards,) = zip(
            *(await engines.get_experience(group.row_ids, ["reward"]))["reward"], strict=True
        )
        assert list(rewards) == [1.0] + [0.0] * 7
        with pytest.raises(ValueError, match=r"rewards must be one per rollout, got \[1.0\]"):
            await engines.settle(group, [1.0])
        await engines.forward_backward([group])
        assert (await engines.optim_step()).version == 1

    run(work, tmp_path)


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"top_p": 0.0}, "top_p must be above 0, got 0.0"),
        ({"temperature": -1.0}, "temperature must be at least 0, got -1.0"),
        ({"temperature": 1e-5}, "temperature must be 0 (greedy) or at least 0.001, got 1e-05"),
        ({"stop_strings": "=A"}, "stop_strings must be a list, got '=A'"),
        ({"stop_strings": [""]}, "stop_strings must not be empty, got ['']"),
        ({"stop_strings": ["<pad>."]}, "stop_strings must hold a special token"),
        ({"top_k": -1}, "top_k must be 0 or more, got -1"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": 2.5}, "max_tokens must be a whole number, got 2.5"),
        ({"max_token": 8}, "(did you mean max_tokens?)"),
    ],
)
def test_what_a_recipe_could_not_hold_is_refused_of_a_call(
    sampling: dict[str, object], words: str
) -> None:
    config = compose(RECIPE)
    inputs = read_inputs(config)
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - compared as a text below
        replace_sampling(train_sampling(config, inputs), sampling, inputs.tokenizer)
    assert words in str(raised.value)


def test_one_rollout_is_no_group_to_be_trained_on(tmp_path: Path) -> None:
    async def work(engines: LibraryEngines) -> None:
        await engines.sync_weights()
        (group,) = await engines.generate(["What is 1+2?"], num_rollouts=1)
        with pytest.raises(ValueError, match=r"sampling\.rollouts_per_prompt must be at least 2"):
            await engines.settle(group, [1.0])

    run(work, tmp_path, "algorithm=rloo")
