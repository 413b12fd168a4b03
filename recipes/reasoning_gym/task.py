"""Prompts and rewards of reasoning-gym: `data.options` chooses its tasks by name."""

import difflib
import json
import random
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any

from reasoning_gym.factory import DATASETS, create_dataset
from reasoning_gym.utils import extract_answer

from llamarl.core.records import Prompt

UNREADABLE = (ValueError, TypeError, AttributeError, LookupError)  # what some scorers then raise
COMPOSITE = "composite"  # of other tasks, which the list of names is here


def prompts(
    held_out: bool,
    tasks: list[str],
    config: dict[str, dict[str, Any]],
    num_prompts: int,
    num_held_out: int,
    seed: int,
) -> Iterator[dict[str, Any]]:
    """`tasks` take turns; `config` holds the difficulty of each, by its name. A question that is
    held out is not trained on."""
    if not tasks:
        raise ValueError("data.options.tasks must name at least one task, got none")
    for name in [*tasks, *config]:
        check_name(name)
    if unused := sorted(config.keys() - {*tasks}):
        names = ", ".join(tasks)
        raise ValueError(
            f"data.options.config must be of data.options.tasks ({names}), got {unused[0]}"
        )
    size = num_held_out + num_prompts
    settings = [{"seed": seed, "size": size, **config.get(name, {})} for name in tasks]
    rows = (
        row_of(tasks[place % len(tasks)], settings[place % len(tasks)], place // len(tasks))
        for place in range(size)
    )
    first = [next(rows) for _ in range(num_held_out)]
    if held_out:
        yield from first
        return
    known = {row["question"] for row in first}
    yield from (row for row in rows if row["question"] not in known)


def reward(prompt: Prompt, completion: str) -> float:
    """What the task's own `score_answer` gives to the text between the last <answer> and </answer>;
    0 without one, or for one that it cannot read."""
    row = prompt.fields
    name, config = row["task"], json.dumps(row["config"])
    entry = entry_of(name, config, row["index"])
    if entry["question"] != row["question"]:
        raise RuntimeError(f"{name} must make entry {row['index']} again, got another")
    answer = extract_answer(completion)
    if answer is None:
        return 0.0
    try:
        return float(open_dataset(name, config).score_answer(answer, entry))
    except UNREADABLE:
        return 0.0


def row_of(name: str, config: dict[str, Any], index: int) -> dict[str, Any]:
    """The entry as the row of a prompt. Its metadata, which JSON cannot hold for every task, is
    made again for the reward."""
    entry = entry_of(name, json.dumps(config), index)
    question, answer = entry["question"], entry["answer"]
    return {"question": question, "answer": answer, "task": name, "config": config, "index": index}


@cache
def open_dataset(name: str, config: str) -> Any:
    """The dataset of a task with this config, as JSON. ValueError for one that it does not have."""
    chosen = json.loads(config)
    known = DATASETS[name][1].__dataclass_fields__
    for key in chosen:
        if key not in known:
            meant = did_you_mean(key, known)
            must = f"data.options.config.{name} must have keys of {', '.join(known)}"
            raise ValueError(f"{must}, got {key!r}{meant}")
    try:
        return create_dataset(name, **chosen)
    except (AssertionError, TypeError, ValueError) as error:
        got = " ".join(str(error).split()) or type(error).__name__
    raise ValueError(
        f"data.options.config.{name} must be what reasoning-gym takes, got {chosen}: {got}"
    )


@lru_cache(maxsize=4096)
def entry_of(name: str, config: str, index: int) -> dict[str, Any]:
    """An entry; the rollouts of a group ask for the same. Some tasks draw from the generator that
    all share."""
    random.seed(index)
    entry: dict[str, Any] = open_dataset(name, config)[index]
    return entry


def check_name(name: str) -> None:
    """ValueError unless it is a task."""
    if name == COMPOSITE:
        raise ValueError(f"data.options.tasks must name the tasks themselves, got {COMPOSITE!r}")
    if name not in DATASETS:
        must = f"data.options.tasks must name tasks of reasoning-gym ({len(DATASETS)} are there)"
        raise ValueError(f"{must}, got {name!r}{did_you_mean(name, DATASETS)}")


def did_you_mean(name: str, known: Any) -> str:
    """The names that may be meant."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(close)}?)" if close else ""
