"""How a test's child process answers signals, whatever the tests themselves run under."""

import signal


def restore_ctrl_c() -> None:
    """For Popen's preexec_fn: a shell's background jobs, and all that they start, ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
