"""An executor that answers turns at its socket, for tests, with the environment of its task.py."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from llamarl.core.config import DataConfig, EnvironmentConfig
from llamarl.core.records import Prompt, TurnItem, TurnResult
from llamarl.metrics.span import Spans
from llamarl.scoring.definition import Kinds
from llamarl.scoring.environment import EnvironmentLink, EnvironmentSpec, EnvironmentWorker
from llamarl.scoring.sandbox.containers import ProgramLimits
from llamarl.scoring.stages import check_task
from tests.model import chat_templates as templates

TASK = '''
import asyncio, time

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

    def get_reward(self):
        return "bad" if self.total < 0 else float(self.total)

environment = Env
'''


@functools.cache
def kinds_of(task: str) -> Kinds:
    """What episodes take turns with; a process of its own looks, and imports torch for it."""
    return check_task({"task.py": task}, [], [], tools=["task"])[1]


class Setting:
    """An executor, and what it answers at its socket."""

    def __init__(self, folder: Path, task: str = TASK, **config: Any) -> None:
        self.tokenizer = templates.write_tokenizer(folder, templates.QWEN)
        kinds = kinds_of(task)
        options = {"tools": ["task"], "timeout_s": 5.0, "max_failure_rate": 1.0} | config
        self.path = str(folder / "sockets" / "0")
        spec = EnvironmentSpec(
            config=EnvironmentConfig(**options),
            kinds=kinds,
            limits=ProgramLimits(),
            task_source={"task.py": task},
            data=DataConfig(prompts="x", chat=True, max_prompt_tokens=4096),
            tokenizer=str(folder),
            socket=self.path,
        )
        spans = Spans("environment-0", None)
        self.executor = EnvironmentWorker(spec, rank=0, num_ranks=1, spans=spans)
        self.link = self.new_link()

    def new_link(self) -> EnvironmentLink:
        return EnvironmentLink("environment-0", self.executor, self.path)

    async def begin(self, row: int, attempt: int = 0, **fields: Any) -> TurnResult:
        prompt = self.prompt(**fields)
        item = TurnItem(row_id=row, attempt=attempt, prompt=prompt, room=400)
        return await self.link.answer(item)

    async def open(self, row: int, conversation: int, room: int = 400) -> TurnResult:
        """The next conversation of an agent, or the end of its episode."""
        item = TurnItem(row_id=row, attempt=0, conversation=conversation, room=room)
        return await self.link.answer(item)

    async def turn(
        self, row: int, text: str, attempt: int = 0, room: int = 400, **more: Any
    ) -> TurnResult:
        ids = tuple(self.tokenizer.encode(text, special=False))
        turn = TurnItem(row_id=row, attempt=attempt, ids=ids, room=room, **more)
        return await self.link.answer(turn)

    async def begin_all(self, rows: Iterable[int], **fields: Any) -> list[TurnResult]:
        return await asyncio.gather(*(self.begin(row, start=row, **fields) for row in rows))

    def prompt(self, **fields: Any) -> Prompt:
        row = {"question": "q", **fields}
        text = self.tokenizer.render_chat([{"role": "user", "content": "q"}])
        ids = tuple(self.tokenizer.encode(text, special=False))
        return Prompt(prompt_id=1, text=text, token_ids=ids, fields=row)


def call(tool: str, arguments: str = "{}") -> str:
    body = f'{{"name": "{tool}", "arguments": {arguments}}}'
    return f"<tool_call>\n{body}\n</tool_call><|im_end|>"


ADD = call("add", '{"amount": 2}')


@asynccontextmanager
async def playing(folder: Path, **config: Any) -> AsyncIterator[Setting]:
    """An executor that is started, and closed afterwards."""
    setting = Setting(folder, **config)
    await setting.executor.start()
    try:
        yield setting
    finally:
        setting.link.close()
        await setting.executor.close()
