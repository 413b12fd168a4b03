"""`python -m llamarl` is the `llamarl` command."""

from llamarl.main import program

program()
