"""Which files of a repository a split is: by README.md, or by the names of files."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from llamarl.recipe.hub import SUFFIXES, choose_files, default_config, read_splits

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
    splits = read_splits(readme, files)
    parts = path.split("/") if path else []
    return choose_files(parts, splits, default_config(readme, splits), split)


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
