"""The oracle of writes that several clients ask for at once: which values there may be after what was told.

A write that was told to be kept rules out those that had ended before it began. One that was never answered,
since the server was killed, may be there or not.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True, eq=False)
class Asked:
    """A write: the value of each key it writes, and when it began and ended.

    From ``kept_from`` on it or a later one must be stored, from ``shown_from`` on readers must see that.
    """

    values: Mapping[Hashable, Any]
    began: float
    ended: float = math.inf
    kept_from: float = math.inf
    shown_from: float = math.inf


class Acknowledged:
    """What was asked for and told; a key that was never written has the value None."""

    def __init__(self) -> None:
        self._writes = defaultdict[Hashable, list[Asked]](list)
        self._clock = itertools.count(1)
        self._changing = threading.Lock()

    def now(self) -> int:
        """Return a time, later than all before it."""
        return next(self._clock)

    @property
    def keys(self) -> list[Hashable]:
        """All keys that a write was asked for."""
        with self._changing:
            return list(self._writes)

    def ask(self, values: Mapping[Hashable, Any]) -> Asked:
        """Note a write before it is sent."""
        asked = Asked(values=values, began=self.now())
        with self._changing:
            for key in values:
                self._writes[key].append(asked)
        return asked

    def keep(self, asked: Asked, *, is_shown: bool) -> None:
        """Note that a write was acknowledged, and whether readers find it now."""
        asked.ended = asked.kept_from = self.now()
        if is_shown:
            asked.shown_from = asked.ended

    def lose(self, asked: Asked) -> None:
        """Note that a write was not answered and cannot happen any more."""
        asked.ended = min(asked.ended, self.now())

    def refuse(self, asked: Asked) -> None:
        """Note that a write did not happen."""
        with self._changing:
            for key in asked.values:
                self._writes[key].remove(asked)

    def see(self, key: Hashable, value: Any) -> None:
        """Note that a reader has found a value that only one write has: no later one may find an older."""
        now = self.now()
        with self._changing:
            for asked in self._writes[key]:
                if asked.values[key] == value:
                    asked.kept_from = min(asked.kept_from, now)
                    asked.shown_from = min(asked.shown_from, now)

    def possible(self, key: Hashable, since: float, until: float, *, is_reader: bool) -> set[Any]:
        """Return the values one may find that looks between two times: a reader, or a look at the disk."""
        with self._changing:
            writes = [asked for asked in self._writes[key] if asked.began <= until]
        must = [
            asked.began for asked in writes if (asked.shown_from if is_reader else asked.kept_from) <= since
        ]
        last = max(must, default=0.0)
        found = {asked.values[key] for asked in writes if asked.ended >= last}
        return found if must else {None, *found}
