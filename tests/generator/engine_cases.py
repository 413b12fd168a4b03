"""What one case of the engine's random search is about: sizes, prompts, requests."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from llamarl.core.config import EmbeddedConfig
from llamarl.core.records import Prompt, Request, Sampling
from llamarl.generator.engine.engine import EmbeddedEngine
from tests.generator.engine_models import VARIANTS, record_steps

EPISODE = Prompt(prompt_id=0, text="", token_ids=(1,))
VOCABULARIES = (96, 97, 61, 7, 64, 33)
"""Whole blocks of the draw, one more, one less, hardly any tokens."""
ARCHITECTURES = {
    name: replace(architecture, vocab_size=size)
    for size, (name, architecture) in zip(VOCABULARIES, VARIANTS.items(), strict=True)
}


def as_letters(ids: Sequence[int]) -> str:
    return "".join("abcde"[i % 5] for i in ids)


def as_bytes(ids: Sequence[int]) -> str:
    """Some characters are two tokens."""
    return bytes(b"\xc3\xa9\xa8ab"[i % 5] for i in ids).decode(errors="replace")


def without_special(ids: Sequence[int]) -> str:
    """Most tokens are special ones, which have no text."""
    return "".join("ab"[i % 16] for i in ids if i % 16 < 2)


TEXTS = {
    as_letters: ("e", "ab", "dca"),
    as_bytes: ("é", "ab", "aéb", "èa"),
    without_special: ("b", "ab", "aa"),
}


@dataclass(kw_only=True)
class Options:
    """What one case is about, in small numbers."""

    variant: str
    context: int
    slots: int
    quantization: str
    recomputes: bool
    runner: str
    decode_text: Callable[[Sequence[int]], str]
    alternates: bool  # between two weight memories; else one is overwritten at each commit
    prompts: list[tuple[int, ...]]

    @classmethod
    def draw(cls, rng: random.Random) -> Options:
        context = rng.choice([2, 3, 9, 17, 33, 48])
        variant = rng.choice([*ARCHITECTURES])
        tokens = range(ARCHITECTURES[variant].vocab_size)
        found = []
        for _ in range(rng.randint(1, 4)):
            shared = rng.choice(found) if found and rng.random() < 0.6 else ()
            ids = (*shared[: rng.randint(0, context)], *rng.choices(tokens, k=context))
            found.append(ids[: min(rng.randint(1, context - 1), rng.randint(1, 40))])
        return cls(
            variant=variant,
            context=context,
            slots=rng.randint(1, 5),
            quantization=rng.choice(["none", "none", "none", "int8"]),
            recomputes=rng.random() < 0.5,
            runner=rng.choice(["eager", "padded", "recorded"]),
            decode_text=rng.choice([*TEXTS]),
            alternates=rng.random() < 0.5,
            prompts=found,
        )

    @property
    def engine_runs_ahead(self) -> bool:
        return self.runner != "eager"

    def engine(self) -> EmbeddedEngine:
        config = EmbeddedConfig(
            max_num_seqs=self.slots,
            max_model_len=self.context,
            dtype="float32",
            quantization=self.quantization,
            kv_after_commit="recompute" if self.recomputes else "keep",
        )
        engine = EmbeddedEngine(
            ARCHITECTURES[self.variant],
            config,
            is_padded=self.engine_runs_ahead,
            decode_text=self.decode_text,
        )
        if self.runner == "recorded":
            record_steps(engine)
        return engine

    def request(self, rng: random.Random, row_id: int, version: int) -> Request:
        tokens = range(ARCHITECTURES[self.variant].vocab_size)
        stop_ids = rng.sample(tokens, min(rng.choice([0, 0, 0, 1, 2, 20]), len(tokens)))
        texts = rng.sample(TEXTS[self.decode_text], 1) if rng.random() < 0.3 else ()
        sampling = Sampling(
            temperature=rng.choice([0.0, 0.01, 0.3, 1.0, 1.0, 1.5, 20.0]),
            top_k=rng.choice([0, 0, 1, 4, 200]),
            top_p=rng.choice([1.0, 1.0, 1e-3, 0.5, 0.9]),
            max_tokens=rng.choice([1, 2, 5, 13, 40, 40]),
            stop_token_ids=tuple(stop_ids),
            stop_strings=tuple(texts),
        )
        replay_tokens = rng.randint(1, 12) if rng.random() < 0.1 else 0
        if replay_tokens:
            sampling = replace(sampling, stop_token_ids=(), stop_strings=())
        return Request(
            row_id=row_id,
            prompt_ids=rng.choice(self.prompts),
            sampling=sampling,
            seed=rng.randrange(2**53),
            min_version=max(version, 0) + rng.choice([-3, 0, 0, 0, 0, 0, 1, 2]),
            segment_tokens=rng.choice([0, 0, 0, 0, 1, 2, 5]),
            step=rng.randint(0, 1),
            replay_tokens=replay_tokens,
            prompt=EPISODE if rng.random() < 0.4 else None,
        )
