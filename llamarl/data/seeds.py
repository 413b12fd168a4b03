"""Seeds of rollouts. Invariant: a seed depends on what is asked, not on when or where it runs."""

from __future__ import annotations

import hashlib

from llamarl.types import Prompt


def rollout_seed(run_seed: int, prompt: Prompt, index: int) -> int:
    """53-bit seed of rollout `index` of `prompt`: the same after a resume and on any replica.

    No wider, because the float64 column `sampling` must keep it exactly.
    """
    key = f"{run_seed}/{prompt.epoch}/{prompt.prompt_id}/{index}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 11
