"""What is damaged and how it is tried.

A case is a function of seed and number alone, so that what was found can be tried again.
"""

from __future__ import annotations

import dataclasses
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzzing import mutations
from fuzzing.mutations import Mutation
from llamarl.core import files

NEWEST = "run/checkpoints/step-00000002"
KEYS = "a config key"

FILES: dict[str, tuple[Mutation, ...]] = {
    "recipe/run.yaml": mutations.TEXT,
    "recipe/prompts.jsonl": mutations.JSON_LINES,
    "recipe/held_out.jsonl": mutations.JSON_LINES,
    "recipe/prompts.parquet": mutations.BYTES,
    "recipe/lengths.json": mutations.JSON,
    "recipe/task.py": mutations.TEXT,
    "recipe/checkpoint/config.json": mutations.JSON,
    "recipe/checkpoint/generation_config.json": mutations.JSON,
    "recipe/checkpoint/tokenizer.json": mutations.JSON,
    "recipe/checkpoint/tokenizer_config.json": mutations.JSON,
    "recipe/checkpoint/model.safetensors": mutations.SAFETENSORS,
    "recipe/sharded/model.safetensors.index.json": mutations.JSON,
    "recipe/sharded/model-00001-of-00003.safetensors": mutations.SAFETENSORS,
    "export/model.safetensors": mutations.SAFETENSORS,
    "export/config.json": mutations.JSON,
    f"export/{files.MANIFEST_FILE}": mutations.JSON,
    f"{NEWEST}/controller.json": mutations.JSON,
    f"{NEWEST}/{files.MANIFEST_FILE}": mutations.JSON,
    f"{NEWEST}/.metadata": mutations.BYTES,
    f"{NEWEST}/__0_0.distcp": mutations.BYTES,
    "run/metrics.jsonl": mutations.JSON_LINES,
    "run/archive/rollouts-0.jsonl": mutations.JSON_LINES,
    "run/archive/kept-0.jsonl": mutations.JSON_LINES,
    "run/tokenizer/tokenizer.json": mutations.JSON,
    "run/spans/trainer-0.jsonl": mutations.JSON_LINES,
    "run/summary.json": mutations.JSON,
}
VIEWED = {  # share of the cases in which `llamarl view` reads it; train only writes the last one
    "run/metrics.jsonl": 0.5,
    "run/archive/kept-0.jsonl": 0.5,
    "run/tokenizer/tokenizer.json": 1.0,
}
LISTED = ("export/", f"{NEWEST}/")  # what a manifest vouches for
KINDS = ("text", "text", "text", "text", "text", "gone", "folder", "fifo", "loop", "empty")
FLOATS = ["nan", "inf", "-inf", "-1.0", "0.0", "1e308", "1e-320", "-1e-9", "1e999", "0.1", "'x'"]
INTS = ["-1", "0", "1", "7", "2147483648", "9223372036854775807", "9223372036854775808", "1e3", "x"]
TEXTS = [
    "''",
    "' '",
    "null",
    "x",
    "'é😀'",
    "\ud800",
    "a" * 5000,
    "'a b'",
    "[]",
    "{a: 1}",
    "'${a}'",
    "7",
]
LISTS = ["[]", "[nan]", "[1e308,-1]", "[[]]", "['']", "null", "x", "[x,x]", "[null]", "[0,1]", "{}"]
UNTOUCHED = {"run_dir", "recipe_dir", "cluster.backend"}
SETTINGS = [
    *("cluster=inline", "num_steps=3", "trainer.groups_per_step=2"),
    *("trainer.warmup_steps=0", "evaluation.every_steps=0", "evaluation.max_prompts=4"),
    *("sampling.rollouts_per_prompt=2", "sampling.max_tokens=16", "checkpoint.export=false"),
    *("metrics.live=false", "metrics.trackers=[]", "checkpoint.every_steps=1"),
    *("checkpoint.keep=0", "experience.keep_rollouts=1"),
]


@dataclass(frozen=True)
class Case:
    """One damaged input and how it is tried: `overrides` follow SETTINGS, `is_run`: to the end.

    `composes`: the damage is in the recipe or in a key, else the sound recipe's composed config
    will do. `must_fail`: it is in what a manifest vouches for, so no run may use it. `is_viewed`:
    `llamarl view` reads it, in place of `llamarl train`.
    """

    number: int
    what: str
    overrides: list[str]
    is_run: bool
    composes: bool = False
    must_fail: bool = False
    is_viewed: bool = False


def make_case(seed: int, number: int, folder: Path, config: Any, run_share: float) -> Case:
    """Case `number` of `seed`, its damage done in `folder`, a copy of the sound inputs.

    `config` is the sound recipe's: its fields are the keys.
    """
    draw = random.Random(f"{seed} {number}")
    is_run = draw.random() < run_share
    sixth, place = divmod(number, 6)
    if place == 0:
        return _key_case(number, draw, config, is_run)
    target = list(FILES)[(5 * sixth + place - 1) % len(FILES)]
    path = folder / target
    kind = draw.choice(KINDS)
    is_changed = _damage(path, kind, draw.choice(FILES[target]), draw)
    is_signed = target.startswith(LISTED) and kind == "text" and draw.random() < 0.5
    if is_signed and path.name != files.MANIFEST_FILE:  # as if it had been written so
        (path.parent / files.MANIFEST_FILE).unlink()
        files.write(path.parent)
    vouched = target.startswith(LISTED) and not is_signed and path.name != files.MANIFEST_FILE
    is_viewed = target in VIEWED and draw.random() < VIEWED[target]
    what = f"{target} ({kind}{', signed' * is_signed}{', viewed' * is_viewed})"
    return Case(
        number,
        what,
        _overrides(target, folder),
        is_run,
        composes=target == "recipe/run.yaml",
        must_fail=vouched and is_changed,
        is_viewed=is_viewed,
    )


def _key_case(number: int, draw: random.Random, config: Any, is_run: bool) -> Case:
    keys = {key: value for key, value in _leaves(config) if key not in UNTOUCHED}
    key = draw.choice(sorted(keys))
    choices = {bool: ["maybe", "null", "2", "[]"], int: INTS, float: FLOATS, list: LISTS}
    value = draw.choice(choices.get(type(keys[key]), TEXTS))
    # A whole run may be asked to be long or large: only what is neither is tried as one.
    is_run &= type(keys[key]) is float and not key.startswith(("cluster", "weights", "plan"))
    overrides = [*_overrides("", Path()), f"{key}={value}"]
    return Case(number, f"{key}={value[:60]}", overrides, is_run, composes=True)


def _leaves(config: Any, prefix: str = "") -> list[tuple[str, Any]]:
    leaves = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        key = f"{prefix}{field.name}"
        leaves += _leaves(value, f"{key}.") if dataclasses.is_dataclass(value) else [(key, value)]
    return leaves


def _damage(path: Path, kind: str, mutation: Mutation, draw: random.Random) -> bool:
    """Damage one file; True if it is another one then."""
    before = path.read_bytes()
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        after = mutation(before, draw)
        path.write_bytes(after)
        return after != before
    return True


def _overrides(target: str, folder: Path) -> list[str]:
    """Arguments with which a run reads the file `target`."""
    if target.startswith("run/"):
        is_finished = target == "run/summary.json"  # shown again only by a run that is at its end
        more = ["num_steps=2"] if is_finished else []
        return [f"run_dir={folder}/run", "checkpoint.resume=auto", *more]
    more = {
        "recipe/prompts.parquet": ["data.prompts=prompts.parquet"],
        "recipe/lengths.json": ["sampling.replay_lengths=lengths.json"],
        "recipe/task.py": ["reward.functions=[task]"],
    }.get(target, [])
    if target.startswith("recipe/sharded/"):
        more = ["model.checkpoint=sharded"]
    if target.startswith("export/"):
        more = [f"model.checkpoint={folder}/export"]
    return ["run_dir=new", *more]
