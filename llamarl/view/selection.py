"""Which kept rollouts of a run are shown, if they are too many for one page.

Owns: finding them in the archive, and the choice. Does not own: what a line must say
(`kept_line.py`), or the page. Invariant: what is shown together is chosen together: the
rollouts of a group, and those of a held-out prompt under all versions that were evaluated.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamarl.view.kept_line import read_kept

log = logging.getLogger(__name__)

KEPT_FILES = "archive/kept-*.jsonl"
MOST_NAMED = 10  # damaged lines; more are only counted
SHRINK = 0.98  # from one try to the next


@dataclass(frozen=True, slots=True)
class KeptPlace:
    """Where the line of a rollout begins, and what the choice needs of it."""

    path: Path
    byte: int
    together: tuple[bool, int, int]
    """(held out, step or prompt, group): equal for what is shown together, in order."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Selection:
    """What is shown, and of how many rollouts."""

    places: list[KeptPlace]
    num_found: int


def find_places(run_dir: Path) -> tuple[list[KeptPlace], int]:
    """All kept rollouts of a run, and how many lines are damaged: these are skipped, the first ones
    with a warning. So is a line that a killed process left unfinished, without one. ValueError if
    no rollout is found."""
    if not run_dir.is_dir():
        raise ValueError(f"RUN must be the folder of a run, got {run_dir}")
    places: list[KeptPlace] = []
    num_damaged = 0
    for path in sorted(filter(Path.is_file, run_dir.glob(KEPT_FILES))):
        byte = 0
        with path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                try:
                    places.append(_kept_place(path, byte, len(text), read_kept(text)))
                except ValueError as error:
                    if text.endswith(b"\n"):
                        num_damaged += 1
                        if num_damaged <= MOST_NAMED:
                            log.warning("%s:%d is not shown: %s", path, number, error)
                byte += len(text)
    if not places:
        must = "be the folder of a run that kept rollouts (experience.keep_rollouts above 0, or an "
        got = f"{num_damaged} damaged lines" if num_damaged else "none"
        raise ValueError(f"RUN must {must}evaluation), got {got} in {run_dir}/{KEPT_FILES}")
    return places, num_damaged


def _kept_place(path: Path, byte: int, num_bytes: int, line: dict[str, Any]) -> KeptPlace:
    if line["is_held_out"]:
        together = (True, line["prompt_id"], 0)
    else:
        together = (False, line["step"], line["group_id"])
    # A count that is damaged must not take the room of others.
    return KeptPlace(path, byte, together, min(line["num_tokens"], num_bytes))


def choose(places: Sequence[KeptPlace], max_rollouts: int, max_tokens: int) -> Selection:
    """As many of them as both limits allow, spread evenly over steps and over held-out prompts.
    None if no group fits."""
    sets: dict[tuple[bool, int, int], list[KeptPlace]] = {}
    for place in sorted(places, key=lambda place: place.together):
        sets.setdefault(place.together, []).append(place)

    def fits(some: Sequence[KeptPlace]) -> bool:
        num_tokens = sum(place.num_tokens for place in some)
        return len(some) <= max_rollouts and num_tokens <= max_tokens

    fitting = [(key[0], each) for key, each in sets.items() if fits(each)]
    kinds = [
        [each for kind, each in fitting if kind is is_held_out] for is_held_out in (False, True)
    ]
    chosen, share = [place for _, each in fitting for place in each], 1.0
    while not fits(chosen):
        share *= SHRINK
        chosen = [place for kind in kinds for each in _spread(kind, share) for place in each]
    return Selection(chosen or [place for _, each in fitting[:1] for place in each], len(places))


def _spread(sets: Sequence[list[KeptPlace]], share: float) -> Iterator[list[KeptPlace]]:
    """This share of them, at even distances."""
    count = int(len(sets) * share)
    return (sets[i * len(sets) // count] for i in range(count))


def read_lines(places: Sequence[KeptPlace]) -> Iterator[dict[str, Any]]:
    """The lines there, in order; a run that goes on from a checkpoint may have cut off some."""
    files: dict[Path, Any] = {}
    try:
        for place in places:
            if place.path not in files:
                files[place.path] = place.path.open("rb")
            files[place.path].seek(place.byte)
            with suppress(ValueError):
                yield read_kept(files[place.path].readline())
    finally:
        for file in files.values():
            file.close()
