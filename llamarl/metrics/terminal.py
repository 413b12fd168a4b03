"""The terminal's own settings while the live display is drawn. After `restore_terminal` they are
as they were found."""

import os
import sys
import termios
from typing import Any

SHOW_CURSOR = "\x1b[?25h\n"

_found: list[Any] = []  # the terminal's settings, while keys are hidden


def hide_typed_keys() -> None:
    """Keep the terminal from drawing ^C, which would shift the display by a line."""
    if _is_ours() and not _found:
        _found.extend(termios.tcgetattr(sys.stdin))
        settings = list(_found)
        settings[3] &= ~termios.ECHOCTL
        termios.tcsetattr(sys.stdin, termios.TCSANOW, settings)


def restore_terminal() -> None:
    """Undo `hide_typed_keys`."""
    if _found and _is_ours():
        termios.tcsetattr(sys.stdin, termios.TCSANOW, _found)
    _found.clear()


def leave_display() -> None:
    """Restore the terminal in a process that ends while its display is drawn."""
    restore_terminal()
    if sys.stdout.isatty():
        sys.stdout.write(SHOW_CURSOR)
        sys.stdout.flush()


def _is_ours() -> bool:
    """Whether this process may change the terminal: in the background it would be stopped."""
    try:
        return sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):  # no terminal, or no standard input at all
        return False
