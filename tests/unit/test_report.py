"""What the command line says of a run that failed."""

from __future__ import annotations

import errno
import os

import pytest

from llamarl.cli.main import _report
from llamarl.cluster import ExecutorLost
from llamarl.core.errors import NoGenerator, ReplicaLost

LOSS = ExecutorLost("generator-0", 0, "killed")


def test_a_lost_process_is_named_in_lines_without_a_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    loss = "lost executor generator-0 rank 0: killed"
    last, replica = NoGenerator("no generator took version 7"), ReplicaLost("no answer")
    last.__cause__, replica.__cause__ = replica, LOSS
    alone = NoGenerator("every generator replica is lost")
    for error, words in (
        (LOSS, loss),
        (last, f"no generator took version 7: {loss}"),
        (alone, "every generator replica is lost"),
    ):
        assert _report(ExceptionGroup("stages", [error]), "/runs/1") == 1
        said = capsys.readouterr().err.splitlines()
        assert said == [f"llamarl: {words}", "llamarl: its log may say why: /runs/1/logs"]


def test_a_bug_is_shown_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        raise ExceptionGroup("stages", [_bug()])
    assert _report(caught.value, "/runs/1") == 1
    said = capsys.readouterr().err
    assert "in _bug" in said
    assert said.endswith("ZeroDivisionError: division by zero\n")


def _bug() -> Exception:
    try:
        return ValueError(1 / 0)
    except ZeroDivisionError as error:
        return error


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "be on a disk with room to write to, got [Errno"),
        (errno.EFBIG, "be on a disk with room to write to, got [Errno"),
        (errno.ENOENT, "stay in its place while a run works there, got"),
    ],
)
def test_a_full_disk_or_a_removed_run_folder_is_one_line(
    number: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _report(OSError(number, os.strerror(number), "/runs/x/spans/a"), "/runs/x") == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"llamarl: run_dir must {words}")


def test_a_file_that_is_missing_elsewhere_is_a_bug() -> None:
    assert _report(FileNotFoundError(errno.ENOENT, "No such file", "/elsewhere/a"), "/runs/x") == 1
