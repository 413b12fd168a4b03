"""The executor that answers turns, with real processes and a real storage unit."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamarl.config import DataConfig, EnvironmentConfig
from llamarl.dataflow.task_stages import check_task
from llamarl.environments.contained import ProgramLimits
from llamarl.episode import EpisodeState, TurnResult, last_turn
from llamarl.errors import UserCodeError
from llamarl.executors import environment as executor_of
from llamarl.executors.environment import EnvironmentExecutor
from llamarl.executors.specs import EnvironmentSpec
from llamarl.metrics.span import Spans
from llamarl.types import (
    EPISODE_REWARD,
    FINISH_CODES,
    GENERATOR_LOGPROBS,
    NO_VERSION,
    PROMPT_IDS,
    RESPONSE_IDS,
    SAMPLING,
    TOKEN_VERSIONS,
    FinishReason,
    Prompt,
    StageStatus,
    finish_reason,
)
from tests.fakes import WatchedStorage
from tests.unit import chat_templates as templates

MAX_TOKENS = 400
TASK = '''
import asyncio, os, time

class Env:
    def reset(self, start=0, hangs=False, **row):
        self.total = start
        if hangs:
            time.sleep(1000)
        return row.get("more")

    def add(self, amount: int) -> int:
        """Adds.

        Args:
            amount: how much
        """
        self.total += amount
        return self.total

    def say(self, text: str) -> str:
        """Says it.

        Args:
            text: what
        """
        return text

    def hang(self) -> str:
        """Hangs."""
        time.sleep(1000)

    async def hang_softly(self) -> str:
        """Hangs, as a coroutine."""
        await asyncio.sleep(1000)

    def die(self) -> str:
        """Ends the process."""
        os._exit(3)

    def get_reward(self):
        return "bad" if self.total < 0 else float(self.total)

environment = Env
'''


class Setting:
    """An executor, its storage, and what it answers."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.tokenizer = templates.write_tokenizer(folder, templates.QWEN)
        self.storage = WatchedStorage()
        _, kinds = check_task(TASK, [], [], tools=["task"])
        options = {"tools": ["task"], "timeout_s": 5.0, "max_failure_rate": 1.0} | config
        spec = EnvironmentSpec(
            config=EnvironmentConfig(**options),
            kinds=kinds,
            limits=ProgramLimits(),
            task_source=TASK,
            data=DataConfig(prompts="x", chat=True, max_prompt_tokens=4096),
            tokenizer=str(folder),
            context=600,
            storage=self.storage,
        )
        spans = Spans("environment", None)
        self.executor = EnvironmentExecutor(spec, rank=0, num_ranks=1, spans=spans)
        self.number = self.received = 0

    async def ask(self, *turns: tuple[int, Prompt | None]) -> dict[int, TurnResult]:
        """The results of these turns, by row."""
        items = [(row, self.number + i, each) for i, (row, each) in enumerate(turns)]
        self.number += len(turns)
        await self.executor.submit(items)
        found: dict[int, TurnResult] = {}
        while len(found) < len(turns):
            first, results = await self.executor.collect(self.received)
            self.received = first + len(results)
            found |= {each.row_id: each for each in results}
        assert {each.number for each in found.values()} == {number for _, number, _ in items}
        return found

    async def begin(self, row: int, **fields: Any) -> TurnResult:
        return (await self.ask((row, self.prompt(**fields))))[row]

    async def turn(self, row: int) -> TurnResult:
        return (await self.ask((row, None)))[row]

    def prompt(self, **fields: Any) -> Prompt:
        row = {"question": "q", **fields}
        text = self.tokenizer.render_chat([{"role": "user", "content": "q"}])
        ids = tuple(self.tokenizer.encode(text, special=False))
        return Prompt(prompt_id=1, text=text, token_ids=ids, fields=row)

    def write(self, row: int, text: str, reason: FinishReason = FinishReason.TURN) -> None:
        """Let a generator add this to a row."""
        ids = np.array(self.tokenizer.encode(text, special=False), np.int32)
        before = self.storage.rows.get(row, {})
        sampling = np.array([1, 0, 1, MAX_TOKENS, 5, FINISH_CODES[reason]], np.float64)
        added = {
            RESPONSE_IDS: ids,
            GENERATOR_LOGPROBS: np.full(len(ids), -0.5, np.float32),
            TOKEN_VERSIONS: np.full(len(ids), 3, np.int32),
        }
        empty = np.empty(0, np.int32)
        cells = {n: np.concatenate([before.get(n, empty), more]) for n, more in added.items()}
        cells = {name: cell.astype(added[name].dtype) for name, cell in cells.items()}
        prompt = np.arange(1, 11, dtype=np.int32)
        self.storage.put({row: {PROMPT_IDS: prompt, **cells, SAMPLING: sampling}})

    def finish(self, row: int) -> FinishReason:
        return finish_reason(self.storage.rows[row][SAMPLING])


def call(tool: str, arguments: str = "{}") -> str:
    body = f'{{"name": "{tool}", "arguments": {arguments}}}'
    return f"<tool_call>\n{body}\n</tool_call><|im_end|>"


ADD = call("add", '{"amount": 2}')
Work = Callable[[Setting], Awaitable[None]]


@contextmanager
def running(folder: Path, **config: Any) -> Iterator[Callable[[Work], None]]:
    def run(work: Work) -> None:
        async def main() -> None:
            setting = Setting(folder, **config)
            await setting.executor.start()
            try:
                await work(setting)
            finally:
                await setting.executor.close()

        asyncio.run(main())

    yield run


def test_an_episode_from_its_reset_to_its_reward(tmp_path: Path) -> None:
    async def work(setting: Setting) -> None:
        begun = await setting.begin(1, start=5)
        assert (begun.state, begun.prompt_ids) == (EpisodeState.GOES_ON, None)
        setting.write(1, "so " + ADD)
        before = setting.storage.rows[1]
        turn = await setting.turn(1)
        assert turn.state is EpisodeState.GOES_ON
        assert turn.numbers.items() >= {"turns": 1, "calls/add": 1, "errors/add": 0}.items()
        after, size = setting.storage.rows[1], len(before[RESPONSE_IDS])
        for name in (RESPONSE_IDS, GENERATOR_LOGPROBS, TOKEN_VERSIONS):
            assert after[name][:size].tobytes() == before[name].tobytes(), "it stays as it was"
        observed = after[RESPONSE_IDS][size:]
        assert setting.tokenizer.decode_raw(observed) == (
            "\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        assert {*after[TOKEN_VERSIONS][size:]} == {NO_VERSION}
        assert {*after[GENERATOR_LOGPROBS][size:]} == {0.0}
        assert setting.finish(1) is FinishReason.SEGMENT, "partial: any replica may go on"
        assert turn.numbers["observed_tokens"] == len(observed)
        setting.write(1, "Seven.<|im_end|>")
        done = await setting.turn(1)
        assert (done.state, done.numbers["turns"]) == (EpisodeState.DONE, 2)
        row = setting.storage.rows[1]
        assert (row[EPISODE_REWARD].tolist(), setting.finish(1)) == ([7.0], FinishReason.STOP)
        last = last_turn(row[RESPONSE_IDS], row[TOKEN_VERSIONS])
        assert setting.tokenizer.decode(last) == "Seven."

    with running(tmp_path) as run:
        run(work)


def test_what_a_reset_says_is_added_to_the_prompt(tmp_path: Path) -> None:
    async def work(setting: Setting) -> None:
        begun = await setting.begin(1, more=" Begin.")
        assert begun.prompt_ids is not None
        text = setting.tokenizer.decode_raw(begun.prompt_ids)
        assert "<|im_start|>user\nq Begin.<|im_end|>" in text
        assert '"name": "add"' in text, "tools stand at the head"

    with running(tmp_path) as run:
        run(work)


def test_limits_end_an_episode_as_truncated_and_it_is_scored(tmp_path: Path) -> None:
    async def work(setting: Setting) -> None:
        await setting.ask(*((row, setting.prompt(start=row)) for row in (1, 2, 3)))
        setting.write(1, "cut off", FinishReason.LENGTH)
        setting.write(2, call("say", '{"text": "' + "x" * 300 + '"}'))
        size = len(setting.storage.rows[2][RESPONSE_IDS])
        for _ in range(2):
            setting.write(3, "<tool_call></tool_call><|im_end|>")
            found = await setting.turn(3)
        assert found.state is EpisodeState.LIMIT, "of turns"
        assert found.numbers["malformed"] == 1, "the call of the last turn is not run"
        found = await setting.ask((1, None), (2, None))
        assert {each.state for each in found.values()} == {EpisodeState.LIMIT}
        assert found[2].numbers["overlong"] == 1
        assert len(setting.storage.rows[2][RESPONSE_IDS]) == size, "nothing was appended"
        for row in (1, 2, 3):
            assert setting.finish(row) is FinishReason.LENGTH
            assert setting.storage.rows[row][EPISODE_REWARD].tolist() == [float(row)]

    with running(tmp_path, max_turns=2) as run:
        run(work)


@pytest.mark.parametrize("tool", ["hang", "hang_softly"])
def test_a_call_that_hangs_fails_its_episode_and_no_other(tmp_path: Path, tool: str) -> None:
    async def work(setting: Setting) -> None:
        await setting.ask(*((row, setting.prompt()) for row in (1, 2)))
        setting.write(1, call(tool))
        setting.write(2, ADD)
        found = await setting.ask((1, None), (2, None))
        assert found[1].status is StageStatus.HUNG
        assert "environment.timeout_s" in found[1].error
        assert (found[2].status, found[2].state) == (StageStatus.OK, EpisodeState.GOES_ON)
        setting.write(2, "Done.<|im_end|>")
        assert (await setting.turn(2)).state is EpisodeState.DONE

    with running(tmp_path, timeout_s=0.5) as run:
        run(work)


def test_all_calls_of_an_episode_together_have_a_limit(tmp_path: Path) -> None:
    async def work(setting: Setting) -> None:
        found = await setting.begin(1)
        assert found.status is StageStatus.HUNG
        assert "environment.episode_timeout_s" in found.error

    with running(tmp_path, episode_timeout_s=1e-6) as run:
        run(work)


def test_a_process_that_is_killed_loses_its_own_episodes_only(tmp_path: Path) -> None:
    async def work(setting: Setting) -> None:
        rows = range(6)
        await setting.ask(*((row, setting.prompt(start=row)) for row in rows))
        pools = {row: setting.executor._episodes[row].pool for row in rows}
        assert {*pools.values()} == {0, 1}, "spread evenly"
        os.kill(setting.executor._pools[0].pids[0], signal.SIGKILL)
        for row in rows:
            setting.write(row, ADD)
        found = await setting.ask(*((row, None) for row in rows))
        for row in rows:
            expected = EpisodeState.LOST if pools[row] == 0 else EpisodeState.GOES_ON
            assert (found[row].state, found[row].status) == (expected, StageStatus.OK)
        assert (await setting.begin(0)).state is EpisodeState.GOES_ON, "a new process took over"

    with running(tmp_path, num_workers=2) as run:
        run(work)


def test_a_tool_that_ends_its_process_loses_the_episode(tmp_path: Path) -> None:
    async def work(setting: Setting) -> None:
        await setting.begin(1)
        setting.write(1, call("die"))
        assert (await setting.turn(1)).state is EpisodeState.LOST

    with running(tmp_path) as run:
        run(work)


def test_an_episode_that_is_not_known_or_was_forgotten_is_lost(tmp_path: Path) -> None:
    async def work(setting: Setting) -> None:
        for row in (1, 2):
            setting.write(row, ADD)
        await setting.begin(2)
        await setting.executor.forget([2, 3])
        found = await setting.ask((1, None), (2, None))
        assert {each.state for each in found.values()} == {EpisodeState.LOST}

    with running(tmp_path) as run:
        run(work)


def test_a_turn_that_was_asked_for_before_its_episode_began_again_is_lost(tmp_path: Path) -> None:
    async def work(setting: Setting) -> None:
        await setting.executor.submit([(1, 7, setting.prompt())])
        await setting.executor.submit([(1, 6, None)])
        found: list[TurnResult] = []
        while len(found) < 2:
            first, results = await setting.executor.collect(setting.received)
            setting.received = first + len(results)
            found += results
        states = {each.number: each.state for each in found}
        assert states == {7: EpisodeState.GOES_ON, 6: EpisodeState.LOST}

    with running(tmp_path) as run:
        run(work)


def test_what_an_environment_does_wrong_fails_its_episode(tmp_path: Path) -> None:
    async def work(setting: Setting) -> None:
        await setting.begin(1, start=-9)
        setting.write(1, "Done.<|im_end|>")
        found = await setting.turn(1)
        assert found.status is StageStatus.INVALID
        assert "a finite number for get_reward" in found.error
        assert EPISODE_REWARD not in setting.storage.rows[1], "and has no reward"
        found = await setting.begin(2, hangs=True)
        assert found.status is StageStatus.HUNG
        more = await setting.begin(3, more="x" * 5000)
        assert more.status is StageStatus.INVALID
        assert "data.max_prompt_tokens" in more.error

    with running(tmp_path, timeout_s=0.5) as run:
        run(work)


def test_too_many_failures_end_the_run_in_one_sentence(tmp_path: Path) -> None:
    async def work(setting: Setting) -> None:
        rows = range(60)
        await setting.ask(*((row, setting.prompt(start=-1)) for row in rows))
        for row in rows:
            setting.write(row, "Done.<|im_end|>")
        with pytest.raises(UserCodeError, match=r"environment\.max_failure_rate"):
            await setting.ask(*((row, None) for row in rows))

    with running(tmp_path, max_failure_rate=0.1) as run:
        run(work)


def test_a_question_without_news_is_answered_after_the_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_of, "HEARTBEAT_S", 0.05)

    async def work(setting: Setting) -> None:
        first, results = await setting.executor.collect(0)
        assert results == []
        await setting.executor.submit([(1, 0, setting.prompt())])
        while not results:
            first, results = await setting.executor.collect(first)
        again = await setting.executor.collect(first)
        assert again == (first, results), "until the next question says that it arrived"
        assert (await setting.executor.collect(first + 1))[1] == []

    with running(tmp_path) as run:
        run(work)
