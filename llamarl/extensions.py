"""What other installed packages add to the tables of this one.

Owns: importing the modules that they name as entry points. Does not own: the tables. Invariant: a
table loads its group once, after its own entries, so every process of a run knows the same names.
"""

from importlib.metadata import entry_points


def load_extensions(group: str) -> None:
    """Import the modules that installed packages name under this group, such as
    `llamarl.transports`; each one adds its own entries to the table. What a module raises is passed
    on, with a note that names it."""
    for entry in entry_points(group=group):
        try:
            entry.load()
        except Exception as error:
            error.add_note(f"while {entry.value}, the entry point {entry.name} of {group}, loads")
            raise
