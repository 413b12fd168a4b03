"""The metrics of a step's episodes: turns, calls by tool, what was observed and waited for.

Owns: which numbers of episodes make which metrics. Does not own: the numbers themselves, which the
environment's executor counts. Invariant: a step without episodes has none of these metrics.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from llamarl.types import RolloutInfo

CALLS, SECONDS, ERRORS = "calls", "seconds", "errors"  # each by tool: "calls/search"


def episode_scalars(
    episodes: Sequence[Mapping[str, float]], rows: Sequence[RolloutInfo]
) -> dict[str, float]:
    """Of the episodes finished in a step, trained and dropped ones, whose rollouts are `rows`."""
    if not episodes:
        return {}
    sums: Counter[str] = Counter()
    for numbers in episodes:
        sums.update(numbers)
    num_episodes, num_turns = len(episodes), sums["turns"]
    num_tokens = sum(row.num_tokens for row in rows)
    num_observed = num_tokens - sum(row.num_generated for row in rows)
    found = {
        "episode/turns": num_turns / num_episodes,
        "episode/environment_s": sums["environment_s"] / num_episodes,
        "episode/observed_share": num_observed / max(num_tokens, 1),
        "episode/malformed_calls": sums["malformed"],
        "episode/overlong_observations": sums["overlong"],
        "episode/restarts": sums["restarts"],
    }
    if sums["resumed"]:
        found["episode/kept_share"] = sums["kept"] / sums["resumed"]
    for name, num_calls in sorted(sums.items()):
        kind, _, tool = name.partition("/")
        if kind == CALLS and num_calls:
            found[f"tool_calls/{tool}"] = num_calls
            found[f"tool_s/{tool}"] = sums[f"{SECONDS}/{tool}"] / num_calls
            found[f"tool_errors/{tool}"] = sums[f"{ERRORS}/{tool}"]
    return found
