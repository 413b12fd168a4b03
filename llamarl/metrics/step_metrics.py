"""The metrics of one optimizer step, as values by tag, from the metadata of its rollouts."""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from textwrap import indent
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamarl.core.groups import Group, StepStats
from llamarl.core.records import (
    EPISODE_LIMITS,
    EXTRA,
    FinishReason,
    RolloutInfo,
    StageResult,
    StageStatus,
    find_value,
)
from llamarl.metrics.estimates import share_of

log = logging.getLogger(__name__)

Scalars = dict[str, float]
Histograms = dict[str, dict[float, int]]  # tag -> value -> how often
Texts = dict[str, str]
StepMetrics = tuple[Scalars, Histograms, Texts]

STALENESS_HISTOGRAM = "staleness/tokens"
EXPERT_LOADS = "experts/load"
MAX_VALUES = 32  # of a histogram; more are counted in this many equal ranges
TRAINED_TOKENS = "tokens/trained"
TOKENS_PER_S, STEP_S = "tokens/per_s", "time/step_s"
FAILURES = [status for status in StageStatus if status is not StageStatus.OK]

# Tags of the statistics of trainer and log-prob check; others get `trainer/` and their name.
TRAINER_TAGS = {
    "ratio_mean": "trained/ratio_mean",
    "ratio_max": "trained/ratio_max",
    "ratio_clipped_share": "trained/clipped_share",
    "kl": "trained/kl_generator",
    "ref_kl": "trained/kl_reference",
    "entropy": "trained/entropy",
    "grad_norm": "policy/grad_norm",
    "trained_tokens": TRAINED_TOKENS,
    "masked_tokens": "tokens/masked",
    "drifted_tokens": "tokens/drifted",
    "logprob_check_rows": "logprob_check/rows",
    "logprob_check_difference": "logprob_check/difference",
    "logprob_check_tolerance": "logprob_check/tolerance",
}

CODE = " " * 4  # begins each line of a code block in Markdown
WINDOW_GROUPS = 64  # the latest groups, of which a warning gives the share dropped
OF_EQUAL_REWARDS = ("solved", "equal_rewards")  # reasons of the filter equal_rewards
MEANINGS = {
    "solved": "the rewards within such a group are all equal, and every rollout is correct: "
    "the prompts are too easy, or reward.correct_at too low for the scale of the rewards",
    "equal_rewards": "the rewards within such a group are all equal, so they give no signal",
    "failed_reward": "reward code failed for a rollout of such a group",
}


def step_scalars(
    groups: Sequence[Group],
    stats: StepStats,
    dropped: Mapping[str, Sequence[Group]],
    seconds: Mapping[str, float],
    *,
    dropped_rollouts: Mapping[str, int] = MappingProxyType({}),
    oldest_version: int = 0,
    completions: Mapping[int, str] | None = None,
    answer_field: str | None = None,
    sources: Sequence[str] = (),
) -> StepMetrics:
    """Return the metrics of one step: (scalars by tag, histograms by tag, texts by tag).

    `groups`: those trained in this step, with rows and scores, at version `stats.version` - 1;
    tokens older than `oldest_version` were masked and count as untrained. `dropped`: groups dropped
    since the last step, by reason; `dropped_rollouts` those that stages of the recipe's own dropped
    one by one. Rewards, accuracy and lengths are over trained and dropped groups together: groups
    with equal rewards are dropped, so the accuracy of the trained ones stays near a half, however
    good the policy. Lengths and staleness are those of rows, one for each conversation of an
    episode. `seconds`: `step` (since the last step ended), `publish`, `wait/<executor>` and
    `publish/<kind>` where known. `completions`: decoded text of the rows chosen by `sample_rows`,
    shown beside the answer in `answer_field` of the prompt's row. If there are several `sources` of
    prompts, each has numbers of its own."""
    finished = [*groups, *(group for members in dropped.values() for group in members)]
    rows = [row for group in groups for row in group.sequences]
    all_rows = [row for group in finished for row in group.sequences]
    lengths = [row.num_generated for row in all_rows]
    staleness = token_staleness(rows, stats.version - 1, oldest_version)
    is_older = [
        any(s.version < oldest_version for r in g.sequences for s in r.spans) for g in groups
    ]
    num_rollouts = sum(len(group.rollouts) for group in groups)
    scalars: Scalars = {"rollouts/trained": num_rollouts, "groups/trained": len(groups)}
    scalars["groups/masked"] = sum(is_older)
    scores = [score for group in finished for score in group.scores.values()]
    rewards = np.array([score.reward for score in scores])
    scalars |= _scores(scores, rewards) | _accuracy(finished) | _lengths(all_rows, lengths)
    scalars["policy/entropy"] = -sum(row.logprob for row in all_rows) / max(1, sum(lengths))
    scalars |= _staleness(staleness, rows)
    for name, value in stats.scalars.items():
        scalars[name if "/" in name else TRAINER_TAGS.get(name, f"trainer/{name}")] = value
    scalars |= _pace(seconds, sum(lengths[: len(rows)]))
    scalars["dropped/groups"] = len(finished) - len(groups)
    scalars |= {f"dropped/{reason}": len(members) for reason, members in dropped.items()}
    scalars |= {f"dropped_rollouts/{reason}": count for reason, count in dropped_rollouts.items()}
    written = [numbers for group in finished for numbers in group.numbers.values()]
    scalars |= means(written, "columns/")  # by stages of the recipe's own
    episodes = [numbers for group in finished for numbers in group.episodes.values()]
    num_tokens = sum(row.num_tokens for row in all_rows)
    scalars |= episode_scalars(episodes, num_tokens, num_tokens - sum(lengths))
    if len(sources) > 1:
        scalars |= source_scalars(groups, finished, sources)
    samples = _samples(stats.version, groups, completions, answer_field) if completions else ""
    histograms: Histograms = {
        STALENESS_HISTOGRAM: dict(staleness.items()),
        "reward/values": count_values(rewards[~np.isnan(rewards)].tolist()),
        "length/tokens": count_values(lengths),
    }
    if stats.expert_loads:
        histograms[EXPERT_LOADS] = count_values(stats.expert_loads)
    return scalars, histograms, {"rollouts": samples} if samples else {}


def means(rows: Sequence[Mapping[str, float]], prefix: str = "") -> Scalars:
    """Return the mean of each name over the rows that have it; the prefix stands before each
    name."""
    names = sorted({name for numbers in rows for name in numbers})
    values = {name: [numbers[name] for numbers in rows if name in numbers] for name in names}
    return {f"{prefix}{name}": sum(found) / len(found) for name, found in values.items()}


def token_staleness(
    rows: Sequence[RolloutInfo], version: int, oldest_version: int = 0
) -> dict[int, int]:
    """Return the tokens by staleness when used at `version`; those before `oldest_version` are left
    out."""
    counts: Counter[int] = Counter()
    for row in rows:
        for span in row.spans:
            if span.version >= oldest_version:
                counts[version - span.version] += span.num_tokens
    return dict(sorted(counts.items()))


def _pace(seconds: Mapping[str, float], num_tokens: int) -> Scalars:
    """Return seconds by their tags, and the tokens per second of the step, if it is known."""
    found = {name if "/" in name else f"time/{name}_s": each for name, each in seconds.items()}
    return found | ({TOKENS_PER_S: num_tokens / seconds["step"]} if seconds.get("step") else {})


def tokens_per_s(steps: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the tokens per second of these steps together, or None where none of them says it."""
    pairs: list[Any] = [(step.get(TOKENS_PER_S), step.get(STEP_S)) for step in steps]
    sound = [pair for pair in pairs if all(isinstance(each, int | float) for each in pair)]
    whole_s = sum(seconds for _, seconds in sound)
    return sum(rate * seconds for rate, seconds in sound) / whole_s if whole_s > 0 else None


def sample_rows(groups: Sequence[Group], num_rows: int) -> list[int]:
    """Return row ids worth showing: one per group, alternating between its best and its worst."""
    num_rows = min(num_rows, len(groups))
    chosen = []
    for index in range(num_rows):
        group = groups[index * len(groups) // num_rows]
        scored = [score for score in group.scores.values() if score.has_reward]
        if scored:
            pick = max if index % 2 == 0 else min
            chosen.append(pick(scored, key=lambda score: score.reward).row_id)
    return chosen


def _scores(scores: list[StageResult], rewards: NDArray[np.float64]) -> Scalars:
    """Return the scalars of scores and rewards. `rewards` has the reward of each score, NaN where
    there is none."""
    failed = Counter(score.status for score in scores if score.status is not StageStatus.OK)
    scalars: Scalars = {f"reward_failures/{status.value}": failed[status] for status in FAILURES}
    if (found := np.flatnonzero(~np.isnan(rewards))).size:
        scalars["reward/mean"] = float(rewards[found].mean())
        scalars["reward/std"] = float(rewards[found].std())
    scalars |= means([scores[i].parts for i in found], "reward_parts/")
    return scalars | means([scores[i].extra for i in found], f"{EXTRA}/")


def _accuracy(groups: Sequence[Group]) -> Scalars:
    """Return the accuracy with its interval, in which rollouts of one group count as alike."""
    correct = [[s.correct for s in group.scores.values() if s.has_reward] for group in groups]
    correct = [of_group for of_group in correct if of_group]
    if not correct:
        return {}
    value, low, high = share_of([*map(sum, correct)], [*map(len, correct)])
    return {"accuracy/train": value, "accuracy/train_low": low, "accuracy/train_high": high}


def _lengths(rows: list[RolloutInfo], lengths: list[int]) -> Scalars:
    if not rows:
        return {}
    p50, p90 = np.percentile(lengths, [50, 90])
    truncated = sum(row.finish_reason is FinishReason.LENGTH for row in rows)
    return {
        "length/mean": sum(lengths) / len(lengths),
        "length/p50": float(p50),
        "length/p90": float(p90),
        "length/max": max(lengths),
        "length/truncated_share": truncated / len(rows),
    }


def _staleness(staleness: dict[int, int], rows: list[RolloutInfo]) -> Scalars:
    num_tokens = sum(staleness.values())
    scalars: Scalars = {TRAINED_TOKENS: num_tokens}
    if num_tokens:
        scalars["staleness/mean"] = sum(age * n for age, n in staleness.items()) / num_tokens
        scalars["staleness/max"] = max(staleness)
    if rows:
        num_mixed = sum(len({s.version for s in row.spans}) > 1 for row in rows if row.spans[1:])
        scalars["staleness/mixed_version_share"] = num_mixed / len(rows)
    return scalars


def count_values(values: Sequence[float]) -> dict[float, int]:
    """Return value -> how often; more than MAX_VALUES values as the middles of equal ranges."""
    counts = Counter(values)
    if len(counts) > MAX_VALUES:
        amounts, edges = np.histogram(np.array(values, dtype=np.float64), bins=MAX_VALUES)
        middles = (edges[:-1] + edges[1:]) / 2
        counts = Counter(dict(zip(middles.tolist(), amounts.tolist(), strict=True)))
    return {value: count for value, count in sorted(counts.items()) if count}


def _samples(
    step: int, groups: Sequence[Group], completions: Mapping[int, str], answer_field: str | None
) -> str:
    """Return the samples as Markdown; in code blocks, so that the model's own markup is not
    rendered."""
    parts = []
    for group in groups:
        answer = find_value(group.prompt.fields, answer_field or "")
        expected = "" if answer is None else f"\n\nExpected:\n\n{indent(str(answer), CODE)}"
        for row_id, score in group.scores.items():
            if row_id in completions:
                parts.append(
                    f"**Step {step}, row {row_id}**: {_describe(group.rollouts[row_id], score)}\n\n"
                    f"Prompt:\n\n{indent(group.prompt.text, CODE)}\n\n"
                    f"Completion:\n\n{indent(completions[row_id], CODE)}{expected}"
                )
    return "\n\n---\n\n".join(parts)


def _describe(row: RolloutInfo, score: StageResult) -> str:
    """Return words such as `reward 1.25 (exact 1, format 0.25), stop after 34 tokens, versions 3,
    4`."""
    parts = ", ".join(f"{name} {part:g}" for name, part in score.parts.items())
    reward = f"reward {score.reward:g}" + (f" ({parts})" if len(score.parts) > 1 else "")
    versions = ", ".join(str(span.version) for span in row.spans)
    finish = f"{row.finish_reason.value} after {row.num_generated} tokens"
    return f"{reward}, {finish}, version{'s' * (len(row.spans) > 1)} {versions}"


class Drops:
    """Counts the groups of one run, dropped and kept."""

    def __init__(self) -> None:
        self.total: Counter[str] = Counter()
        self._ready: set[int] = set()  # group ids
        self._rollouts: Counter[str] = Counter()
        self._current: dict[str, list[Group]] = defaultdict(list)
        self._window: deque[str | None] = deque(maxlen=WINDOW_GROUPS)  # None: not dropped
        self._latest: dict[str, Group] = {}
        self._warned: set[str] = set()

    @property
    def num_ready(self) -> int:
        """The number of groups worth training on that no step has taken yet."""
        return len(self._ready)

    @property
    def num_current(self) -> int:
        """The number of groups dropped since the last step."""
        return sum(map(len, self._current.values()))

    def add(self, group: Group, reason: str | None) -> None:
        """Count `group`, with the rollouts that stages dropped from it; `reason`: why it is dropped
        itself, None if it will be trained."""
        self._rollouts.update(group.dropped.values())
        self._window.append(reason)
        if reason is None:
            self._ready.add(group.group_id)
        else:
            self.total[reason] += 1
            self._current[reason].append(group)
            self._latest[reason] = group
            self._warn()

    def take(self, trained: Sequence[Group]) -> dict[str, list[Group]]:
        """Return the groups dropped since the last call, by reason, at a step that learnt from
        `trained`.

        Includes every reason met since the start, so that its curve falls back to 0."""
        self._ready.difference_update(group.group_id for group in trained)
        current, self._current = self._current, defaultdict(list)
        return {reason: current[reason] for reason in self.total}

    def take_rollouts(self) -> dict[str, int]:
        """Return the number of rollouts that stages dropped since the last call, by reason; every
        reason met since the start is there."""
        counts = dict(self._rollouts)
        self._rollouts = Counter(dict.fromkeys(counts, 0))
        return counts

    def _warn(self) -> None:
        """Warn, once per reason, when more than half of a window's groups were dropped."""
        counts = Counter(reason for reason in self._window if reason is not None)
        reason, count = counts.most_common(1)[0]
        if reason in self._warned or 2 * counts.total() <= WINDOW_GROUPS:
            return
        self._warned.add(reason)
        keeping = "algorithm.filters=[] keeps them; " if reason in OF_EQUAL_REWARDS else ""
        why = explain(reason, self._latest[reason])
        log.warning(
            f"{counts.total()} of the last {len(self._window)} groups were dropped, {count} of "
            f"them as {reason}: {why}. They train nothing, and others are written in their place "
            f"({keeping}algorithm.max_drops_in_row dropped groups in a row end the run)."
        )


def explain(reason: str, group: Group) -> str:
    """Return what `reason` means, with an example from `group`, which was dropped for it."""
    words = MEANINGS.get(reason, f"the group filter said {reason}")
    errors = [s.error for s in group.scores.values() if s.status is not StageStatus.OK]
    if errors:
        lines = errors[-1].strip().splitlines() or ["no message"]
        return f"{words} (the last error: {lines[-1]})"
    cut = [row.finish_reason is FinishReason.LENGTH for row in group.sequences]
    if 2 * sum(cut) > len(cut):
        words += f" ({sum(cut)} of the last one's {len(cut)} rollouts were cut at max_tokens)"
    return words


def in_words(counts: Mapping[str, int]) -> str:
    """Return counts in words: {"solved": 160, "equal_rewards": 20} -> "180: 160 solved, 20 equal
    rewards"."""
    parts = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    named = [f"{count:,} {reason.replace('_', ' ')}" for reason, count in parts]
    return f"{sum(counts.values()):,}: {', '.join(named)}"


TRAIN_LOSS, HELD_OUT_LOSS = "loss/train", "loss/held_out"
MOST_NATS = 50.0  # of a loss whose perplexity is shown
DEMONSTRATION_TAGS = {"loss": TRAIN_LOSS, "lr": "trainer/lr"}  # of the trainer's statistics
DEMONSTRATION_TAGS |= {k: TRAINER_TAGS[k] for k in ("entropy", "grad_norm", "trained_tokens")}


def perplexity(loss: float) -> float:
    """Return exp of a mean loss per token, in nats."""
    return math.exp(min(loss, MOST_NATS))


def demonstration_scalars(
    groups: Sequence[Group], stats: StepStats, seconds: Mapping[str, float]
) -> StepMetrics:
    """Return (scalars by tag, histograms by tag, no texts) of the step that learnt from `groups`.

    The loss is the mean over `tokens/trained`, which the assistant wrote; `tokens/context` are the
    others. `length/` counts whole demonstrations. `seconds` as for `step_scalars`."""
    rows = [row for group in groups for row in group.rollouts.values()]
    lengths = [row.num_prompt_tokens + row.num_tokens for row in rows]
    scalars = {tag: stats.scalars[name] for name, tag in DEMONSTRATION_TAGS.items()}
    scalars |= {name: value for name, value in stats.scalars.items() if "/" in name}
    scalars["perplexity/train"] = perplexity(scalars[TRAIN_LOSS])
    scalars["demonstrations/trained"] = len(rows)
    scalars["tokens/context"] = sum(lengths) - scalars[TRAINED_TOKENS]
    scalars["length/mean"], scalars["length/max"] = sum(lengths) / len(lengths), max(lengths)
    scalars |= _pace(seconds, sum(lengths))
    return scalars, {"length/tokens": count_values(lengths)}, {}


MAX_TOOLS = 3  # that are named in words
CALLS, SECONDS, ERRORS = "calls", "seconds", "errors"  # each by tool: "calls/search"


def episode_scalars(
    episodes: Sequence[Mapping[str, float]], num_tokens: int, num_observed: int
) -> dict[str, float]:
    """Return the scalars of the episodes finished in a step, trained and dropped ones, whose
    rollouts have this many tokens together, `num_observed` of them in observations."""
    if not episodes:
        return {}
    sums = Counter[str]()
    for numbers in episodes:
        sums.update(numbers)  # seconds too
    num_episodes, num_turns = len(episodes), sums["turns"]
    found = {
        "episode/turns": num_turns / num_episodes,
        "episode/environment_s": sums["environment_s"] / num_episodes,
        "episode/observed_share": num_observed / max(num_tokens, 1),
        "episode/malformed_calls": sums["malformed"],
        "episode/overlong_observations": sums["overlong"],
        "episode/restarts": sums["restarts"],
    }
    if sums["conversations"]:
        found["episode/conversations"] = sums["conversations"] / num_episodes
        for limit in EPISODE_LIMITS:
            found[f"episode/limited_{limit}"] = sums[f"limited/{limit}"]
    if sums["resumed"]:
        found["episode/kept_share"] = sums["kept"] / sums["resumed"]
    for name, num_calls in sorted(sums.items()):
        kind, _, tool = name.partition("/")
        if kind == CALLS and num_calls:
            found[f"tool_calls/{tool}"] = num_calls
            found[f"tool_s/{tool}"] = sums[f"{SECONDS}/{tool}"] / num_calls
            found[f"tool_errors/{tool}"] = sums[f"{ERRORS}/{tool}"]
    return found


def tools_in_words(scalars: Mapping[str, float]) -> str:
    """Return the tools that were called most, such as "search 1,204 calls of 1.25 s, 3 errors"; ""
    without calls."""
    head = "tool_calls/"
    calls = {tag.removeprefix(head): n for tag, n in scalars.items() if tag.startswith(head)}
    most = sorted(calls, key=lambda tool: -calls[tool])
    words = []
    for tool in most[:MAX_TOOLS]:
        seconds, num_errors = scalars[f"tool_s/{tool}"], scalars[f"tool_errors/{tool}"]
        of_each = f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1000:,.1f} ms"
        plural = "" if num_errors == 1 else "s"
        errors = f", {num_errors:,.0f} error{plural}" if num_errors else ""
        words.append(f"{tool} {calls[tool]:,.0f} calls of {of_each}{errors}")
    words += [f"{len(most) - MAX_TOOLS} more"] * (len(most) > MAX_TOOLS)
    return "; ".join(words)


GROUPS, DROPPED, REWARD, LENGTH = (
    f"source_{name}" for name in ("groups", "dropped_share", "reward", "length")
)
SOURCE_TAGS = tuple(f"{name}/" for name in (GROUPS, DROPPED, REWARD, LENGTH))  # their beginnings


def source_scalars(
    trained: Sequence[Group], finished: Sequence[Group], names: Sequence[str]
) -> dict[str, float]:
    """Return the scalars of each source by tag, over all groups `finished` in a step, those
    `trained` and those dropped; a source without groups is left out."""
    kept = {group.group_id for group in trained}
    scalars: dict[str, float] = {}
    for source, name in enumerate(names):
        groups = [group for group in finished if group.prompt.source == source]
        if not groups:
            continue
        scalars[f"{GROUPS}/{name}"] = len(groups)
        num_dropped = sum(group.group_id not in kept for group in groups)
        scalars[f"{DROPPED}/{name}"] = num_dropped / len(groups)
        scores = [score for group in groups for score in group.scores.values()]
        rewards = [score.reward for score in scores if score.has_reward]
        lengths = [row.num_generated for group in groups for row in group.sequences]
        for tag, values in ((REWARD, rewards), (LENGTH, lengths)):
            if values:
                scalars[f"{tag}/{name}"] = sum(values) / len(values)
    return scalars


def sum_sources(steps: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return by source, over the steps of a run: its groups, the share of them that was dropped,
    and the mean reward and length, each step weighted by the source's groups in it."""
    found: dict[str, dict[str, float]] = {}
    names = {tag.partition("/")[2] for step in steps for tag in step if tag.startswith(GROUPS)}
    for name in sorted(names):
        tag = f"{GROUPS}/{name}"
        counts = [(step, step[tag]) for step in steps if isinstance(step.get(tag), int | float)]
        found[name] = {"groups": float(sum(count for _, count in counts))}
        for tag in (DROPPED, REWARD, LENGTH):
            own = f"{tag}/{name}"
            pairs = [(s[own], n) for s, n in counts if isinstance(s.get(own), int | float)]
            if total := sum(number for _, number in pairs):
                mean = sum(value * number for value, number in pairs) / total
                found[name][tag.removeprefix("source_")] = mean
    return found
