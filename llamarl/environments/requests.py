"""From an admitted group to the requests a generator gets.

Owns: the requests, their seeds, replayed lengths. Does not own: the dispatch to replicas.
Invariant: pure functions; the same group after a resume asks for the same rollouts.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llamarl.groups import Group
from llamarl.json_file import parse, read_bytes
from llamarl.types import Prompt, Request, Sampling


def make_requests(
    group: Group,
    *,
    sampling: Sampling,
    seed: int,
    segment_tokens: int,
    replay_lengths: Sequence[int] = (),
    has_turns: bool = False,
) -> list[Request]:
    """One request per row of `group`, alike but for row id and seed; with `has_turns`, of episodes.

    With `replay_lengths`, rollout i of group g writes exactly as many tokens as entry g * n + i,
    modulo their number, says: stop ids and stop strings are off. `max_tokens` stays,
    so that dispatch knows no more of a length than of one that the model chooses.
    """
    lengths = replay_lengths or [0]
    if replay_lengths:
        sampling = replace(sampling, stop_token_ids=(), stop_strings=())
    first = group.group_id * len(group.row_ids)
    return [
        Request(
            row_id=row_id,
            prompt_ids=group.prompt.token_ids,
            sampling=sampling,
            seed=rollout_seed(seed, group.prompt, index),
            min_version=group.min_version,
            segment_tokens=segment_tokens,
            step=group.step,
            replay_tokens=lengths[(first + index) % len(lengths)],
            prompt=group.prompt if has_turns else None,
        )
        for index, row_id in enumerate(group.row_ids)
    ]


def rollout_seed(run_seed: int, prompt: Prompt, index: int) -> int:
    """53-bit seed of rollout `index` of `prompt`: the same after a resume and on any replica.

    No wider, because the float64 column `sampling` must hold it exactly.
    """
    key = f"{run_seed}/{prompt.epoch}/{prompt.prompt_id}/{index}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 11


def read_lengths(path: str | Path, max_tokens: int) -> list[int]:
    """The lengths to replay; ValueError unless they are whole numbers from 1 to `max_tokens`."""
    try:
        lengths = parse(read_bytes(Path(path)))
    except ValueError as error:
        raise ValueError(
            f"sampling.replay_lengths must be a JSON file with a list of lengths, got {error}"
        ) from error
    if not isinstance(lengths, list):
        raise ValueError(f"{path} must hold a list of lengths, got {type(lengths).__name__}")
    wrong = [n for n in lengths if type(n) is not int or not 1 <= n <= max_tokens]
    if wrong or not lengths:
        must = f"{path} must list lengths from 1 to sampling.max_tokens ({max_tokens})"
        raise ValueError(f"{must}, got {[*wrong, 'none'][0]}")
    return lengths
