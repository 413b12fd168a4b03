"""The report of a rehearsal: one page, and the same figures as JSON."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Any

from llamarl.core.config import Config, PlanConfig
from llamarl.core.records import StageStatus
from llamarl.rehearsal.environment import PROGRAM, TOLD
from llamarl.rehearsal.faults import WORDS
from llamarl.rehearsal.findings import Evidence, Finding
from llamarl.rehearsal.policies import SCRIPTS, script_of
from llamarl.rehearsal.rounds import PlayedRollout

WIDTH = 100
SHOWN = 60  # characters of an example
LOST = {"kill", "drop", "lose", PROGRAM}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The lengths and times of a rehearsal's episodes, without faults, by name: of each the mean,
    the value that half are below, and the largest."""

    per_episode: Mapping[str, tuple[float, float, float]]
    per_turn_s: Mapping[str, tuple[float, float, float]]
    """The seconds of an answer by tool, and of the environment as a whole."""
    prompt_tokens: float


def measure(rollouts: Sequence[PlayedRollout]) -> Measured:
    """Return the lengths and times of these episodes."""
    episodes = {
        "turns": [float(len(each.log.turns)) for each in rollouts],
        "tokens of the model": [float(each.num_tokens) for each in rollouts],
        "tokens of the environment": [float(each.num_observed) for each in rollouts],
        "conversations": [float(each.num_conversations) for each in rollouts],
        "seconds of the environment": [each.numbers.get("environment_s", 0.0) for each in rollouts],
    }
    turns = {"environment": [*_turn_seconds(rollouts)]}
    for rollout in rollouts:
        for name, seconds in rollout.numbers.items():
            kind, _, tool = name.partition("/")
            if kind == "seconds" and (num := rollout.numbers.get(f"calls/{tool}")):
                turns.setdefault(tool, []).append(seconds / num)
    return Measured(
        per_episode={name: _spread(values) for name, values in episodes.items()},
        per_turn_s={name: _spread(values) for name, values in turns.items() if values},
        prompt_tokens=fmean(len(each.prompt.token_ids) for each in rollouts),
    )


def planned(plan: PlanConfig, measured: Measured, rollouts: Sequence[PlayedRollout]) -> PlanConfig:
    """Return the lengths for `llamarl plan` that were measured."""
    num_turns = max(1, round(measured.per_episode["turns"][1]))
    observed = [
        each.num_observed / (len(each.log.turns) - 1)
        for each in rollouts
        if len(each.log.turns) > 1
    ]
    seconds = sorted(_turn_seconds(rollouts))
    return replace(
        plan,
        prompt_tokens=max(1, round(measured.prompt_tokens)),
        median_tokens=max(num_turns, round(measured.per_episode["tokens of the model"][1])),
        num_turns=num_turns,
        observation_tokens=max(1, round(fmean(observed))) if observed else 1,
        tool_s=round(median(seconds), 4) if seconds else 0.0,
    )


def render(
    config: Config,
    evidence: Evidence,
    measured: Measured,
    findings: Sequence[Finding],
    notes: Sequence[str],
) -> str:
    """Return the page; `notes` say what is to be known of the policy."""
    together = [*evidence.together.rollouts.values()]
    parts = [
        [*_table("per episode", measured.per_episode, 2)],
        [*_rewards(evidence, together)],
        [*_table("seconds per turn", measured.per_turn_s, 4)],
        [*_ids(together, evidence.scripted)],
        [*_calls(together)],
        [*_limits(together)],
        [*_failures(config, evidence)],
        [*notes],
        [*_findings(findings)],
    ]
    return "\n".join(wrapped(part) for part in parts if part)


def wrapped(lines: Sequence[str]) -> str:
    """Return a part of the page, in lines of its width."""
    return "".join(f"{_wrapped(line)}\n" for line in lines)


def _wrapped(line: str) -> str:
    """Return a line of the page as lines of its width, whose rest is indented."""
    if len(line) <= WIDTH:
        return line
    text = line.lstrip()
    first = " " * (len(line) - len(text))
    rest = f"{first}  "
    return "\n".join(textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest))


def figures(
    config: Config, evidence: Evidence, measured: Measured, findings: Sequence[Finding]
) -> dict[str, Any]:
    """Return the figures of the page as JSON."""
    together = [*evidence.together.rollouts.values()]
    names = "mean", "median", "max"
    named = {
        key: {name: dict(zip(names, each, strict=True)) for name, each in value.items()}
        for key, value in {
            "per_episode": measured.per_episode,
            "per_turn_s": measured.per_turn_s,
        }.items()
    }
    faulty = evidence.faulty.rollouts.values()
    return {
        **named,
        "prompt_tokens": measured.prompt_tokens,
        "num_episodes": len(together),
        "sequences_compared": sum(each.num_rendered for each in together),
        "sequences_that_differ": sum(len(each.differences) for each in together),
        "calls": sum(len(turn.calls) for each in together for turn in each.log.turns),
        "calls_that_do_not_parse": dict(_wrong_calls(together)),
        "limits": dict(Counter(each.limit for each in together if each.limit)),
        "failures": dict(Counter(str(each.status) for each in together if each.has_failed)),
        "injected": dict(evidence.faulty.injected),
        "failures_with_faults": dict(Counter(str(e.status) for e in faulty if e.has_failed)),
        "failures_read_as_zero": _num_zero(config, [*together, *faulty]),
        "findings": [asdict(each) for each in findings],
    }


def _turn_seconds(rollouts: Iterable[PlayedRollout]) -> Iterator[float]:
    """Yield the seconds of each turn that was answered; of an agent, whose turns are not measured
    one by one, the mean of each episode."""
    for rollout in rollouts:
        turns = [turn for turn in rollout.log.turns if turn.said and turn.seconds is not None]
        yield from (turn.seconds or 0.0 for turn in turns)
        if not any(turn.seconds is not None for turn in rollout.log.turns) and rollout.log.turns:
            yield rollout.numbers.get("environment_s", 0.0) / len(rollout.log.turns)


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return (fmean(values), median(values), max(values)) if values else (0.0, 0.0, 0.0)


def _table(
    title: str, rows: Mapping[str, tuple[float, float, float]], digits: int
) -> Iterator[str]:
    yield f"{title:<28}{'mean':>12}{'median':>12}{'max':>12}"
    for name, cells in rows.items():
        yield f"  {name:<26}" + "".join(f"{cell:>12,.{digits}f}" for cell in cells)


def _rewards(evidence: Evidence, rollouts: Sequence[PlayedRollout]) -> Iterator[str]:
    good = [each for each in rollouts if not each.has_failed]
    if not good:
        yield "rewards: none"
        return
    if not evidence.scripted:
        low, high = min(each.reward for each in good), max(each.reward for each in good)
        mean = fmean(each.reward for each in good)
        yield f"rewards: mean {mean:.3g}, from {low:.3g} to {high:.3g}"
        return
    yield "mean reward by script"
    for number, (name, words) in enumerate(SCRIPTS.items()):
        rewards = [each.reward for each in good if each.number % len(SCRIPTS) == number]
        shown = f"{fmean(rewards):>8.3g}" if rewards else f"{'failed':>8}"
        yield f"  {name:<12}{shown}   {words}"


def _ids(rollouts: Sequence[PlayedRollout], scripted: bool) -> Iterator[str]:
    num = sum(each.num_rendered for each in rollouts)
    found = [(each, difference) for each in rollouts for difference in each.differences]
    where = "sequences with more than one turn"
    if not found:
        yield f"ids: those of all {num} {where} are what rendering their messages again gives"
        return
    yield (
        f"ids: {len(found)} of {num} {where} differ from rendering their messages again: a "
        "trainer that keeps only messages would train other tokens (llamarl trains those that were "
        "written)"
    )
    rollout, first = found[0]
    script = f", {script_of(rollout.number)}" if scripted else ""
    yield f"  line {rollout.prompt.line}{script}, in turn {first.turn + 1}"
    yield f"    written   {first.written!r:.110}"
    yield f"    rendered  {first.rendered!r:.110}"


def _wrong_calls(rollouts: Sequence[PlayedRollout]) -> Counter[str]:
    return Counter(
        error for each in rollouts for turn in each.log.turns for _, error in turn.calls if error
    )


def _calls(rollouts: Sequence[PlayedRollout]) -> Iterator[str]:
    turns = [turn for each in rollouts for turn in each.log.turns]
    num = sum(len(turn.calls) for turn in turns)
    if not num:
        yield "calls: none"
        return
    wrong = _wrong_calls(rollouts)
    yield f"calls: {num}, of which {wrong.total()} do not parse"
    for error, count in wrong.most_common():
        raw = next(t.raw for t in turns if any(each == error for _, each in t.calls))
        yield f"  {count:>6}  {error}: {raw!r:.{SHOWN}}"
    raised = Counter(name for turn in turns for name in turn.raised)
    if raised:
        names = ", ".join(f"{count} of {name}" for name, count in raised.most_common())
        yield f"calls that parse and failed, of which the model was told: {names}"


def _limits(rollouts: Sequence[PlayedRollout]) -> Iterator[str]:
    limits = Counter(each.limit for each in rollouts if each.limit)
    words = {
        "turns": "environment.max_turns",
        "conversations": "environment.max_conversations",
        "tokens": "a limit of tokens",
        "overlong": "an observation that did not fit",
    }
    parts = ", ".join(f"{n} by {words.get(name, name)}" for name, n in limits.most_common())
    yield f"cut by limits: {limits.total()} of {len(rollouts)} episodes" + (
        f" ({parts})" if parts else ""
    )


def _num_zero(config: Config, rollouts: Iterable[PlayedRollout]) -> int:
    """Return how many failures count as the reward 0."""
    is_zero = config.reward.on_failure == "zero"
    return sum(each.has_failed and is_zero and each.reward == 0 for each in rollouts)


def _failures(config: Config, evidence: Evidence) -> Iterator[str]:
    plain, faulty = evidence.together.rollouts.values(), evidence.faulty.rollouts
    kinds = Counter(each.status for each in plain if each.has_failed)
    yield f"failures without faults: {_kinds(kinds)}"
    if injected := evidence.faulty.injected:
        yield "with faults: " + ", ".join(f"{WORDS[name]}: {n}" for name, n in injected.items())
        again = sum(bool(each.log.faults & LOST) for each in faulty.values())
        failed = Counter(each.status for each in faulty.values() if each.has_failed)
        yield (
            f"  {again} of {len(faulty)} episodes began or asked again, as a loss takes along all "
            f"that are open; failed, and not trained on: {_kinds(failed)}"
        )
        told = [each for each in faulty.values() if TOLD in each.log.faults]
        if told:
            same = sum(each.reward == evidence.together.rollouts[each.key].reward for each in told)
            yield (
                f"  in {len(told)} the model was told that a tool had failed; {same} of those got "
                "the reward that they got without faults"
            )
    num = _num_zero(config, [*plain, *faulty.values()])
    yield (
        f"failures that count as reward 0: {num or 'none'}"
        f" (reward.on_failure={config.reward.on_failure})"
    )


def _kinds(kinds: Counter[StageStatus]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in kinds.most_common()) or "none"


def _findings(findings: Sequence[Finding]) -> Iterator[str]:
    if not findings:
        yield "found: nothing wrong"
        return
    yield f"found: {len(findings)} to look at"
    for each in findings:
        yield f"  {each.name}: {each.text}"
        if each.example:
            yield f"    {each.example}"
