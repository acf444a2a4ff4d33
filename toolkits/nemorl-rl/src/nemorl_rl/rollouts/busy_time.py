"""How long at least one of several things was under way, by a clock that the caller reads."""

from __future__ import annotations


class BusyTime:
    """Busy and idle seconds since the last question.

    Example:
        >>> work = BusyTime(now_s=0.0)
        >>> work.begin(1.0)
        >>> work.begin(2.0)
        >>> work.end(3.0)
        >>> work.end(4.0)
        >>> work.taken(10.0)  # busy from 1 to 4
        (3.0, 10.0)
    """

    def __init__(self, now_s: float) -> None:
        self._asked_s = self._settled_s = now_s
        self._busy_s = 0.0
        self._under_way = 0

    def begin(self, now_s: float) -> None:
        """One more is under way."""
        self._settle(now_s)
        self._under_way += 1

    def end(self, now_s: float) -> None:
        """One less is."""
        self._settle(now_s)
        self._under_way -= 1

    def taken(self, now_s: float) -> tuple[float, float]:
        """Seconds since the last call in which something was under way, and all seconds since then."""
        self._settle(now_s)
        whole_s, busy_s = now_s - self._asked_s, self._busy_s
        self._asked_s, self._busy_s = now_s, 0.0
        return busy_s, whole_s

    def _settle(self, now_s: float) -> None:
        if self._under_way:
            self._busy_s += now_s - self._settled_s
        self._settled_s = now_s
