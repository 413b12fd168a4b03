"""`python -m llamarl` is the `llamarl` command."""

from llamarl.cli.main import program

program()
