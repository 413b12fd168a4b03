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

    # A line for each value, as in a dataclass' own `__init__`: a loop takes three times as long.
    scope: dict[str, Any] = {f"put_{name}": getattr(cls, name).__set__ for name in names}
    scope |= {"cls": cls, "new": object.__new__}  # a frozen class itself refuses
    puts = [f"put_{name}(self, {name})" for name in names]
    head = f"def restore({', '.join(names)}):"
    exec("\n    ".join([head, "self = new(cls)", *puts, "return self"]), scope)
    restore = scope["restore"]

    # By these pickle finds it.
    restore.__module__, restore.__qualname__ = cls.__module__, f"{cls.__qualname__}.restore"
    cls.restore = staticmethod(restore)  # type: ignore[attr-defined]
    cls.__reduce__ = lambda self: (restore, values(self))  # type: ignore[method-assign]
    return cls
