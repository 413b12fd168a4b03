"""The metrics of a step's episodes: turns, calls by tool, what was observed and waited for.

Owns: which numbers of episodes make which metrics, and those of tools in words. Does not own: the
numbers themselves, which the environment's executor counts. Invariant: a step without episodes has
none of these metrics.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

MAX_TOOLS = 3  # that are named in words
CALLS, SECONDS, ERRORS = "calls", "seconds", "errors"  # each by tool: "calls/search"


def episode_scalars(
    episodes: Sequence[Mapping[str, float]], num_tokens: int, num_observed: int
) -> dict[str, float]:
    """Of the episodes finished in a step, trained and dropped ones, whose rollouts have this many
    tokens together, `num_observed` of them of observations."""
    if not episodes:
        return {}
    sums: dict[str, float] = defaultdict(int)
    for numbers in episodes:
        for name, value in numbers.items():
            sums[name] += value
    num_episodes, num_turns = len(episodes), sums["turns"]
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


def tools_in_words(scalars: Mapping[str, float]) -> str:
    """The tools that were called most, such as "search 1,204 calls of 1.25 s, 3 errors"; "" without
    calls."""
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
