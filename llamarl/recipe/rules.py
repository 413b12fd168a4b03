"""Rules that follow from a recipe: how its rollouts are drawn, and what a rehearsal leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from llamarl.core.config import (
    Config,
    EnvironmentConfig,
    EvaluationConfig,
    RewardConfig,
    SamplingConfig,
    VllmConfig,
)
from llamarl.core.config.generator import pools_of
from llamarl.core.fields import require, require_choice
from llamarl.core.records import REWARD, Sampling
from llamarl.generator.vllm.limits import check_temperature
from llamarl.model.tokenizer import TextDecoder, split_stops
from llamarl.recipe.inputs import Inputs

KINDS: dict[str, tuple[Any, str]]  # of fields that are no whole numbers
KINDS = dict.fromkeys(("temperature", "top_p", "min_p"), (int | float, "be a number"))
KINDS |= dict.fromkeys(("stop_token_ids", "stop_strings"), (list | tuple, "be a list"))


def train_sampling(config: Config, inputs: Inputs) -> Sampling:
    """Return the sampling parameters of training rollouts, which end at the tokenizer's and the
    model's own end-of-sequence ids, and where `sampling.stop_strings` says."""
    stop_ids, stop_strings = split_stops(inputs.tokenizer, config.sampling.stop_strings)
    eos_ids = (*inputs.tokenizer.eos_token_ids, *inputs.architecture.eos_token_ids)
    return Sampling(
        temperature=config.sampling.temperature,
        top_k=config.sampling.top_k,
        top_p=config.sampling.top_p,
        min_p=config.sampling.min_p,
        max_tokens=config.sampling.max_tokens,
        stop_token_ids=tuple(dict.fromkeys((*eos_ids, *stop_ids))),
        stop_strings=stop_strings,
    )


def evaluation_sampling(config: Config, inputs: Inputs) -> Sampling:
    """Return the sampling parameters of held-out rollouts."""
    return replace(
        train_sampling(config, inputs),
        temperature=config.evaluation.temperature,
        top_k=0,
        top_p=config.evaluation.top_p,
        min_p=0.0,
        max_tokens=config.evaluation.max_tokens or config.sampling.max_tokens,
    )


def replace_sampling(
    sampling: Sampling, values: Mapping[str, Any], tokenizer: TextDecoder, config: Config
) -> Sampling:
    """Return `sampling` with these fields instead. ValueError, with the field's name, for one that
    does not exist, that no recipe could hold, or that an engine of `config` refuses; values that
    only evaluation may have are allowed."""
    for name, value in values.items():
        require_choice("a field of the sampling", name, [each.name for each in fields(Sampling)])
        kinds, must = KINDS.get(name, (int, "be a whole number"))
        require(isinstance(value, kinds) and not isinstance(value, bool), name, must, value)
    drawn = replace(sampling, **values)
    try:
        EvaluationConfig(temperature=drawn.temperature, top_p=drawn.top_p)
        SamplingConfig(max_tokens=drawn.max_tokens, stop_strings=[*drawn.stop_strings])
    except ValueError as error:
        raise ValueError(str(error).partition(".")[2]) from None
    require(drawn.top_k >= 0, "top_k", "be 0 or more", drawn.top_k)
    require(0 <= drawn.min_p < 1, "min_p", "be from 0 to below 1", drawn.min_p)
    ids = drawn.stop_token_ids
    are_ids = all(type(each) is int and 0 <= each < 2**31 for each in ids)
    require(are_ids, "stop_token_ids", "be ids of tokens", ids)
    if any(isinstance(pool.generator, VllmConfig) for pool in pools_of(config.generator)):
        check_temperature("temperature", drawn.temperature)
    stop_ids, stop_strings = split_stops(tokenizer, drawn.stop_strings, "stop_strings")
    stop_ids = tuple(dict.fromkeys((*drawn.stop_token_ids, *stop_ids)))
    return replace(drawn, stop_token_ids=stop_ids, stop_strings=stop_strings)


def without_evaluation(config: Config) -> Config:
    """Hold nothing out, and keep no version as the best."""
    return replace(
        config,
        data=replace(config.data, held_out=None),
        evaluation=EvaluationConfig(),
        checkpoint=replace(config.checkpoint, best=""),
    )


def without_own_stages(config: Config) -> Config:
    """Let rollouts pass no stage of the recipe's task.py."""
    algorithm = replace(
        config.algorithm, reward_columns=[REWARD], reward_column_weights=[1.0], loss_columns=[]
    )
    return replace(config, algorithm=algorithm, experience=replace(config.experience, stages=[]))


def without_rewards(config: Config) -> Config:
    """Let every rollout be one answer, whose reward a caller gives."""
    return replace(
        config, environment=EnvironmentConfig(), reward=RewardConfig(functions=["format"])
    )


def with_processes(config: Config) -> Config:
    """Let executors be processes, as many as there may be, also if the run has them all in one."""
    return replace(config, cluster=replace(config.cluster, backend="monarch"))
