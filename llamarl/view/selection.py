"""Which kept rollouts of a run are shown, if they are too many for one page.

Owns: finding them in the archive, and the choice. Does not own: what a line says
(`executors/archive.py`), or the page. Invariant: what is shown together is chosen together: the
rollouts of a group, and those of a held-out prompt under all versions that were evaluated.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamarl.json_file import parse

log = logging.getLogger(__name__)

KEPT_FILES = "archive/kept-*.jsonl"
SHRINK = 0.98  # from one try to the next


@dataclass(frozen=True, slots=True)
class KeptPlace:
    """Where the line of a rollout begins, and what the choice needs of it."""

    path: Path
    byte: int
    together: tuple[bool, int, str]
    """(held out, step or prompt, group): equal for what is shown together, in order."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Selection:
    """What is shown, and of how many rollouts."""

    places: list[KeptPlace]
    num_found: int


def find_places(run_dir: Path) -> list[KeptPlace]:
    """All kept rollouts of a run; a line that a killed process left unfinished is skipped, damaged
    ones too, with a warning. ValueError if there is none."""
    if not run_dir.is_dir():
        raise ValueError(f"RUN must be the folder of a run, got {run_dir}")
    places: list[KeptPlace] = []
    for path in sorted(run_dir.glob(KEPT_FILES)):
        byte = 0
        with path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                try:
                    places.append(_kept_place(path, byte, parse(text)))
                except (ValueError, LookupError, TypeError, AttributeError) as error:
                    if text.endswith(b"\n"):
                        log.warning("%s:%d is not shown: %r", path, number, error)
                byte += len(text)
    if not places:
        must = "be the folder of a run that kept rollouts (experience.keep_rollouts above 0, or an "
        raise ValueError(f"RUN must {must}evaluation), got none in {run_dir}/{KEPT_FILES}")
    return places


def _kept_place(path: Path, byte: int, line: dict[str, Any]) -> KeptPlace:
    if line["is_held_out"]:
        together = (True, int(line["prompt_id"]), "")
    else:
        together = (False, int(line["step"]), f"{int(line['group_id']):020}")
    return KeptPlace(path, byte, together, int(line["num_tokens"]))


def choose(places: Sequence[KeptPlace], max_rollouts: int, max_tokens: int) -> Selection:
    """As many of them as both limits allow, spread evenly over steps and over held-out prompts.
    None if no group fits."""
    sets: dict[tuple[bool, int, str], list[KeptPlace]] = {}
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
    """The lines there, in order."""
    files: dict[Path, Any] = {}
    try:
        for place in places:
            if place.path not in files:
                files[place.path] = place.path.open("rb")
            files[place.path].seek(place.byte)
            yield parse(files[place.path].readline())
    finally:
        for file in files.values():
            file.close()
