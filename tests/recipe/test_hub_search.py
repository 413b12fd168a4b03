"""Random fetches, pushes and damage: what is returned is the Hub's; which files a split is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st

from llamarl.prompts.files import SUFFIXES
from llamarl.recipe.hub import (
    COMMIT,
    HubName,
    choose_files,
    read_name,
)
from llamarl.recipe.local_inputs import fetch_model
from tests.hub_server import Hub
from tests.random_search import case, searched
from tests.recipe.hub_client import MODEL, client_of_hub

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
    assert len(seeds) == 1 or counts["returned"] > 0
    assert len(seeds) < 10 or counts["refused"] > 0


MAIN_TRAIN, MAIN_TEST = "main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet"
SOCRATIC = "socratic/train-00000-of-00001.parquet"
TWO_CONFIGS = [MAIN_TRAIN, MAIN_TEST, SOCRATIC, "README.md", "main/dataset.py"]


def head(*configs: dict[str, object]) -> str:
    return f"---\n{yaml.safe_dump({'license': 'mit', 'configs': [*configs]})}---\n# Sums\n"


MAIN = {
    "config_name": "main",
    "data_files": [
        {"split": "train", "path": "main/train-*"},
        {"split": "test", "path": "main/test-*"},
    ],
}
OTHER = {"config_name": "socratic", "data_files": [{"split": "train", "path": "socratic/*"}]}


def chosen(readme: str, files: list[str], path: str, split: str | None = "train") -> list[str]:
    return choose_files(readme, files, path.split("/") if path else [], split)


@pytest.mark.parametrize(
    ("readme", "files", "path", "found"),
    [
        (head(MAIN, OTHER), TWO_CONFIGS, "main/train", [MAIN_TRAIN]),
        (head(MAIN, OTHER), TWO_CONFIGS, "main/test", [MAIN_TEST]),
        (head(MAIN, OTHER), TWO_CONFIGS, "socratic", [SOCRATIC]),
        (head(MAIN | {"default": True}, OTHER), TWO_CONFIGS, "", [MAIN_TRAIN]),
        (head(MAIN | {"default": True}, OTHER), TWO_CONFIGS, "test", [MAIN_TEST]),
        (head(MAIN), TWO_CONFIGS, "", [MAIN_TRAIN]),
        (head({"config_name": "x", "data_files": "main/t*"}), TWO_CONFIGS, "", TWO_CONFIGS[1::-1]),
        (head({"config_name": "x", "data_files": ["./" + SOCRATIC]}), TWO_CONFIGS, "", [SOCRATIC]),
        (head({"config_name": "x", "data_dir": "main"}), TWO_CONFIGS, "x/test", [MAIN_TEST]),
        (head({"config_name": "x", "data_files": {"a": SOCRATIC}}), TWO_CONFIGS, "a", [SOCRATIC]),
        (head({"config_name": "x", "data_files": "**/tr*"}), TWO_CONFIGS, "", TWO_CONFIGS[0:3:2]),
        ("", TWO_CONFIGS, "main/train", [MAIN_TRAIN]),
        ("no head", TWO_CONFIGS, "socratic", [SOCRATIC]),
        ("", ["data/train-00001-of-00002.parquet", "data/train-00000-of-00002.parquet"], "",
         ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]),
        ("", ["data/train-00000-of-00001-0123456789abcdef.parquet"], "",
         ["data/train-00000-of-00001-0123456789abcdef.parquet"]),
        ("", ["test.jsonl", "train.jsonl"], "test", ["test.jsonl"]),
        ("", ["main/train/0000.parquet", "main/train/0001.parquet", "main/test/0000.parquet"],
         "main/train", ["main/train/0000.parquet", "main/train/0001.parquet"]),
        ("", ["train/0.arrow"], "", ["train/0.arrow"]),
        ("", ["dapo-math-17k.parquet"], "dapo-math-17k", ["dapo-math-17k.parquet"]),
    ],
)  # fmt: skip
def test_a_split_is_found(readme: str, files: list[str], path: str, found: list[str]) -> None:
    assert chosen(readme, files, path) == found


def test_the_only_split_needs_no_name() -> None:
    assert chosen("", ["test.jsonl"], "", None) == ["test.jsonl"]
    with pytest.raises(ValueError, match=r"name one of the splits default/a, default/b$"):
        chosen("", ["a.jsonl", "b.jsonl"], "", None)


@pytest.mark.parametrize(
    ("readme", "files", "path", "words"),
    [
        (head(MAIN, OTHER), TWO_CONFIGS, "", "main/train, main/test, socratic/train$"),
        (head(MAIN), TWO_CONFIGS, "dev", "main/train, main/test$"),
        (head(MAIN), TWO_CONFIGS, "main/dev", "main/train, main/test$"),
        ("", ["rows.csv", "rows.json", "x.bin"], "", "have files of splits"),
        ("", [f"{i}/train.jsonl" for i in range(20)], "", "/train and 8 more$"),
        ("---\na: [\n---\n", ["train.jsonl"], "", "have YAML at the head of README.md"),
    ],
)
def test_a_split_that_is_not_there_says_which_are(
    readme: str, files: list[str], path: str, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        chosen(readme, files, path)


scalars = st.none() | st.booleans() | st.integers() | st.text("abt*/.-", max_size=6)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["config_name", "data_files", "data_dir", "split", "path", "default"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
paths = st.lists(
    st.builds(
        lambda folders, stem, suffix: "/".join([*folders, stem + suffix]),
        st.lists(st.sampled_from(["data", "a", "b"]), max_size=2),
        st.sampled_from(["train", "test-00000-of-00001", "0", "t"]),
        st.sampled_from([*SUFFIXES, ".py", ".bin", ".csv"]),
    ),
    unique=True,
    max_size=6,
)


@given(configs=values, files=paths, path=st.sampled_from(["", "train", "a/test", "t"]))
def test_whatever_a_readme_says_only_files_of_rows_are_chosen(
    configs: object, files: list[str], path: str
) -> None:
    readme = f"---\n{yaml.safe_dump({'configs': configs})}---\n"
    try:
        found = chosen(readme, files, path)
    except ValueError:
        return
    assert found
    assert {*found} <= {each for each in files if each.endswith(SUFFIXES)}
    assert len({*found}) == len(found)
