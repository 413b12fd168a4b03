"""Runs under whole combinations of options and faults that are killed or ended at any moment, and
go on from their newest checkpoint with other options: what their folder says in the end."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llamarl.core import checkpoint, files
from llamarl.core.errors import ExecutorLost
from llamarl.core.groups import StepStats
from llamarl.core.records import Prompt
from llamarl.metrics.held_out import EVALUATION
from llamarl.metrics.run_logger import TURNS
from llamarl.metrics.trackers import METRICS_FILE, MetricsLog
from llamarl.planner.simulation.clock import run
from llamarl.prompts.stream import PromptStream
from llamarl.recipe.starting_point import starting_point
from llamarl.storage.archive import is_kept
from tests.fakes import WatchedStorage
from tests.random_search import case, searched
from tests.simulation.combinations import draw
from tests.simulation.loop import Loop
from tests.simulation.test_loop_search import LIMIT_S, check, perform, steps_before

ARCHIVE, KEPT = "archive/rollouts-0.jsonl", "archive/kept-0.jsonl"
MOST_SESSIONS = 3
UNFINISHED = b'{"row_id": 7, "outco'
ENDINGS = ("kill", "kill", "cancel", "terminate", "lose the trainer")
SAVING = ("cancel", "terminate")


@dataclass(kw_only=True)
class Session:
    """One process of the run in `folder`, which is ended by `ending`: `after_s` from its start or,
    if there is a `step`, after that was made. Of one that is killed, `killed` is the folder as it
    was then."""

    loop: Loop
    folder: Path
    ending: str
    step: int
    after_s: float
    killed: Path
    is_ended: bool = False

    async def run(self, rng: random.Random) -> None:
        loop, metrics = self.loop, MetricsLog(self.folder)
        clock, log_step = asyncio.get_running_loop(), loop.run_logger.log_step
        is_lost = self.ending == "lose the trainer"

        async def log_in_file(stats: StepStats, *details: object) -> None:
            if stats.version == self.step:
                clock.call_later(self.after_s, self._end, task)
            for _ in range(TURNS):  # as the real one
                await asyncio.sleep(0)
            metrics.log(stats.version, {})
            await log_step(stats, *details)

        loop.run_logger.log_step = log_in_file  # type: ignore[method-assign]
        await loop.storage.start()
        task = asyncio.create_task(perform(loop, rng, self.folder))
        if not self.step:
            clock.call_later(self.after_s, self._end, task)
        try:
            await task
            self.is_ended &= is_lost  # else it ended by itself, before its next step had
        except (asyncio.CancelledError, BaseExceptionGroup, ExecutorLost) as error:
            if not self.is_ended or is_lost == isinstance(error, asyncio.CancelledError):
                raise
        finally:
            metrics.close()
            await loop.storage.close()

    def _end(self, task: asyncio.Task[bool]) -> None:
        if task.done():
            return
        self.is_ended = True
        if self.ending == "kill":
            shutil.copytree(self.folder, self.killed)
            task.cancel()
        elif self.ending == "cancel":
            task.cancel()
        elif self.ending == "terminate":
            self.loop.saver.end_after_step(task.cancel)
        else:
            self.loop.cluster.spawned["trainer"].die()


@dataclass
class History:
    """What the sessions of a run did that its folder does not say."""

    prompts: Sequence[Prompt]
    num_held_out: int
    num_steps: int
    evaluate_every: int
    patience: int | None
    """If the best version is kept."""
    prompt_of: dict[int, tuple[int, int]] = field(default_factory=dict)  # by row
    group_of: dict[int, int] = field(default_factory=dict)  # by row
    loop_of: dict[int, Loop] = field(default_factory=dict)  # by version that was trained
    share_of: dict[int, float] = field(default_factory=dict)  # that was to be kept, by row
    used: dict[int, set[int]] = field(default_factory=dict)  # rows by version that learnt from them
    ends: set[int] = field(default_factory=set)  # versions that sessions begin or end with

    def add(self, loop: Loop) -> None:
        """A session, which began with what is known so far, is over."""
        self.prompt_of |= loop.prompt_of
        self.group_of |= loop.group_of
        self.share_of |= dict.fromkeys(loop.prompt_of, loop.keep_rollouts)
        self.loop_of |= dict.fromkeys(range(loop.state.get("version", 0), loop.num_steps), loop)
        again = {version: set[int]() for version in range(loop.trainer.version + 1)}
        for batch in loop.batches:
            again[batch.version] |= {row.row_id for row in batch.rows}
        self.used |= {version: rows for version, rows in again.items() if rows}
        start = loop.state.get("version", 0)
        self.ends |= {start}
        if start < loop.saver.last == loop.saver.evaluator.version:
            self.ends |= {loop.saver.last}

    def is_regular(self, version: int) -> bool:
        """Whether it ends a batch in which one of every so many versions was made: amid a batch
        nothing is saved."""
        every, loop = self.evaluate_every, self.loop_of[version - 1]
        first = steps_before(loop, version - 1)[0]
        is_between = steps_before(loop, version)[1:] == (0, 0)
        return every > 0 and is_between and version // every > first // every

    def cut(self, state: dict[str, Any]) -> None:
        """The next session begins with `state`: what came after it is repeated."""
        end = state.get("next_row_id", 0)
        self.ends = {each for each in self.ends if each <= state.get("version", 0)}
        self.prompt_of = {row: each for row, each in self.prompt_of.items() if row < end}
        self.group_of = {row: each for row, each in self.group_of.items() if row < end}

    def check_all(self, folder: Path) -> None:
        """A run could go on from each of its checkpoints, and has that of the best version."""
        for path in checkpoint.committed(folder):
            state = checkpoint.read_state(path)
            self.check(folder, state)
            if path == checkpoint.latest(folder) and (known := state.get("best")):
                found = checkpoint.find(folder, known["version"])
                assert found is not None or state["version"] in self.ends, "it is better"

    def check(self, folder: Path, state: dict[str, Any]) -> None:
        """The files hold all that was done before `state`, once, and what is open is in it."""
        version = state.get("version", 0)
        ends = {name: parts[-1][0] for name, parts in state.get("positions", {}).items() if parts}
        steps = [each["step"] for each in read_lines(folder, METRICS_FILE, ends)]
        assert steps == [*range(1, version + 1)]
        lines = self.check_lines(read_lines(folder, ARCHIVE, ends))
        self.check_kept(lines, read_lines(folder, KEPT, ends))
        assert max((line["row_id"] for line in lines), default=-1) < state.get("next_row_id", 0)
        self.check_steps(lines, version)
        trained = {line["row_id"] for line in lines if line["outcome"] == "trained"}
        for each in range(version):
            is_again = self.loop_of[each].sampler == "task"  # then some are used later too
            assert is_again or self.used[each] <= trained, "learnt from, and not in the archive"
        evaluated = {line["version"] for line in lines if line["outcome"] == "evaluated"}
        assert max(evaluated, default=-1) == state.get("evaluated", -1)
        if self.patience is not None:
            known = state.get("best", {})
            *_, is_over = best_of(self, lines, self.num_steps)
            is_end = is_over or "solved" in state
            best, num_since, _ = best_of(self, lines, version if is_end else self.num_steps)
            assert (known.get("version", 0), known.get("num_since", 0)) == (best, num_since)
        self.check_prompts(lines, state)

    def check_lines(self, archived: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The archive, but for what was lost and written again: a line per rollout, and those of
        whole evaluations."""
        lines = [line for line in archived if line["outcome"] != "lost"]
        rows = [line["row_id"] for line in lines]
        assert len(rows) == len({*rows}), "a rollout with two outcomes"
        sizes = Counter(line["version"] for line in lines if line["outcome"] == "evaluated")
        assert {*sizes.values()} <= {self.num_held_out}
        return lines

    def check_kept(self, lines: list[dict[str, Any]], kept: list[dict[str, Any]]) -> None:
        """Whole groups of the prompts that are to be kept, each rollout once, and evaluations."""
        wanted: dict[int, dict[str, Any]] = {}
        for line in lines:
            row, is_chosen = line["row_id"], line["outcome"] == "evaluated"
            if line["outcome"] in ("trained", "dropped"):
                epoch, prompt_id = self.prompt_of[row]
                prompt = Prompt(prompt_id=prompt_id, epoch=epoch, text="", token_ids=())
                is_chosen = is_kept(prompt, self.share_of[row], 0)
            if is_chosen:
                wanted[row] = line
        finished = [line for line in kept if line["outcome"] != "unused"]  # is all else
        assert [line["row_id"] for line in finished] == [*wanted], "each once, in the same order"
        for line in finished:
            row, before = line["row_id"], wanted[line["row_id"]]
            assert line["group_id"] == (None if line["is_held_out"] else self.group_of[row])
            same = ("outcome", "reward", "spans", "finish", "num_tokens")
            assert [line[name] for name in same] == [before[name] for name in same]
            assert line["reason"] == before.get("reason")
            is_used = line["outcome"] in ("trained", "evaluated")
            assert not is_used or line["step"] == line["version"] + (not line["is_held_out"])

    def check_steps(self, lines: list[dict[str, Any]], num_steps: int) -> None:
        """Each step is there with whole groups, but for what stages dropped, within its bound."""
        left_out = {line["row_id"] for line in lines if line.get("left_out")}
        trained = [line for line in lines if line["outcome"] == "trained"]
        assert {line["version"] for line in trained} <= {*range(num_steps)}
        rows_of: dict[int, set[int]] = {}
        for row, group in self.group_of.items():
            rows_of.setdefault(group, set()).add(row)
        for version in range(num_steps):
            loop = self.loop_of[version]
            step = [line for line in trained if line["version"] == version]
            groups = {self.group_of[line["row_id"]] for line in step}
            is_whole = len(groups) == loop.groups_per_step
            # Lines tell of the last use only.
            is_last = steps_before(loop, version)[1] == loop.num_passes - 1
            may_be_less = loop.sampler == "task" or not is_last
            assert is_whole or (may_be_less and len(groups) < loop.groups_per_step)
            wanted = {row for group in groups for row in rows_of[group]} - left_out
            assert {line["row_id"] for line in step} == wanted
            oldest = version - loop.max_staleness
            assert {line["oldest_version"] for line in step} <= {oldest}
            if loop.late == "wait":
                assert all(span[0] >= oldest for line in step for span in line["spans"])

    def check_prompts(self, lines: list[dict[str, Any]], state: dict[str, Any]) -> None:
        """Those drawn so far are done or open, and each is once."""
        closed = {
            self.group_of[line["row_id"]]: self.prompt_of[line["row_id"]]
            for line in lines
            if line["outcome"] in ("trained", "dropped") and not line.get("left_out")
        }
        waiting = [tuple(pair) for name in ("pending", "backlog") for pair in state.get(name, [])]
        found = sorted([*closed.values(), *waiting])
        if "silent" in state:  # some were passed over
            assert len({*found}) == len(found) == state["position"]
            return
        stream = PromptStream(self.prompts, seed=0, shuffle=True)
        drawn = [next(stream) for _ in range(state.get("position", 0))]
        expected = sorted((prompt.epoch, prompt.prompt_id) for prompt in drawn)
        assert found == expected


def best_of(history: History, lines: list[dict[str, Any]], end: int) -> tuple[int, int, bool]:
    """The version with the best accuracy, the first of equal ones; how many were evaluated after
    it; and whether these ended the run. Only versions that have a checkpoint count: those of every
    so many steps, and those that its sessions began or ended with, the last one at `end`."""
    of_version: dict[int, list[int]] = {}
    for line in lines:
        if line["outcome"] == "evaluated":
            of_version.setdefault(line["version"], []).append(line["correct"])
    best, most, num_since, is_over = 0, -1.0, 0, False
    for version, marks in sorted(of_version.items()):
        is_end = version == end or version in history.ends
        if version == 0 or not (is_end or history.is_regular(version)):
            continue
        accuracy = sum(marks) / len(marks)
        num_since += 1
        if accuracy > most:
            best, most, num_since = version, accuracy, 0
        is_over |= 0 < (history.patience or 0) <= num_since
    return best, num_since, is_over


def read_lines(folder: Path, name: str, ends: dict[str, int] | None = None) -> list[dict[str, Any]]:
    """The lines of a file, up to the byte where it ends."""
    path = folder / name
    data = path.read_bytes() if path.exists() else b""
    end = len(data) if ends is None else ends.get(name, 0)
    return [json.loads(line) for line in data[:end].splitlines()]


def resume(loop: Loop, folder: Path) -> dict[str, Any]:
    """The state that the next session begins with; the files are cut to it."""
    automatic = replace(loop.config.checkpoint, resume="auto")
    config = replace(loop.config, checkpoint=automatic)
    state, _ = starting_point(config, loop.inputs, str(folder))
    files.cut(folder, state.get("positions", {}))
    return state


def play(rng: random.Random, root: Path) -> None:
    """A run of several sessions."""
    num_prompts = rng.choice([1, 4, 30])
    prompts = [Prompt(prompt_id=i, text="", token_ids=(i, 0)) for i in range(num_prompts)]
    fixed = {
        "num_steps": rng.randint(2, 5),
        "evaluate_every": rng.choice([0, 1, 3]),
        "num_held_out": rng.choice([0, 3]),
        "prompts": prompts,
        "num_epochs": rng.choice([0, 0, 0.5, 2.5]),
        "repeat_share": rng.choice([1.0, 0.3]),
    }
    if fixed["num_held_out"] and rng.random() < 0.7:
        patience = rng.choice([0, 1, 2]) if fixed["evaluate_every"] else 0
        fixed |= {"best": "accuracy", "keep": rng.choice([1, 2, 0]), "patience": patience}
    numbers = (fixed[name] for name in ("num_held_out", "num_steps", "evaluate_every"))
    history = History(prompts, *numbers, fixed.get("patience"))
    folder, state = root / "0", dict[str, Any]()
    folder.mkdir()
    for number in range(1, MOST_SESSIONS + 1):
        options = fixed | {
            "groups_per_step": rng.choice([1, 2]),
            "parts": rng.choice(["dynamic", "batch"]),
            "rollouts_per_prompt": rng.choice([2, 3]),
            "drop_share": rng.choice([0.0, 0.3, 0.5]),
            "keep_rollouts": rng.choice([0.0, 0.4, 1.0]),
            "most_conversations": 1,
        }
        loop = draw(rng, **options, state=state, storage=WatchedStorage(folder))
        step = rng.randint(0, fixed["num_steps"] - loop.trainer.version)
        after_s = rng.choice([0.01, 0.3] if step else [0.2, 2.0, 10.0]) * rng.random()
        if number == MOST_SESSIONS:  # it ends by itself
            after_s = 2 * LIMIT_S
        session = Session(
            loop=loop,
            folder=folder,
            ending=rng.choice(ENDINGS),
            step=loop.trainer.version + step if step else 0,
            after_s=after_s,
            killed=root / str(number),
        )
        run(session.run(rng))
        history.add(loop)
        if not session.is_ended:
            break
        if session.ending == "kill":
            folder = root / str(number)
            for name in rng.sample([ARCHIVE, KEPT, METRICS_FILE], rng.randint(0, 3)):
                if (folder / name).exists():
                    with (folder / name).open("ab") as file:
                        file.write(UNFINISHED)
        history.check_all(folder)
        before, state = state, resume(loop, folder)
        assert before.get("version", 0) <= state.get("version", 0) <= loop.trainer.version
        saved = state.get("version", 0)
        is_between = steps_before(loop, saved)[1:] == (0, 0) or saved == loop.saver.last
        assert is_between or session.ending != "kill", "saved amid a batch"
        if session.ending in SAVING:
            assert state.get("version", 0) == loop.trainer.version, "what was learnt is saved"
        history.cut(state)
    check(loop)
    history.check_all(folder)
    last = loop.trainer.version
    lines = history.check_lines(read_lines(folder, ARCHIVE))
    history.check_kept(lines, read_lines(folder, KEPT))
    history.check_steps(lines, last)
    evaluated = {line["version"] for line in lines if line["outcome"] == "evaluated"}
    is_evaluated = not history.num_held_out or max(evaluated, default=-1) == last
    has_no_step = loop.gate.ended and last == loop.state.get("version", 0)
    assert is_evaluated or has_no_step  # see `check`
    *_, is_over = best_of(history, lines, last)
    why = loop.gate.ended
    assert why if is_over else not why.startswith(EVALUATION)


@searched(few=40, many=4000)
def test_whenever_a_run_is_ended_its_sessions_together_do_everything_once(
    seeds: list[int],
) -> None:
    for seed in seeds:
        with case(seed), tempfile.TemporaryDirectory() as folder:
            play(random.Random(seed), Path(folder))
