"""The command `llamarl rehearse`: it plays a recipe's episodes without its model, and leaves no
process and no file behind."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib.util import find_spec
from json import dumps
from pathlib import Path
from typing import Any

from rich.console import Console

from llamarl.cli.reports import check_writable, write_text
from llamarl.controller.memory import forecast_memory
from llamarl.core.config import Config
from llamarl.core.fields import require, require_choice
from llamarl.core.records import Prompt
from llamarl.model.architecture import Architecture, read_any_architecture
from llamarl.model.prompt_rules import make_prompt
from llamarl.model.tokenizer import Tokenizer, load_tokenizer
from llamarl.recipe.inputs import (
    Inputs,
    check_episodes,
    check_sandbox,
    read_planned_architecture,
    tokenizer_folder,
)
from llamarl.recipe.prompt_inputs import (
    context_of,
    load_task,
    read_graph,
    read_prompts,
    read_task,
    refuse_sft,
    resolve,
)
from llamarl.recipe.rules import with_processes
from llamarl.rehearsal.faults import Faults, read_faults
from llamarl.rehearsal.findings import Evidence, find
from llamarl.rehearsal.policies import (
    SCRIPTS,
    EndpointPolicy,
    Policy,
    RecordedPolicy,
    RememberingPolicy,
    ScriptedPolicy,
    TinyPolicy,
)
from llamarl.rehearsal.report import Measured, figures, measure, planned, render, wrapped
from llamarl.rehearsal.rounds import PlayedRollout, Rehearsal, rehearsed
from llamarl.scoring.definition import schemas_of
from llamarl.scoring.reward_functions import expected_answer
from llamarl.scoring.turn_format import TurnFormats

SCRIPTED, TINY, RECORDED, ENDPOINT = "scripted", "tiny", "recorded", "endpoint"
NUM_ROLLOUTS = 4  # of a prompt, unless each plays a script of its own
TINY_BYTES = 2**28  # weights that the recipe's own checkpoint may have to be the tiny policy
FEWEST_STEPS = 3  # of the simulation, whose figures are shown with two digits
MOST_AT_ONCE = 4096
"""Episodes that are played at once in the rounds where all are."""


async def rehearse(
    config: Config,
    console: Console,
    *,
    against: str | None,
    policy: str | None,
    prompts: str | None,
    faults: str | None,
    json: str | None,
) -> None:
    """Play the recipe's episodes on this machine, and say on `console`, and in the file `json`,
    what a run would meet. ValueError for arguments or a recipe that cannot be rehearsed."""
    start_s = time.monotonic()
    refuse_sft(config, "llamarl rehearse")
    must = "name what rollouts take turns with, for llamarl rehearse plays episodes"
    config.environment.require(config.environment.is_used, "tools", must)
    check_writable("--json", json)
    num_prompts = _number("--prompts", prompts, 8)
    injected = read_faults(faults)
    kind = _kind(against, policy)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="llamarl-rehearsal-"))
        tokenizer = _tokenizer(config)
        recorded = RecordedPolicy(Path(str(against)), tokenizer) if kind == RECORDED else None
        num_rollouts = len(SCRIPTS) if kind == SCRIPTED else NUM_ROLLOUTS
        num_rollouts = num_rollouts if recorded is None else recorded.num_rollouts
        own = rehearsed(config, num_rollouts, folder)
        inputs = _read_inputs(config, own, tokenizer)
        chosen = _choose(config, inputs, tokenizer, num_prompts, recorded)
        check_episodes(config, chosen, ())
        playing = recorded or await _policy(kind, against, own, inputs, tokenizer, folder)
        is_drawn = isinstance(playing, TinyPolicy | EndpointPolicy)
        rehearsal = Rehearsal(
            config=own,
            inputs=inputs,
            tokenizer=tokenizer,
            prompts=chosen,
            policy=RememberingPolicy(playing) if is_drawn else playing,
        )
        try:
            evidence = await _play(rehearsal, injected, kind, console)
        finally:
            await playing.close()
    rollouts = [*evidence.alone.rollouts.values()]
    measured, findings = measure(rollouts), find(evidence)
    notes, seconds = _notes(playing, evidence), time.monotonic() - start_s
    prompts_words = "1 prompt" if len(chosen) == 1 else f"{len(chosen)} prompts"
    text = (
        f"{len(rollouts)} episodes of {prompts_words}, played by the {kind} policy in 5 rounds, "
        f"in {seconds:.0f} s\n\n{render(config, evidence, measured, findings, notes)}"
    )
    console.print(text, markup=False, highlight=False, soft_wrap=True, end="")
    found: dict[str, Any] = {"policy": kind, "seconds": seconds, "notes": notes}
    found |= figures(config, evidence, measured, findings)
    if json is not None:  # also if nobody waits for the forecast
        write_text("--json", json, dumps(found, indent=2) + "\n")
    with console.status("forecasting a step of the recipe"):
        # Its simulation has an event loop of its own.
        cost = await asyncio.to_thread(_cost, config, measured, rollouts, kind)
    console.print("\n" + wrapped(cost), markup=False, highlight=False, soft_wrap=True, end="")
    if json is not None:
        write_text("--json", json, dumps({**found, "cost": cost}, indent=2) + "\n")


def _kind(against: str | None, policy: str | None) -> str:
    """Return which policy plays."""
    if against is None:
        require_choice("--policy", policy or SCRIPTED, (SCRIPTED, TINY))
        return policy or SCRIPTED
    require(policy is None, "--policy", "be left out with --against", policy)
    if against.startswith(("http://", "https://")):
        must = "go with the package openai for an endpoint (pip install 'llamarl[judge]')"
        require(find_spec("openai") is not None, "--against", must, "none")
        return ENDPOINT
    must = "name a recorded file or the address of an OpenAI-compatible endpoint"
    require(Path(against).is_file(), "--against", must, against)
    return RECORDED


def _number(flag: str, text: str | None, default: int) -> int:
    is_number = text is None or (text.isdecimal() and 1 <= int(text) <= 1000)
    require(is_number, flag, "be a number from 1 to 1000", text)
    return default if text is None else int(text)


def _tokenizer(config: Config) -> Tokenizer:
    folder = tokenizer_folder(config)
    return load_tokenizer(folder, config.data.chat_template_kwargs, config.data.date)


def _read_inputs(config: Config, own: Config, tokenizer: Tokenizer) -> Inputs:
    """Read what episodes need, no weights. ValueError says what to change."""
    task_source = read_task(config)
    graph, kinds = read_graph(own, task_source)
    check_sandbox(config)
    TurnFormats(tokenizer, kinds, config.environment)  # raises what is wrong with them
    checkpoint = resolve(config, config.model.checkpoint)
    if not os.path.isdir(checkpoint) and config.model.architecture is not None:
        checkpoint = resolve(config, config.model.architecture)
    return Inputs(
        checkpoint=checkpoint,
        adapter=None,
        tokenizer_folder=tokenizer_folder(config),
        architecture=read_any_architecture(checkpoint),
        tokenizer=tokenizer,
        prompts=read_prompts(own, tokenizer, kinds, task_source),
        held_out=[],
        task_source=task_source,
        task=load_task(own, task_source),
        graph=graph,
        kinds=kinds,
        replay_lengths=[],
    )


async def _policy(
    kind: str, against: str | None, own: Config, inputs: Inputs, tokenizer: Tokenizer, folder: str
) -> ScriptedPolicy | EndpointPolicy | TinyPolicy:
    """Return the policy of this kind."""
    if kind == ENDPOINT:
        assert against is not None
        endpoint = EndpointPolicy(against, "", own, tokenizer)
        await endpoint.check()
        return endpoint
    if kind == TINY:
        checkpoint = _tiny_checkpoint(own, inputs, Path(folder))
        return TinyPolicy(checkpoint, own, context_of(own))
    return ScriptedPolicy(own, tokenizer)


def _tiny_checkpoint(own: Config, inputs: Inputs, folder: Path) -> str:
    """Return the folder of a small checkpoint: the recipe's own, or one of random weights."""
    is_ours = isinstance(inputs.architecture, Architecture)
    require(is_ours, "--policy", "be scripted for a checkpoint of another family", TINY)
    weights = [*Path(inputs.checkpoint).glob("*.safetensors")]
    if weights and sum(path.stat().st_size for path in weights) <= TINY_BYTES:
        return inputs.checkpoint
    from llamarl.cli.check_trial import write_tiny_checkpoint  # here, for it imports torch

    return write_tiny_checkpoint(own, inputs, folder)


def _choose(
    config: Config,
    inputs: Inputs,
    tokenizer: Tokenizer,
    num_prompts: int,
    recorded: RecordedPolicy | None,
) -> Sequence[Prompt]:
    """Return the prompts that are played: those that were recorded, or some of the recipe's, drawn
    by its seed."""
    if recorded is None:
        number = len(inputs.prompts)
        places = random.Random(config.seed).sample(range(number), min(num_prompts, number))
        return [inputs.prompts[place] for place in sorted(places)]
    data = replace(config.data, overlong="error")
    shown = lambda row: schemas_of(row, inputs.kinds)  # noqa: E731
    rows = enumerate(recorded.rows[:num_prompts], start=1)
    return [make_prompt(row, number, data, tokenizer, shown) for number, row in rows]


async def _play(rehearsal: Rehearsal, faults: Faults, kind: str, console: Console) -> Evidence:
    """Play all rounds."""
    rounds, log = [], logging.getLogger("llamarl")
    for words, settings in (
        ("one after another", {"at_once": 1}),
        ("the same again", {"at_once": 1}),
        ("in the other order", {"at_once": 1, "is_reversed": True}),
        ("all at once", {"at_once": MOST_AT_ONCE}),
        ("with faults", {"at_once": MOST_AT_ONCE, "faults": faults}),
    ):
        given: dict[str, Any] = settings
        level = log.level
        if "faults" in given:  # the report says what they led to
            log.setLevel(logging.ERROR)
        try:
            with console.status(f"playing episodes: {words}"):
                rounds.append(await rehearsal.play(**given))
        finally:
            log.setLevel(level)
    answers: dict[int, str] = {}
    for prompt in rehearsal.prompts:
        with suppress(KeyError, TypeError, ValueError):
            answers[prompt.line] = expected_answer(prompt, rehearsal.config.reward)
    alone, again, other, together, faulty = rounds
    return Evidence(
        alone=alone,
        again=again,
        reversed=other,
        together=together,
        faulty=faulty,
        scripted=kind == SCRIPTED,
        answers=answers,
        source=rehearsal.inputs.task_source,
    )


def _cost(
    config: Config, measured: Measured, rollouts: Sequence[PlayedRollout], kind: str
) -> list[str]:
    """Return what a step of the recipe costs with these lengths and times, in lines."""
    from llamarl.planner.recipe import forecast_recipe, timed

    plan = replace(planned(config.plan, measured, rollouts), num_steps=FEWEST_STEPS)
    names = (
        *("prompt_tokens", "median_tokens", "num_turns", "observation_tokens", "tool_s"),
        "num_steps",
    )
    told = " ".join(f"plan.{name}={getattr(plan, name):g}" for name in names)
    whose = "" if kind in (ENDPOINT, RECORDED) else f", lengths of the {kind} policy, no model's"
    lines = [f"a step of the recipe, by llamarl plan with {told}{whose}"]
    try:
        architecture = read_planned_architecture(config)
        config = with_processes(replace(config, plan=plan))
        if not timed(config):
            forecast_memory(config, architecture)
            return [*lines, "  no times are known of its GPU"]
        step = forecast_recipe(config, architecture).step
    except ValueError as error:
        return [*lines, f"  cannot be forecast: {error}"]
    waits = step.wait_shares.get("generator requests", 0.0)
    lines.append(
        f"  {step.step_s:.3g} s, {step.trained_tokens_per_s:,.0f} trained tokens/s; busy: trainer "
        f"{step.busy_shares.get('trainer', 0):.0%}, generators "
        f"{step.busy_shares.get('generator', 0):.0%} (without requests {waits:.0%})"
    )
    return lines


def _notes(playing: Policy, evidence: Evidence) -> list[str]:
    """Return what is to be known of the policy, in lines."""
    if isinstance(playing, EndpointPolicy) and playing.failed:
        return [f"the endpoint gave no answer to {playing.failed}, which were empty"]
    if isinstance(playing, ScriptedPolicy) and playing.num_misread:
        return [
            f"{playing.num_misread} turns of the scripts were not read as they are meant, such as "
            "calls with characters that the tokenizer lacks: they do not do what their line says"
        ]
    if not isinstance(playing, RecordedPolicy):
        return []
    same = total = 0
    for rollout in evidence.alone.rollouts.values():
        told = playing.of(rollout.prompt, rollout.number).observations
        before = [text for number in sorted(told) for text in told[number]]
        total += len(before)
        same += sum(now in was for was, now in zip(before, rollout.said, strict=False))
    return [f"recorded observations: {same} of {total} were said again"]
