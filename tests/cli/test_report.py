"""What the command line and the log say of a failed run, in tables, and of repeated failures."""

from __future__ import annotations

import errno
import logging
import os

import pytest

from llamarl.cli.graph import WIDTH, render, whole_words
from llamarl.cli.main import _report
from llamarl.cluster import ExecutorLost
from llamarl.core.errors import NoGenerator, RepeatedWarnings, ReplicaLost, UserCodeError
from llamarl.core.records import StageResult, StageStatus
from llamarl.scoring.stage_worker import FailureRate

LOSS = ExecutorLost("generator-0", 0, "killed")


def test_a_lost_process_is_named_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize("num_folders", [1, 4, 30])
def test_a_path_is_never_cut_and_lists_are_wrapped_between_words(num_folders: int) -> None:
    path = "../runs/sft_llama" * num_folders + "/export"
    columns = "prompt_ids response_ids generator_logprobs token_versions sampling"
    rows = [["infer", f"{path} (frozen)", columns], ["score", "scorer", ""]]
    text = render(["before", whole_words(("stage", "run by", "reads"), rows, 26)])
    for word in (*columns.split(), path, "(frozen)", "run by", "scorer"):
        assert any(word in line for line in text.splitlines()), word
    if num_folders == 1:
        assert max(map(len, text.splitlines())) <= WIDTH


def test_a_cell_without_words_is_an_empty_one() -> None:
    assert render([whole_words(("a", "b"), [["", "x"], ["y", ""]], 5)]) == "a  b\n   x\ny\n"


log = logging.getLogger(__name__)


def test_thousands_of_one_warning_are_a_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    warnings = RepeatedWarnings(log)
    for step in range(1418):
        warnings.warn("step %d trained nothing", step)
    assert caplog.messages == [
        "step 0 trained nothing",
        "step 9 trained nothing (10 times so far)",
        "step 99 trained nothing (100 times so far)",
        "step 999 trained nothing (1,000 times so far)",
    ]


def test_other_words_or_subjects_are_other_warnings(caplog: pytest.LogCaptureFixture) -> None:
    warnings = RepeatedWarnings(log)
    for _ in range(3):
        warnings.warn("100% of a step's tokens are masked")
        for replica in range(2):
            warnings.warn("generator %d lies", replica, about=replica)
    assert caplog.messages == [
        "100% of a step's tokens are masked",
        "generator 0 lies",
        "generator 1 lies",
    ]


def results(num_bad: int, num_good: int = 0) -> list[StageResult]:
    error = "Traceback:\nLookupError: bad"
    bad = [StageResult(row_id=i, status=StageStatus.RAISED, error=error) for i in range(num_bad)]
    return [*bad, *(StageResult(row_id=i) for i in range(num_good))]


def test_the_failure_rate_needs_results_and_forgets_what_is_long_past() -> None:
    for num_bad, num_good in ((5, 45), (45, 0)):
        failures = FailureRate(0.1, "reward", "reward.")
        failures.add(results(0, num_good))
        failures.add(results(num_bad))
    failures = FailureRate(0.1, "reward", "reward.")
    for num_bad, num_good in ((49, 0), (0, 1000), (99, 0), (1, 0)):
        failures.add(results(num_bad, num_good))
    with pytest.raises(UserCodeError, match="got 101 of the last 1000"):
        failures.add(results(1))


def test_two_causes_by_turns_are_a_line_each(caplog: pytest.LogCaptureFixture) -> None:
    failures = FailureRate(1.0, "reward", "reward.")
    for row in range(9):
        cause = ("KeyError: 'answer'", f"ValueError: {row} apples, not 'x{row}'")[row % 2]
        error = f"Traceback:\n{cause}"
        failures.add([StageResult(row_id=row, status=StageStatus.RAISED, error=error)])
    assert [text.splitlines()[-1] for text in caplog.messages] == [
        "KeyError: 'answer'",
        "ValueError: 1 apples, not 'x1'",
    ]
