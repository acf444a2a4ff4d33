"""Order: requests of one model run by their numbers, which are dense; who comes early waits for the gap to close."""

from __future__ import annotations


class Order:
    """The requests of one model that wait.

    Example:
        >>> order = Order(1)
        >>> order.offer(2, "second")
        >>> order.first(), order.missing
        (None, 1)
        >>> order.offer(1, "first")
        >>> order.first()
        'first'
        >>> order.advance()
        >>> order.first()
        'second'
    """

    def __init__(self, next_seq: int) -> None:
        """
        Args:
            next_seq: Of the first request that is to run.
        """
        self.next_seq = next_seq
        self._held: dict[int, str] = {}

    def offer(self, seq: int, request_id: str) -> None:
        """Take a request in. One that has run is left alone: its answer is known."""
        if seq >= self.next_seq:
            self._held[seq] = request_id

    def first(self) -> str | None:
        """The request whose turn it is, if it is here."""
        return self._held.get(self.next_seq)

    def advance(self) -> None:
        """The first one has run."""
        del self._held[self.next_seq]
        self.next_seq += 1

    @property
    def missing(self) -> int | None:
        """The number that the others wait for, where it has not come."""
        return self.next_seq if self._held and self.next_seq not in self._held else None

    def drain(self) -> list[str]:
        """All requests that wait, which are forgotten."""
        held = [self._held[seq] for seq in sorted(self._held)]
        self._held.clear()
        return held

    def __len__(self) -> int:
        return len(self._held)
