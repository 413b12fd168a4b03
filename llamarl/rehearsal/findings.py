"""The faults of an environment, found by comparing rounds of a rehearsal and reading its text."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from llamarl.core.extensions import TaskSource
from llamarl.core.records import StageStatus
from llamarl.rehearsal.environment import PROGRAM
from llamarl.rehearsal.policies import (
    ARGUMENTS,
    CUT,
    ENDLESS,
    MALFORMED,
    RIGHT,
    SILENT,
    WRONG,
    script_of,
)
from llamarl.rehearsal.rounds import PlayedRollout, Round
from llamarl.scoring.definition import EPISODE, REWARD, STEP
from llamarl.scoring.rewards import OWN

ERROR = re.compile(
    r"\A\s*(Traceback \(most recent call last\)|[\w.]*(Error|Exception)\b[^\w\s]*[:(])"
)
TIMED_OUT = re.compile(
    r"\b(timed[ -]?out|time-?out (error|expired|exceeded)|deadline exceeded)\b", re.I
)
SHOWN = 100  # characters of an example
TOGETHER = 3.0  # times as long a call takes beside others, and so much longer besides
LONGER_S = 0.05
FEW = 3  # of what is held longer than an episode
ANSWER_CHARS = 3  # of an answer that is not said by chance
LOST = "environment.max_restarts"  # in the error of an episode whose process was lost too often
SHARE = 0.5  # of the episodes that an observation must have ended
BLOCKING = {
    ("time", "sleep"),
    ("subprocess", "run"),
    ("subprocess", "call"),
    ("subprocess", "check_output"),
    ("subprocess", "check_call"),
    ("os", "system"),
    ("requests", "get"),
    ("requests", "post"),
    ("urllib.request", "urlopen"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong: a `name`, what it does to a run, and an example."""

    name: str
    text: str
    example: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The rounds to compare: one episode at a time, the same again, in the other order, all at
    once, and with faults. `scripted` says that a script plays, which does what it is named for.
    `answers` has the expected answer of each prompt that has one, by its line."""

    alone: Round
    again: Round
    reversed: Round
    together: Round
    faulty: Round
    scripted: bool
    answers: Mapping[int, str]
    source: TaskSource | None


def find(evidence: Evidence) -> list[Finding]:
    """Return what is wrong, without what follows from it."""
    found = [each for check in CHECKS for each in check(evidence)]
    return [*{each.name: each for each in reversed(found)}.values()][::-1]


def _played(evidence: Evidence, *names: str) -> Iterator[PlayedRollout]:
    """Yield the episodes that were played alone, of these scripts."""
    for rollout in evidence.alone.rollouts.values():
        if not names or (evidence.scripted and script_of(rollout.number) in names):
            yield rollout


def _hides_errors(evidence: Evidence) -> Iterator[Finding]:
    """A tool returns its exception as if it were a result."""
    for rollout in _played(evidence):
        for turn in rollout.log.turns:
            for message in turn.said:
                text = str(message.get("content", ""))
                is_told = message.get("name") in turn.failed
                if is_told or message.get("role") != "tool":
                    continue  # what a step says may be what it likes
                if TIMED_OUT.search(text[: 2 * SHOWN]):
                    yield Finding(
                        "a time-out looks like an answer",
                        "the model is told that something timed out, and the episode goes on: let "
                        "it raise, so that it counts as a failure",
                        _shown(text),
                    )
                elif ERROR.match(text):
                    yield Finding(
                        "an exception looks like an answer",
                        "a call returned what reads like an exception: let it raise, so that it is "
                        "counted, and the model told in one form",
                        _shown(text),
                    )


def _differs(evidence: Evidence) -> Iterator[Finding]:
    """Episodes depend on chance, on those before them, or on those beside them."""
    alone = evidence.alone.rollouts
    if difference := _difference(alone, evidence.again.rollouts):
        yield Finding(
            "episodes are not repeatable",
            "the same turns of the model in the same order led to something else: seed what is "
            "drawn by the row, or no reward can be reproduced. What follows from order was not "
            "looked for",
            difference[1],
        )
        return
    if difference := _difference(alone, evidence.reversed.rollouts):
        what, example = difference
        yield Finding(
            *(
                (
                    "a reward depends on the order of episodes",
                    "an episode with the same turns got another reward after other episodes: a "
                    "reward must depend on its own episode alone",
                )
                if what == "reward"
                else (
                    "episodes share state",
                    "an episode with the same turns saw something else after other episodes: "
                    "reset must set everything anew, and nothing of it belong to the module",
                )
            ),
            example,
        )
        return
    if difference := _difference(alone, evidence.together.rollouts):
        hung = [each for each in evidence.together.rollouts.values() if _is_hung(each)]
        if hung and not any(map(_is_hung, alone.values())):
            yield Finding(
                "calls take too long beside others",
                f"{len(hung)} episodes failed when all were played at once, as a call took longer "
                "than environment.timeout_s, and none alone",
                _shown(hung[0].error),
            )
            return
        yield Finding(
            "episodes disturb each other",
            "an episode went on differently beside others than alone: it shares a file, a port or "
            "a variable with them",
            difference[1],
        )


LOSS = {"kill", "drop", "lose"}
MET = {
    frozenset(LOSS): Finding(
        "an episode does not begin anew",
        "after a process or a connection was lost, an episode with the same turns went on "
        "differently: something of the first attempt was left",
    ),
    frozenset({PROGRAM}): Finding(
        "a dropped connection changes the reward",
        "the program lost the connection of one request, and its episode ended with another reward "
        "in place of a failure: let it ask again, or raise",
    ),
    frozenset({"slow"}): Finding(
        "a slow call changes an episode",
        "a call took half a second longer, and the episode went on differently: it has a time "
        "limit of its own, which must raise",
    ),
}
"""What it means that an episode which has met these faults alone goes on differently."""


def _is_hung(rollout: PlayedRollout) -> bool:
    return rollout.status is StageStatus.HUNG


def _meets_faults(evidence: Evidence) -> Iterator[Finding]:
    """A fault that should not matter, or be a failure, leads to another reward."""
    if any(_differs(evidence)):
        return
    for faults, finding in MET.items():
        met = {
            key: each
            for key, each in evidence.faulty.rollouts.items()
            if each.log.faults & faults
            and each.log.faults <= faults | {"commit"}  # no policy here depends on it
            and not each.has_failed
        }
        before = {key: evidence.alone.rollouts[key] for key in met}
        if difference := _difference(before, met):
            yield replace(finding, example=difference[1])


def _difference(
    one: Mapping[tuple[int, int], PlayedRollout], other: Mapping[tuple[int, int], PlayedRollout]
) -> tuple[str, str] | None:
    """Return what differs first between the same episodes, "observation" or "reward", and how."""
    rewards: tuple[str, str] | None = None
    for key, a in one.items():
        b = other[key]
        where = f"line {a.prompt.line}, rollout {a.number}"
        if any(x.raw != y.raw for x, y in zip(a.log.turns, b.log.turns, strict=False)):
            continue  # parallel conversations may have come in another order
        if a.said != b.said or a.has_failed != b.has_failed:
            pairs = zip([*a.said, None], [*b.said, None], strict=False)
            text, now = next(((p, q) for p, q in pairs if p != q), (None, None))
            if a.has_failed != b.has_failed:
                text, now = a.error or text, b.error or now
            return "observation", f"{where}: {_shown(str(text))}, then {_shown(str(now))}"
        is_same = a.reward == b.reward or (math.isnan(a.reward) and math.isnan(b.reward))
        if not is_same and rewards is None:
            rewards = "reward", f"{where}: {a.reward:g}, then {b.reward:g}"
    return rewards


def _is_invalid(evidence: Evidence) -> Iterator[Finding]:
    """Something returns what it must not."""
    for rollout in _played(evidence):
        if rollout.status is StageStatus.INVALID:
            yield Finding(
                "a call returns what it must not",
                "such an episode is dropped: rewards are finite numbers, and what is said is text",
                _shown(rollout.error),
            )


def _fails(evidence: Evidence) -> Iterator[Finding]:
    """Episodes fail without a fault."""
    for rollout in _played(evidence):
        if rollout.status is StageStatus.RAISED and LOST in rollout.error:
            name, does = "a call ends its process", "ends the process, and the episode is dropped"
        elif rollout.status is StageStatus.RAISED:
            name, does = "the environment raises", "raises, so the episode is dropped"
        elif rollout.status is StageStatus.HUNG:
            name, does = "the environment hangs", "takes too long, so the episode is dropped"
        else:
            continue
        yield Finding(name, f"without any fault a call {does}", _shown(rollout.error))


def _is_constant(evidence: Evidence) -> Iterator[Finding]:
    """All rewards are equal, whatever is done."""
    rewards = [each.reward for each in _played(evidence) if not each.has_failed]
    if len({*rewards}) != 1:
        return
    right = [each for each in _played(evidence, RIGHT) if not each.has_failed]
    wrong = [each for each in _played(evidence, WRONG, MALFORMED) if not each.has_failed]
    if evidence.scripted and not (right and wrong):
        return
    alike = ", right and wrong answers alike" if evidence.scripted else ""
    yield Finding(
        "the reward never differs",
        f"all {len(rewards)} episodes got {rewards[0]:g}{alike}: a group of equal rewards has no "
        "gradient (if a script cannot know the right answer, try --against)",
    )


def _rewards_silence(evidence: Evidence) -> Iterator[Finding]:
    """Saying nothing gets as much as the best."""
    rewards = [each.reward for each in _played(evidence) if not each.has_failed]
    silent = [each.reward for each in _played(evidence, SILENT) if not each.has_failed]
    if silent and len({*rewards}) > 1 and min(silent) >= max(rewards):
        yield Finding(
            "saying nothing is rewarded",
            f"an episode whose only turn is empty got {min(silent):g}, as much as any other",
        )


def _leaks_answer(evidence: Evidence) -> Iterator[Finding]:
    """What the environment says has the answer, though the model has done nothing right."""
    for rollout in _played(evidence, MALFORMED, ARGUMENTS):
        answer = evidence.answers.get(rollout.prompt.line, "")
        if len(answer) < ANSWER_CHARS:
            continue
        word = re.compile(rf"(?<![\w.]){re.escape(answer)}(?![\w.])")
        for turn in rollout.log.turns:
            is_wrong = any(error for _, error in turn.calls) or turn.failed
            said = " ".join(str(each.get("content")) for each in turn.said)
            is_known = word.search(rollout.prompt.text) or word.search(turn.raw)
            if is_wrong and word.search(said) and not is_known:
                yield Finding(
                    "the answer is given away",
                    "a wrong call was answered with the row's expected answer",
                    _shown(said),
                )


def _fills_context(evidence: Evidence) -> Iterator[Finding]:
    """An observation leaves no room."""
    played = [
        each
        for each in _played(evidence)
        if not (evidence.scripted and script_of(each.number) in (ENDLESS, CUT, SILENT))
    ]
    overlong = [each for each in played if each.numbers.get("overlong")]
    if overlong and len(overlong) >= SHARE * len(played):
        sizes = sorted(len(text) for each in played for text in each.said)
        size = f"; the longest that fitted had {sizes[-1]} characters" if sizes else ""
        yield Finding(
            "an observation leaves no room",
            f"{len(overlong)} of {len(played)} episodes ended as what the environment says did not "
            "fit into sampling.max_tokens or generator.max_model_len: shorten it, or give them "
            f"more{size}",
        )


def _never_ends(evidence: Evidence) -> Iterator[Finding]:
    """No episode ends but by a limit."""
    ended = [each for each in _played(evidence) if not each.has_failed]
    if evidence.scripted:
        ended = [each for each in ended if script_of(each.number) not in (ENDLESS, CUT)]
    if ended and all(each.limit for each in ended):
        yield Finding(
            "episodes never end by themselves",
            f"a limit ({ended[0].limit}) ended every one: each costs as much as there may be",
        )


def _waits_in_line(evidence: Evidence) -> Iterator[Finding]:
    """Calls take much longer beside others."""
    alone, together = (_seconds(each) for each in (evidence.alone, evidence.together))
    if not alone or not together:
        return
    before, beside = fmean(alone), fmean(together)
    if beside > TOGETHER * before + LONGER_S:
        yield Finding(
            "calls wait for each other",
            f"a turn is answered within {before:.3f} s alone, and {beside:.3f} s when "
            f"{len(evidence.together.rollouts)} episodes are played at once: something blocks the "
            "process; make it a coroutine that awaits, or raise environment.num_workers",
        )


def _seconds(found: Round) -> list[float]:
    rollouts = [each for each in found.rollouts.values() if not each.has_failed]
    turns = (turn for each in rollouts for turn in each.log.turns if turn.said)
    return [turn.seconds for turn in turns if turn.seconds is not None]


def _leaves_behind(evidence: Evidence) -> Iterator[Finding]:
    """Each episode leaves something in its process."""
    _, few, all_ = evidence.alone.held
    num = len(evidence.alone.rollouts)
    for name in ("threads", "files", "processes"):
        more = getattr(all_, name) - getattr(few, name)
        if more >= max(FEW, num // 8):
            yield Finding(
                "episodes leave something behind",
                f"{more} more {'open ' if name == 'files' else ''}{name} were held after {num} "
                "episodes than after the first of them: close what an episode opens",
            )


def _reads_failures_as_zero(evidence: Evidence) -> Iterator[Finding]:
    """A handler of exceptions gives a number."""
    for path, tree in _trees(evidence.source):
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if function.name not in (REWARD, STEP, EPISODE, "play", *OWN.values()):
                continue
            for handler in ast.walk(function):
                if isinstance(handler, ast.ExceptHandler) and (line := _constant_return(handler)):
                    yield Finding(
                        "a failure becomes a reward",
                        f"{path}:{line}: {function.name} returns a number where it has caught an "
                        "exception, so what breaks counts as a wrong answer: let it raise",
                    )


def _constant_return(handler: ast.ExceptHandler) -> int:
    """Return the line where this handler returns a number; 0 if it does not."""
    for node in ast.walk(handler):
        if isinstance(node, ast.Return) and node.value is not None:
            values: Sequence[Any] = (
                node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            )
            for value in values:
                value = value.operand if isinstance(value, ast.UnaryOp) else value
                is_number = isinstance(value, ast.Constant) and type(value.value) in (int, float)
                if is_number:
                    return node.lineno
    return 0


def _blocks(evidence: Evidence) -> Iterator[Finding]:
    """A coroutine calls what does not await."""
    for path, tree in _trees(evidence.source):
        for function in ast.walk(tree):
            if not isinstance(function, ast.AsyncFunctionDef):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and (name := ast.unparse(node.func)):
                    module, _, called = name.rpartition(".")
                    if (module, called) in BLOCKING:
                        yield Finding(
                            "a coroutine blocks its process",
                            f"{path}:{node.lineno}: {function.name} calls {name}, and no other "
                            "episode of its process goes on meanwhile: await, or make it a plain "
                            "function, which gets a thread",
                        )


def _trees(source: TaskSource | None) -> Iterator[tuple[str, ast.Module]]:
    for path, text in (source or {}).items():
        yield path, ast.parse(text)


def _shown(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= SHOWN else f"...{line[-SHOWN:]}")


CHECKS: list[Callable[[Evidence], Iterator[Finding]]] = [
    _hides_errors,
    _differs,
    _meets_faults,
    _is_invalid,
    _fails,
    _reads_failures_as_zero,
    _is_constant,
    _rewards_silence,
    _leaks_answer,
    _fills_context,
    _never_ends,
    _waits_in_line,
    _blocks,
    _leaves_behind,
]
