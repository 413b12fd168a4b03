"""Random sequences of fetches, pushes, damage and lost networks: what is returned is the Hub's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from huggingface_hub import constants

from llamarl.recipe.hub import COMMIT, HubName, read_name
from llamarl.recipe.local_inputs import fetch_model
from tests.hub_server import Hub
from tests.random_search import case, searched
from tests.unit.hub_client import MODEL, client_of_hub

TEXTS = ("config.json", "tokenizer.json")
WEIGHTS = "model.safetensors"
NUM_OPERATIONS = 25


class Search:
    """One case. `whole`: by commit, the files that a fetch has returned since the cache was last
    damaged; `known`: the commit that main was at the last time that the Hub was asked."""

    def __init__(self, seed: int, hub: Hub, cache: Path, patch: pytest.MonkeyPatch) -> None:
        self.rng, self.hub, self.cache, self.patch = random.Random(seed), hub, cache, patch
        self.commits: list[str] = []
        self.whole: dict[str, set[str]] = {}
        self.known: str | None = None
        self.is_offline = False
        self.counts = {"returned": 0, "refused": 0}

    def run(self) -> None:
        self.push()
        operations = (self.push, self.damage, self.mend, self.lose_a_file, self.switch, self.gate)
        for _ in range(NUM_OPERATIONS):
            self.rng.choices([*operations, self.fetch], [2, 2, 2, 1, 2, 1, 12])[0]()

    def push(self) -> None:
        """A commit some of whose files are those of the one before."""
        before = self.hub.repositories[MODEL][self.commits[-1]] if self.commits else {}
        files = {
            path: before[path]
            if path in before and self.rng.random() < 0.5
            else self.rng.randbytes(self.rng.randrange(1, 400))
            for path in (*TEXTS, WEIGHTS)
        }
        self.commits.append(self.hub.add(MODEL, files))

    def damage(self) -> None:
        self.hub.wrong.add(self.rng.choice((*TEXTS, WEIGHTS)))

    def mend(self) -> None:
        self.hub.wrong.clear()
        self.hub.gated.clear()

    def gate(self) -> None:
        self.hub.gated.add(MODEL)

    def switch(self) -> None:
        self.is_offline = not self.is_offline
        self.patch.setattr(constants, "HF_HUB_OFFLINE", self.is_offline)

    def lose_a_file(self) -> None:
        """Somebody removes a file of the cache, or changes it."""
        blobs = sorted(self.cache.glob("*/blobs/*"))
        if blobs:
            blob = self.rng.choice(blobs)
            if self.rng.random() < 0.5:
                blob.unlink()
            else:
                blob.write_bytes(bytes(255 - each for each in blob.read_bytes()))
            self.whole.clear()

    def fetch(self) -> None:
        has_weights = self.rng.random() < 0.7
        name = read_name("model.checkpoint", "hf:org/tiny", "model")
        if self.rng.random() < 0.4:
            name = name.at(self.rng.choice(self.commits))
        needed = [*TEXTS, *([WEIGHTS] if has_weights else [])]
        commit = name.revision or (self.known if self.is_offline else self.commits[-1])
        if not self.is_offline and name.revision is None:
            self.known = commit
        is_kept = commit is not None and {*needed} <= self.whole.get(commit, set())
        is_open = not (self.is_offline or self.hub.gated or self.hub.wrong)
        try:
            folder, pinned = fetch_model("model.checkpoint", name, has_weights=has_weights)
        except ValueError as error:
            self.counts["refused"] += 1
            line = str(error)
        else:
            self.counts["returned"] += 1
            return self.check(folder, pinned, commit, needed)
        assert line.startswith("model.checkpoint must ")
        assert len(line.splitlines()) == 1
        assert not is_kept, "all of it was in the cache"
        # One command removes a file that was changed in the cache, and the next one fetches it.
        assert not is_open or "other bytes" in line, line
        return None

    def check(
        self, folder: Path, pinned: HubName, commit: str | None, needed: Sequence[str]
    ) -> None:
        assert pinned.revision == commit
        assert commit is not None
        assert COMMIT.fullmatch(commit)
        for path in needed:
            assert (folder / path).read_bytes() == self.hub.repositories[MODEL][commit][path]
        self.whole.setdefault(commit, set()).update(needed)


@searched(few=10, many=60)
def test_whatever_happens_files_are_those_of_the_commit_or_one_line_says_why(
    seeds: Sequence[int], tmp_path: Path
) -> None:
    counts = {"returned": 0, "refused": 0}
    for seed in seeds:
        patching, folder = pytest.MonkeyPatch.context(), tmp_path / str(seed)
        with case(seed), client_of_hub(folder) as hub, patching as patch:
            search = Search(seed, hub, folder / "cache", patch)
            search.run()
        counts = {name: count + search.counts[name] for name, count in counts.items()}
    assert counts["returned"] > 0
    assert len(seeds) < 10 or counts["refused"] > 0
