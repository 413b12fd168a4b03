"""What is shown of an error in user code, or of a value.

Owns: which frames are left out. Does not own: when an error is shown, or where. Invariant: it holds
the user's own lines and those of libraries that they call, and none of this package.
"""

import reprlib
import traceback
from typing import Any

from llamarl import task_file

MAX_CHARS = 8000


class InvalidReturnError(ValueError):
    """User code returned what it must not; the text follows "what it returns must"."""


def user_traceback(error: BaseException, *own_files: str) -> str:
    """The traceback of `error` without the frames of `own_files` and of task_file.py."""
    hidden = {task_file.__file__, *own_files}
    report = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = report
    while part is not None:
        frames = [frame for frame in part.stack if frame.filename not in hidden]
        part.stack = traceback.StackSummary.from_list(frames)
        part = part.__cause__ or part.__context__
    lines = report.format() if report.stack else report.format_exception_only()
    text = "".join(lines).rstrip()
    return text if len(text) <= MAX_CHARS else "..." + text[-MAX_CHARS:]


def shown(value: Any) -> str:
    """The value on one short line, however large it is."""
    return " ".join(reprlib.repr(value).split())
