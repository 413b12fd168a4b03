"""How records travel: the pickled form of those that the controller sends by the ten thousand.

Owns: that form. Does not own: the records (`types.py`). Invariant: a copy equals its original.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar

T = TypeVar("T")


class WireList(list[T]):
    """Records of one `light` class, which arrive as a plain list: pickled as one object, for calls
    between processes look at each object that is not Python's own."""

    def __reduce__(self) -> Any:
        if not self:
            return list, ()
        restore: Any = self[0].__reduce__()[0]
        return _restore_all, (restore, [record.__reduce__()[1] for record in self])


def _restore_all(restore: Callable[..., T], states: list[tuple[Any, ...]]) -> list[T]:
    return [restore(*state) for state in states]


def light(cls: type[T]) -> type[T]:
    """Pickle a record as a call with its values: dataclasses' own way looks all fields up for each
    record, and takes more bytes; the controller sends tens of thousands in a step."""
    names: tuple[str, ...] = cls.__slots__  # type: ignore[attr-defined]
    values = attrgetter(*names)

    setters = [getattr(cls, name).__set__ for name in names]  # a frozen class's own refuses

    def restore(*state: Any) -> T:
        self = object.__new__(cls)
        for put, value in zip(setters, state, strict=True):
            put(self, value)
        return self

    # By these pickle finds it.
    restore.__module__, restore.__qualname__ = cls.__module__, f"{cls.__qualname__}.restore"
    cls.restore = staticmethod(restore)  # type: ignore[attr-defined]
    cls.__reduce__ = lambda self: (restore, values(self))  # type: ignore[method-assign]
    return cls
