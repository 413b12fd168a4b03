"""What a console shows while large files are tokenised."""

from __future__ import annotations

import asyncio
import io

import pytest
from rich.console import Console

from llamarl.metrics.rendering import tokenizing_bar


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_terminal_gets_a_bar_that_goes_and_every_console_one_line(is_terminal: bool) -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=is_terminal, width=80, _environ={"TERM": "xterm"})
    with tokenizing_bar(console) as show:
        for num_done in range(4):
            show("prompts.jsonl", num_done, 3)
    shown = text.getvalue()
    assert ("tokenizing" in shown) == is_terminal
    assert "tokenized prompts.jsonl in 0.0 s" in shown.splitlines()[-1]


def test_nothing_is_said_where_nothing_was_tokenised() -> None:
    text = io.StringIO()
    with tokenizing_bar(Console(file=text, force_terminal=True)):
        pass
    assert text.getvalue() == ""


def test_ctrl_c_amid_the_work_is_not_kept_waiting() -> None:
    shown: list[int] = []

    async def work() -> None:
        task = asyncio.current_task()
        assert task is not None
        with tokenizing_bar(Console(file=io.StringIO())) as show:
            for num_done in range(3):
                show("prompts.jsonl", num_done, 3)
                shown.append(num_done)
                task.cancel()  # as the handler of the signal does

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(work())
    assert shown == [0]
