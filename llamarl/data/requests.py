"""From an admitted group to the requests a generator gets. Invariant: a pure function; the same
group after a resume asks for the same rollouts."""

from __future__ import annotations

from llamarl.data.seeds import rollout_seed
from llamarl.types import Group, Request, Sampling


def make_requests(
    group: Group, *, sampling: Sampling, seed: int, segment_tokens: int
) -> list[Request]:
    """One request per row of `group`, alike but for row id and seed."""
    return [
        Request(
            row_id=row_id,
            prompt_ids=group.prompt.token_ids,
            sampling=sampling,
            seed=rollout_seed(seed, group.prompt, index),
            min_version=group.min_version,
            segment_tokens=segment_tokens,
        )
        for index, row_id in enumerate(group.row_ids)
    ]
