"""The loop over demonstrations under whole combinations of options, ended at any step and resumed:
which demonstration each step is trained on, what is measured, and that storage is empty."""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from llamarl.controller.supervisor import Supervisor
from llamarl.controller.wiring import Wiring
from llamarl.core import checkpoint
from llamarl.core.config import Config
from llamarl.core.groups import Group
from llamarl.core.records import PROXIMAL_LOGPROBS, Prompt
from llamarl.metrics.span import Spans
from llamarl.planner.simulation.clock import run
from llamarl.prompts.demonstrations import WRITTEN
from llamarl.prompts.stream import PromptStream
from llamarl.recipe.prompt_inputs import as_sft, with_last_step
from llamarl.trainer.losses.sft import SFTConfig
from tests.fakes import WatchedStorage
from tests.random_search import case, searched
from tests.simulation.loop import Loop, WatchedRunLogger

LIMIT_S = 10_000.0  # of virtual time


def demonstration(number: int, rng: random.Random) -> Prompt:
    first = rng.randint(1, 3)
    end = first + rng.randint(1, 4)
    ids = tuple(rng.randint(0, 9) for _ in range(end + rng.randint(0, 2)))
    return Prompt(prompt_id=number, text="", token_ids=ids, fields={WRITTEN: [[first, end]]})


class LossLogger(WatchedRunLogger):
    """Keeps the versions whose held-out loss was measured."""

    losses: list[tuple[int, int]]

    def log_held_out(self, version: int, loss: float, num_tokens: int) -> None:
        assert loss == 0.5
        self.losses.append((version, num_tokens))


@dataclass(kw_only=True)
class SFTLoop(Loop):
    """One run on `prompts` of the real loop around a simulated trainer."""

    held_out: list[Prompt] = field(default_factory=list)
    trained: dict[int, list[int]] = field(default_factory=dict)
    """The prompt ids of each step's batch, by the version that it is trained from."""

    def _config(self) -> Config:
        config = as_sft(replace(super()._config(), algorithm=SFTConfig()))
        return with_last_step(config, len(self.prompts or []))

    async def run(self, run_dir: Path) -> None:
        self.inputs = replace(self.inputs, held_out=self.held_out)
        logger = LossLogger(self.timeline)
        logger.losses, self.run_logger = [], logger
        self.supervisor = Supervisor(self.config, self.executors)
        common = self.config, self.inputs, self.executors, str(run_dir)
        wiring = Wiring(*common, Spans("controller", None), self.state)
        loop = wiring.build_controller(self.supervisor, logger, deadline_s=self.deadline_s)
        self.gate, self.saver = loop.gate, loop.saver
        make_batch, look_ahead = loop.engines.rules.make_batch, loop.engines.look_ahead

        def note(groups: Any, version: int, oldest: int) -> Any:
            if all(group.group_id >= 0 for group in groups):
                self.trained[version] = [group.prompt.prompt_id for group in groups]
            return make_batch(groups, version, oldest)

        async def measure(groups: Sequence[Group]) -> None:
            """With log-probs, which a simulated trainer does not find."""
            await look_ahead(groups)
            rows = [row for group in groups for row in group.row_ids]
            lengths = [group.rollouts[row].num_tokens for group in groups for row in group.row_ids]
            found = [np.full(length, -0.5, np.float32) for length in lengths]
            await self.executors.storage.write(rows, {PROXIMAL_LOGPROBS: found})

        loop.engines.look_ahead = measure  # type: ignore[method-assign]
        loop.engines.rules = replace(loop.engines.rules, make_batch=note)
        try:
            async with asyncio.timeout(LIMIT_S):
                await self.supervisor.guard(loop.run())
        finally:
            await self.supervisor.close()
            await loop.engines.close()


def order_of(prompts: list[Prompt], size: int, loop: SFTLoop) -> list[list[int]]:
    """The steps of the whole run: epoch after epoch in the order of the stream, which draws none
    twice in an epoch."""
    stream = PromptStream(prompts, seed=0, shuffle=loop.config.data.shuffle)
    most = loop.num_steps * size
    if loop.num_epochs:
        most = min(most, math.ceil(loop.num_epochs * len(prompts)))
    drawn = [next(stream).prompt_id for _ in range(most // size * size)]
    for start in range(0, len(drawn), len(prompts)):
        epoch = drawn[start : start + len(prompts)]
        assert len({*epoch}) == len(epoch)
    return [drawn[i : i + size] for i in range(0, len(drawn), size)]


@searched(few=40, many=2000)
def test_every_step_learns_the_next_demonstrations_whenever_the_run_ends_and_goes_on(
    seeds: range,
) -> None:
    for seed in seeds:
        with case(seed), tempfile.TemporaryDirectory() as folder:
            search_once(random.Random(seed), Path(folder))


def search_once(rng: random.Random, folder: Path) -> None:
    size = rng.randint(1, 5)
    prompts = [demonstration(i, rng) for i in range(rng.randint(size, 20))]
    held_out = [demonstration(i, rng) for i in range(rng.choice([0, 0, 1, 7]))]
    options = {
        "groups_per_step": size,
        "num_steps": rng.randint(1, 12),
        "num_epochs": rng.choice([0.0, 0.0, 1.0, 1.5, 3.0]),
        "prompts": prompts,
        "num_held_out": len(held_out),
        "held_out": held_out,
        "evaluate_every": rng.choice([0, 1, 3]),
        "save_every": rng.choice([0, 1, 2]),
        "keep": 0,
        "tokens_per_micro_batch": rng.choice([16, 4096]),
    }
    wanted: list[list[int]] | None = None
    state: dict[str, Any] = {}
    made: dict[int, list[int]] = {}
    measured: list[int] = []
    for session in range(3):
        loop = SFTLoop(**options, state=state, storage=WatchedStorage())
        wanted = order_of(prompts, size, loop)
        if session < 2 and rng.random() < 0.5:  # ends with some step, whole
            loop.deadline_s = rng.choice([0.0, 0.5, 2.0])
        first = state.get("version", 0)
        run(loop.run(folder))
        last = loop.trainer.version
        made |= {version: ids for version, ids in loop.trained.items() if first <= version < last}
        assert [*loop.run_logger.versions] == [*range(first + 1, last + 1)]
        check_session(loop, held_out)
        measured += [version for version, _ in loop.run_logger.losses]
        if last == len(wanted):
            break
        assert loop.deadline_s < math.inf, "it ended before its last step"
        latest = checkpoint.latest(folder)
        state = checkpoint.read_state(latest) if latest is not None else {}
    if last == len(wanted):
        assert [made[version] for version in sorted(made)] == wanted
        if held_out:
            assert measured == sorted({*measured})
            assert measured[0] == 0
            assert measured[-1] == last


def check_session(loop: SFTLoop, held_out: list[Prompt]) -> None:
    """What was trained has its outcome, what was measured is whole, and no row stays."""
    num_tokens = sum(end - start for p in held_out for start, end in p.fields[WRITTEN])
    assert {each for _, each in loop.run_logger.losses} <= {num_tokens}
    found = {row: each["outcome"] for row, each in loop.storage.outcomes.items()}
    num_trained = sum(len(loop.trained[version - 1]) for version in loop.run_logger.versions)
    assert [*found.values()].count("trained") == num_trained
    assert {*found.values()} <= {"trained", "evaluated", "unused"}
    left = {row for rows, _ in loop.storage._table.groups([*found]) for row in rows}
    assert {found[row] for row in left} <= {"unused"}
