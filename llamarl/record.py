"""How records travel: the pickled form of those that the controller sends by the ten thousand.

Owns: that form. Does not own: the records (`types.py`). Invariant: a copy equals its original.
"""

from operator import attrgetter
from typing import Any, TypeVar

T = TypeVar("T")


def light(cls: type[T]) -> type[T]:
    """Pickle a record as a call with its values: dataclasses' own way looks all fields up for each
    record, and takes more bytes; the controller sends tens of thousands in a step."""
    names: tuple[str, ...] = cls.__slots__  # type: ignore[attr-defined]
    values = attrgetter(*names)

    def restore(*state: Any) -> T:
        self = object.__new__(cls)
        for name, value in zip(names, state, strict=True):
            object.__setattr__(self, name, value)
        return self

    # By these pickle finds it.
    restore.__module__, restore.__qualname__ = cls.__module__, f"{cls.__qualname__}.restore"
    cls.restore = staticmethod(restore)  # type: ignore[attr-defined]
    cls.__reduce__ = lambda self: (restore, values(self))  # type: ignore[method-assign]
    return cls
