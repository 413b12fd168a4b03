"""Compares what two revisions of the code make of the same deterministic runs.

    python tools/same_run.py OLD NEW

OLD and NEW are git revisions or folders of a checkout. Each runs inline, synchronously and with a
fixed seed, so the rows of the archive, the metrics but for times, the evaluations and the exported
bytes must be equal. The exit status is 1 where they are not.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
SAME = [
    "cluster=inline",
    "experience.keep_rollouts=1",
    "metrics.trackers=[]",
]
SMALL = [
    "trainer.parts=batch",
    "staleness.max_staleness=0",
    "num_steps=3",
    "trainer.groups_per_step=8",
    "evaluation.every_steps=1",
    "evaluation.max_prompts=8",
]
ONE_BY_ONE = [  # when a tool answers is a matter of time, and so would be who shares a batch
    "generator.max_num_seqs=1",
    "sampling.rollouts_per_prompt=4",
]
SCENARIOS = {
    "rl": ["--config-dir=recipes/quickstart", *SMALL],
    "mini_batches": [  # one batch: what is written for another one, its publishes would come amid
        "--config-dir=recipes/quickstart",
        *SMALL,
        "staleness.max_staleness=1",
        "placement=colocated",
        "num_steps=2",
        "trainer.groups_per_step=4",
        "trainer.num_mini_batches=2",
        "algorithm.proximal=recompute",
    ],
    "segments": ["--config-dir=recipes/quickstart", *SMALL, "sampling.segment_tokens=8"],
    "lora": ["--config-dir=recipes/quickstart", *SMALL, "trainer.lora.rank=4"],
    "tools": ["--config-dir=recipes/quickstart_tools", *SMALL, *ONE_BY_ONE],
    "colocated": ["--config-dir=recipes/quickstart", *SMALL, "placement=colocated"],
    "sft": [
        "--config-dir=recipes/quickstart",
        "--config-name=sft",
        "num_steps=4",
        "trainer.warmup_steps=0",
        "data.prompts=prompts.jsonl",
        "data.prompt_field=question",
        "data.completion_field=worked",
    ],
}
# Whether a turn found its keys and values is a matter of time, too.
TIMED = re.compile(r"^(time|wait|busy|memory)/|_s(/|$)|(^|/)(seconds|kept)(/|$)")
ENDED = ("trained", "evaluated")  # which rollouts the end of a run catches is a matter of time
NAMES_A_FOLDER = ("adapter_config.json", "llamarl-manifest.json")  # that of the code which ran
ROWS = {
    "archive/rollouts-*.jsonl": "row_id",
    "archive/kept-*.jsonl": "row_id",
    "evaluations.jsonl": "",
    "metrics.jsonl": "step",
}
Row = dict[str, Any]
Outcome = dict[str, list[Row]]


@contextlib.contextmanager
def checkout(name: str, folder: Path) -> Iterator[Path]:
    """The folder with the code of a revision; one that is made here is removed afterwards."""
    if Path(name).is_dir():
        yield Path(name).resolve()
        return
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), name], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def run(code: Path, scenario: str, run_dir: Path) -> None:
    """Run one scenario with the code of a folder."""
    verb = "sft" if scenario == "sft" else "train"
    command = [sys.executable, "-m", "llamarl", verb, *SCENARIOS[scenario], *SAME]
    done = subprocess.run(
        [*command, f"run_dir={run_dir}"],
        cwd=code,
        env=os.environ | {"PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(f"{code}: {scenario} ended with {done.returncode}\n{done.stdout}{done.stderr}")


def untimed(row: Row) -> Row:
    """The row without what the clock says, also in the numbers of an episode."""
    if isinstance(row.get("numbers"), str):
        row = row | {"numbers": untimed(json.loads(row["numbers"]))}
    return {key: value for key, value in row.items() if not TIMED.search(key)}


def outcome(run_dir: Path) -> Outcome:
    """Rows by file, in an order of their own, and the digests of the exported files."""
    found: Outcome = {}
    for pattern, order in ROWS.items():
        lines = [
            json.loads(line)
            for path in sorted(run_dir.glob(pattern))
            for line in path.read_text().splitlines()
        ]
        if order == "row_id":
            lines = [line for line in lines if line.get("outcome") in ENDED]
        if order:
            lines.sort(key=lambda line: line[order])
        found[pattern] = [untimed(line) for line in lines]
    found["export"] = [
        {"file": path.name, "digest": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in sorted((run_dir / "export").iterdir())
        if path.name not in NAMES_A_FOLDER
    ]
    return found


def differences(old: Outcome, new: Outcome, ignored: re.Pattern[str]) -> list[str]:
    """One line for each place where two runs differ."""
    found = []
    for name, before in old.items():
        after = new[name]
        if len(before) != len(after):
            found.append(f"{name}: {len(before)} rows, now {len(after)}")
        for index, (row, other) in enumerate(zip(before, after, strict=False)):
            for key in sorted(row.keys() | other.keys()):
                if row.get(key) != other.get(key) and not ignored.search(key):
                    was, now = row.get(key, "none"), other.get(key, "none")
                    found.append(f"{name} row {index}: {key} was {was}, is {now}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("old", help="a git revision or a folder")
    parser.add_argument("new", help="a git revision or a folder")
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS), choices=SCENARIOS)
    parser.add_argument("--ignore", default="$^", help="a pattern of keys that may differ")
    arguments = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False, markup=False)
    differing = 0
    with tempfile.TemporaryDirectory(prefix="llamarl_same_run_") as name:
        folder = Path(name)
        with (
            checkout(arguments.old, folder / "old_code") as old,
            checkout(arguments.new, folder / "new_code") as new,
        ):
            for scenario in arguments.scenarios:
                runs = []
                for side, code in (("old", old), ("new", new)):
                    run(code, scenario, folder / scenario / side)
                    runs.append(outcome(folder / scenario / side))
                found = differences(runs[0], runs[1], re.compile(arguments.ignore))
                differing += bool(found)
                num_rows = sum(len(rows) for rows in runs[0].values())
                console.print(f"{scenario}: {'differs' if found else f'{num_rows} rows equal'}")
                for line in found[:20]:
                    console.print(f"  {line[:300]}")
    sys.exit(differing > 0)


if __name__ == "__main__":
    main()
