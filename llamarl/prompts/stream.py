"""The order of prompts over sources and epochs, from which a run can resume, and the requests of a
group."""

from __future__ import annotations

import base64
import hashlib
import math
import zlib
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from llamarl.core.files import parse, read_bytes
from llamarl.core.groups import Group
from llamarl.core.records import SOURCE_ROWS, Prompt, Request, Sampling
from llamarl.storage.archive import is_kept


@dataclass
class SourceWalk:
    """A walk goes over the `size` prompts from the place `first` on, epoch after epoch. It counts
    the places passed and, of those, the prompts handed out."""

    first: int
    size: int
    share: float
    name: str
    num_passed: int = 0
    num_drawn: int = 0
    _order: tuple[int, np.ndarray] = (-1, np.empty(0))

    def pass_next(self, seed: int, *, shuffle: bool) -> tuple[int, int]:
        """Pass the next prompt; return its (epoch, place)."""
        epoch, place = divmod(self.num_passed, self.size)
        self.num_passed += 1
        if not shuffle:
            return epoch, self.first + place
        if epoch != self._order[0]:
            # Sorts raw PCG64 words: numpy guarantees their stream, so a run can resume under
            # another version of numpy. It does not guarantee that of `Generator.permutation`.
            digest = hashlib.sha256(f"{seed} {epoch}{self.name}".encode()).digest()
            words = np.random.PCG64(int.from_bytes(digest)).random_raw(self.size)
            self._order = epoch, np.argsort(words, kind="stable")
        return epoch, self.first + int(self._order[1][place])


class PromptStream(Iterator[Prompt]):
    """Hands out prompts, each one once per epoch, with `Prompt.epoch` set.

    With `weights`, each of the sources is walked on its own: next comes a prompt of the source that
    is furthest behind its share. Without, all are walked as one. `prompts` are in the order of
    their ids.
    `position` counts the prompts drawn. With `shuffle`, each epoch's order is drawn from (seed,
    epoch) alone; else it is file order. It ends after `num_epochs` times as many prompts as there
    are, which `limit` says; 0: never.

    With a `repeat_share` below 1, a prompt without a signal, as `learn` says, comes in a later
    epoch with this probability alone.

    Of the share `keep` of them all, `Prompt.is_kept` is set. `first` lists (epoch, prompt_id) of
    prompts to hand out before. `identity` is saved with the state: what must be equal in a run that
    resumes from it. `walks` and `silent` are those of a state, `position` stands for the walks of a
    stream without weights. ValueError if they do not fit the prompts, or if `first` names an
    unknown prompt.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        shuffle: bool,
        keep: float = 0.0,
        weights: Sequence[float] = (),
        num_epochs: float = 0.0,
        repeat_share: float = 1.0,
        position: int = 0,
        walks: Sequence[Sequence[int]] = (),
        silent: str = "",
        first: Sequence[tuple[int, int]] = (),
        identity: Mapping[str, object] | None = None,
    ) -> None:
        self.num_prompts = len(prompts)
        self._prompts, self._seed, self._shuffle, self._keep = prompts, seed, shuffle, keep
        self._identity = dict(identity or {})
        self._repeat_share = repeat_share
        self.limit = f"num_epochs={num_epochs:g}" if num_epochs else ""
        self._most = math.ceil(num_epochs * self.num_prompts) if num_epochs else math.inf
        self._walks = [SourceWalk(0, len(prompts), 1.0, "")]
        if weights:
            starts = [_place(prompts, source * SOURCE_ROWS) for source in range(len(weights) + 1)]
            self._walks = [
                SourceWalk(start, stop - start, weight / sum(weights), f" {source}")
                for source, (start, stop, weight) in enumerate(
                    zip(starts, starts[1:], weights, strict=False)
                )
            ]
        for walk, counts in zip(self._walks, walks or [(position, position)], strict=False):
            walk.num_passed, walk.num_drawn = counts
        if walks and len(walks) != len(self._walks):
            must = f"list {len(self._walks)} walks, one per weight of data.weights or one"
            raise ValueError(f"the state must {must}, got {len(walks)}")
        self._silent = _unpack(silent, self.num_prompts) if repeat_share < 1 else None
        self._num_skipped = 0
        self._first = deque(self._drawn(self._find(prompt_id), epoch) for epoch, prompt_id in first)

    @property
    def position(self) -> int:
        """Prompts drawn so far, also before a resume; not those of `first`."""
        return sum(walk.num_drawn for walk in self._walks)

    @property
    def num_left(self) -> float:
        """Prompts that will come at most; infinity without an end."""
        return len(self._first) + max(0, self._most - self._num_passed)

    @property
    def is_exhausted(self) -> bool:
        """Whether no other prompt will come."""
        return self.num_left == 0

    def __next__(self) -> Prompt:
        if self._first:
            return self._first.popleft()
        while not self.is_exhausted:
            next_position = self.position + 1  # comes the walk that misses most of its share then
            walk = max(self._walks, key=lambda each: each.share * next_position - each.num_drawn)
            epoch, place = walk.pass_next(self._seed, shuffle=self._shuffle)
            if self._is_skipped(epoch, place):
                self._num_skipped += 1
                continue
            walk.num_drawn += 1
            return self._drawn(place, epoch)
        raise StopIteration

    def learn(self, prompt: Prompt, *, has_signal: bool) -> None:
        """Note whether the latest group of a prompt had a signal."""
        if self._silent is not None:
            self._silent[self._find(prompt.prompt_id)] = not has_signal

    def take_metrics(self) -> dict[str, float]:
        """Return the epochs walked and, with a curriculum, the prompts passed over since the last
        call, and those without a signal."""
        found = {"prompts/epoch": self._num_passed / self.num_prompts}
        if self._silent is not None:
            found["prompts/skipped"] = self._num_skipped
            found["prompts/without_signal"] = int(self._silent.sum())
            self._num_skipped = 0
        return found

    def state(self) -> dict[str, object]:
        """Return what a checkpoint saves. With the gate's open groups it names every prompt that
        was drawn and not yet trained, so a run may be killed at any time, also right after a
        resume."""
        state: dict[str, object] = {
            "position": self.position,
            "walks": [[walk.num_passed, walk.num_drawn] for walk in self._walks],
            "backlog": [[prompt.epoch, prompt.prompt_id] for prompt in self._first],
            "identity": self._identity,
        }
        if self._silent is not None:
            packed = zlib.compress(np.packbits(self._silent).tobytes())
            state["silent"] = base64.b64encode(packed).decode()
        return state

    @property
    def _num_passed(self) -> int:
        return sum(walk.num_passed for walk in self._walks)

    def _is_skipped(self, epoch: int, place: int) -> bool:
        if self._silent is None or not self._silent[place]:
            return False
        digest = hashlib.sha256(f"{self._seed} {epoch} {place} repeat".encode()).digest()
        return int.from_bytes(digest[:8]) >= self._repeat_share * 2**64

    def _find(self, prompt_id: int) -> int:
        place = _place(self._prompts, prompt_id)
        if place < len(self._prompts) and self._prompts[place].prompt_id == prompt_id:
            return place
        raise ValueError(f"open prompts must be among data.prompts, got line {prompt_id}")

    def _drawn(self, place: int, epoch: int) -> Prompt:
        prompt = replace(self._prompts[place], epoch=epoch)
        return replace(prompt, is_kept=is_kept(prompt, self._keep, self._seed))


def _place(prompts: Sequence[Prompt], prompt_id: int) -> int:
    """Return the place of the first prompt with this id or a later one."""
    return bisect_left(prompts, prompt_id, key=lambda prompt: prompt.prompt_id)


def _unpack(text: str, count: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return a bool per prompt; all False for an empty text. ValueError for a text that no state
    has."""
    if not text:
        return np.zeros(count, bool)
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), count)
        bits = np.unpackbits(np.frombuffer(data, np.uint8), count=count)
    except (ValueError, zlib.error) as error:
        must = "hold a bit for each prompt of data.prompts"
        raise ValueError(f"silent of the state must {must}, got {text!r:.40}: {error}") from None
    if len(data) != (count + 7) // 8:
        raise ValueError(f"silent of the state must have {count} bits, got {8 * len(data)}")
    return bits.astype(bool)


def make_requests(
    group: Group,
    *,
    sampling: Sampling,
    seed: int,
    segment_tokens: int,
    replay_lengths: Sequence[int] = (),
    has_turns: bool = False,
) -> list[Request]:
    """Return a request per row of `group`, alike but for row id and seed; with `has_turns`, of
    episodes.

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
    """Return the 53-bit seed of rollout `index` of `prompt`: the same after a resume and on any
    replica; no wider, because the float64 column `sampling` must hold it exactly."""
    key = f"{run_seed}/{prompt.epoch}/{prompt.prompt_id}/{index}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 11


def read_lengths(path: str | Path, max_tokens: int) -> list[int]:
    """Return the lengths to replay; ValueError unless they are whole numbers from 1 to
    `max_tokens`."""
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
