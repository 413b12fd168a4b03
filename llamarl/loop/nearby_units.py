"""Which storage unit a group's rows go to, so that the replica that writes them is on its host.

Owns: row ids, and what is on which host. Does not own: which replica gets a group (`dispatch.py`).
Invariant: a row id is given out once, and row i lives in unit i modulo the number of units.
"""

from collections import Counter
from collections.abc import Mapping, Sequence


class RowIds:
    """Ids from `first` on, of rows that live in `num_units` units."""

    def __init__(self, first: int, num_units: int) -> None:
        self._next = {id % num_units: id for id in range(first, first + num_units)}  # by unit
        self._turn = first  # which unit is next, where it does not matter

    @property
    def end(self) -> int:
        """No id from here on was given out."""
        return max(self._next.values()) - len(self._next) + 1

    def take(self, count: int, unit: int | None = None) -> tuple[int, ...]:
        """Ids of rows in one unit; without one, of rows in one unit after the other."""
        num_units = len(self._next)
        if unit is not None:
            first, self._next[unit] = self._next[unit], self._next[unit] + count * num_units
            return tuple(range(first, self._next[unit], num_units))
        units = [turn % num_units for turn in range(self._turn, self._turn + count)]
        self._turn += count
        return tuple(row_id for each in units for row_id in self.take(1, each))


class Neighbours:
    """Replicas and storage units on the same host. `homes` has the units on each replica's host;
    none where all are on one host, for nothing needs to be near then."""

    def __init__(self, homes: Mapping[int, Sequence[int]], num_units: int) -> None:
        self._homes, self._num_units = homes, num_units
        self._num_given: Counter[tuple[int, ...]] = Counter()  # groups, by the units of a host
        self._near: dict[int, set[int]] = {}
        for replica, units in homes.items():
            for unit in units:
                self._near.setdefault(unit, set()).add(replica)

    def __bool__(self) -> bool:
        return bool(self._homes)

    def unit_of(self, replica: int) -> int:
        """A unit on its host: one after the other."""
        units = tuple(self._homes[replica])
        self._num_given[units] += 1
        return units[self._num_given[units] % len(units)]

    def near(self, row_id: int) -> set[int]:
        """The replicas on the host of the row's unit."""
        return self._near.get(row_id % self._num_units, set())
