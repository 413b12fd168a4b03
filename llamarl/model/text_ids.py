"""The ids of a text that continues another one, and bounds on the time and memory of templates and
tokenizers."""

from __future__ import annotations

import functools
import json
import re
import resource
import signal
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from jinja2 import Environment
from tokenizers import Tokenizer as Backend

MARK = "\ufdd0"  # of no character: Unicode keeps it for programs
BOTH = (False, True)
NOTHING = {"type": "Sequence", "normalizers": []}  # a normalizer that changes nothing


class TextIds:
    """Ids of texts by a tokenizer of the tokenizers library, whose own settings stay as they
    are."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._special = {token.content: (i, token) for i, token in added.items() if token.special}
        self._pattern = _any_of(self._special)
        splits = "normalized" not in self._blanks
        self._borders = tuple(i.content for i in added.values() if splits or not i.normalized)
        """The tokens behind which a tokenizer that puts a blank before each text begins a new
        one."""
        plain = [text for text in self._borders if text not in self._special]
        self._border = {is_text: _any_of(plain if is_text else self._borders) for is_text in BOTH}
        bare, whole = (self._encode(["1"], special=each)[0] for each in BOTH)
        starts = range(len(whole) - len(bare) + 1)
        first = next((i for i in starts if whole[i : i + len(bare)] == bare), 0)
        self._leading = whole[:first]
        """The ids that the tokenizer puts before a text."""

    def encode_all(
        self, texts: Sequence[str], *, special: bool, before: Sequence[str] = ()
    ) -> list[list[int]]:
        """Return the ids of each text, which continues `before`, or begins if that is "". `special`
        puts the tokenizer's leading ids before a text, unless they are there; nothing is put behind
        it, as a model goes on from there."""
        before = before or [""] * len(texts)
        found: list[list[int]] = [[] for _ in texts]
        batches: dict[bool, list[int]] = {False: [], True: []}  # those that go on: their places
        for i, (text, prior) in enumerate(zip(texts, before, strict=True)):
            goes_on = self._goes_on(prior)
            if MARK in text:
                found[i] = self._marked_ids(text, prior)
            elif goes_on and self._blanks != {"first"}:
                found[i] = self._ids_behind(text)
            else:
                batches[goes_on].append(i)
        for goes_on, places in batches.items():
            some = self._encode([texts[i] for i in places], goes_on=goes_on)
            for i, ids in zip(places, some, strict=True):
                found[i] = ids
        if not special:
            return found
        num = len(self._leading)
        return [ids if ids[:num] == self._leading else [*self._leading, *ids] for ids in found]

    def mark(self, value: Any, tokens: Collection[str]) -> Any:
        """Return `value`, a text or lists and mappings of texts, with each of these special tokens
        marked in its texts and keys."""
        if isinstance(value, str):
            value = unmarked(value)
            return self._pattern.sub(
                lambda found: _marked(found[0]) if found[0] in tokens else found[0], value
            )
        if isinstance(value, list | tuple):
            return [self.mark(each, tokens) for each in value]
        if isinstance(value, dict):
            return {self.mark(key, tokens): self.mark(each, tokens) for key, each in value.items()}
        return value

    def _marked_ids(self, text: str, before: str) -> list[int]:
        """Return the ids of a text with marks: the text between two special tokens is encoded as if
        there were no special tokens."""
        ids: list[int] = []
        at = 0
        found = [*self._pattern.finditer(text)]
        for i, match in enumerate([*found, None]):
            part = text[at : len(text) if match is None else match.start()]
            part = unmarked(part)
            if i and self._special[found[i - 1][0]][1].rstrip:
                part = part.lstrip()
            if match is not None and self._special[match[0]][1].lstrip:
                part = part.rstrip()
            if part:
                if self._goes_on(before + text[:at]):
                    ids += self._ids_behind(part, is_text=True)
                else:
                    ids += self._encode([part], is_text=True)[0]
            if match is not None:
                ids.append(self._special[match[0]][0])
                at = match.end()
        return ids

    def _ids_behind(self, text: str, *, is_text: bool = False) -> list[int]:
        """Return the ids of a text that continues another one, up to the first token in it behind
        which a new text begins."""
        border = self._border[is_text].search(text) if self._blanks != {"first"} else None
        end = len(text) if border is None else border.start()
        ids = self._encode([text[:end]], goes_on=True, is_text=is_text)[0]
        return [*ids, *self._encode([text[end:]], is_text=is_text)[0]] if end < len(text) else ids

    def _goes_on(self, before: str) -> bool:
        """Return whether a text behind `before` gets other ids than one that begins."""
        kinds = self._blanks
        if not before or not kinds:
            return False
        return kinds == {"first"} or not before.endswith(self._borders)

    @functools.cached_property
    def _blanks(self) -> set[str]:
        """The places where the tokenizer puts a blank before a text: "first", before the first one;
        "always", also behind a token that was added to its vocabulary; "normalized", before
        normalised text, which may hold such tokens. It is empty for a tokenizer that puts none."""
        parts = [self._backend.normalizer, self._backend.pre_tokenizer]
        found: set[str] = set()
        for part in parts:
            if part is not None:
                _without_blanks(json.loads(part.__getstate__()), found)
        return found

    def _encode(
        self,
        texts: Sequence[str],
        *,
        special: bool = False,
        goes_on: bool = False,
        is_text: bool = False,
    ) -> list[list[int]]:
        """Return the ids of these texts: with a blank before each as the tokenizer has it, or, if
        they `goes_on`, without; with special tokens by their own ids, or, with `is_text`, by those
        of their characters."""
        if not texts:
            return []
        backend = self._variant(goes_on, is_text) if goes_on or is_text else self._backend
        found = backend.encode_batch([*texts], add_special_tokens=special)
        return [each.ids for each in found]

    @functools.lru_cache(maxsize=4)  # noqa: B019 - one set of ids lives as long as its tokenizer
    def _variant(self, goes_on: bool, is_text: bool) -> Backend:
        values = json.loads(self._backend.to_str())
        if goes_on:
            for key in ("normalizer", "pre_tokenizer"):
                values[key] = _without_blanks(values[key], set())
        backend = Backend.from_str(json.dumps(values))
        backend.encode_special_tokens = is_text
        return backend


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
    """Return a pattern that finds any of these texts, the longest that stands there."""
    return re.compile("|".join(sorted(map(re.escape, texts), key=len, reverse=True)) or r"(?!)")


def unmarked(text: str) -> str:
    """Return the text without marks, as it is read."""
    return text.replace(MARK, "")


def _marked(token: str) -> str:
    return token[0] + MARK + token[1:]


def _without_blanks(part: Any, found: set[str]) -> Any:
    """Return a normalizer or pre-tokenizer, as in tokenizer.json, without the parts that put a
    blank before a text; where they put it (see `TextIds._blanks`) is added to `found`."""
    if isinstance(part, list):
        return [_without_blanks(each, found) for each in part]
    if not isinstance(part, dict):
        return part
    match part:
        case {"type": "Metaspace", "prepend_scheme": "first" | "always" as scheme}:
            found.add(scheme)
            return part | {"prepend_scheme": "never"}
        case {"type": "ByteLevel", "add_prefix_space": True}:
            found.add("always")
            return part | {"add_prefix_space": False}
        case {"type": "Prepend"}:
            found.add("normalized")
            return NOTHING
    return {key: _without_blanks(each, found) for key, each in part.items()}


TIME_S = 10.0
MEMORY_BYTES = 1024**3  # beyond what the process has
MOST_CHARS = 2**24  # of a rendered conversation: tokens of more would take minutes
MOST_GROWTH = 10_000  # of a text, by rules of a tokenizer; by those of real ones about 2
STATISTICS = Path("/proc/self/statm")


@contextmanager
def bounded() -> Iterator[None]:
    """Run the block with bounds. Raises TimeoutError if it takes over TIME_S (in the main thread,
    which alone can be interrupted), MemoryError if it needs over MEMORY_BYTES (on Linux)."""
    is_main = threading.current_thread() is threading.main_thread()
    now, most = limits = resource.getrlimit(resource.RLIMIT_AS)
    if STATISTICS.exists():
        num_pages = int(STATISTICS.read_text().split()[0])
        wanted = num_pages * resource.getpagesize() + MEMORY_BYTES
        less = wanted if now == resource.RLIM_INFINITY else min(wanted, now)
        resource.setrlimit(resource.RLIMIT_AS, (less, most))
    before = signal.signal(signal.SIGALRM, _raise) if is_main else None
    try:
        if is_main:
            signal.setitimer(signal.ITIMER_REAL, TIME_S)
        yield
    finally:
        if is_main:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def has_powers(template: str) -> bool:
    """Return whether a chat template raises numbers to powers. No template needs that, and one such
    step may take for ever, which no signal ends. `**` before keywords of a call is none."""
    before = ""
    for _, kind, text in Environment().lex(template) if "**" in template else ():
        if kind == "operator" and text == "**" and before not in ("(", ","):
            return True
        before = before if kind == "whitespace" else text
    return False


def growth(rules: Any) -> float:
    """Return how many times as long a text can become by the Replace rules of a normalizer or
    decoder, as tokenizer.json holds it. The library that applies them ends the process if memory
    runs out."""
    times, waiting = 1.0, [rules]
    while waiting:
        rule = waiting.pop()
        if not isinstance(rule, dict):
            continue
        for name in ("normalizers", "decoders"):  # of a Sequence
            waiting += some if isinstance(some := rule.get(name), list) else []
        pattern, content = rule.get("pattern"), rule.get("content")
        if rule.get("type") == "Replace" and isinstance(content, str):
            found = pattern.get("String") if isinstance(pattern, dict) else None
            # A regular expression may match between two characters; an empty text does.
            width = len(found) if isinstance(found, str) else 0
            times *= max(1.0, len(content) / width) if width else 1 + len(content)
    return times


def _raise(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"it took over {TIME_S:g} s")
