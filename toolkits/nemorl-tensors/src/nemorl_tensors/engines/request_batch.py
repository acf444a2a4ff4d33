"""A running batch of rows as an engine that answers requests: which rows are whose, and when a request has ended."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from nemorl.types import GenerationRequest

from nemorl_tensors.engines.decoding import RunningBatch
from nemorl_tensors.engines.requests import Outcome
from nemorl_tensors.engines.responses import Response


class RequestBatch:
    """The :class:`~nemorl_tensors.engines.requests.RequestEngine` over a batch of an in-process model."""

    def __init__(self, batch: RunningBatch, begin: Callable[[GenerationRequest], list[Response]]) -> None:
        """
        Args:
            batch: Without rows.
            begin: The empty responses to a request.
        """
        self._batch, self._begin = batch, begin
        self._rows: dict[int, list[Response]] = {}
        self._unfinished: dict[int, int] = {}
        """Rows of each request that have not ended."""
        self._numbers: dict[Response, int] = {}

    def add(self, requests: Mapping[int, GenerationRequest]) -> Mapping[int, Exception]:
        for number, request in requests.items():
            rows = self._begin(request)
            self._rows[number], self._unfinished[number] = rows, len(rows)
            self._numbers.update(dict.fromkeys(rows, number))
        self._batch.add(row for number in requests for row in self._rows[number])
        return {}

    def drop(self, numbers: Collection[int]) -> None:
        rows = {row for number in numbers for row in self._forget(number)}
        if self._rows:
            self._batch.drop(rows)
        else:  # whatever state a step that failed has left
            self._batch.clear()

    def step(self) -> Mapping[int, Outcome]:
        ended: dict[int, Outcome] = {}
        for row in self._batch.step():
            number = self._numbers[row]
            self._unfinished[number] -= 1
            if not self._unfinished[number]:
                ended[number] = _outcome(self._forget(number))
        return ended

    def close(self) -> None:
        self._batch.renew()

    def __iter__(self) -> Iterator[int]:
        """Numbers of the requests that have not ended."""
        return iter([*self._rows])

    def __contains__(self, number: int) -> bool:
        return number in self._rows

    def release(self, numbers: Collection[int]) -> Mapping[int, list[Response]]:
        """Let go of requests that another batch will answer: what is unfinished of them, and what is not."""
        released = {number: self._forget(number) for number in numbers}
        self._batch.release({row for rows in released.values() for row in rows if not row.is_over})
        return released

    def resume(self, released: Mapping[int, list[Response]]) -> None:
        """Take up requests where another batch has left them."""
        for number, rows in released.items():
            self._rows[number], self._unfinished[number] = rows, sum(not row.is_over for row in rows)
            self._numbers.update(dict.fromkeys(rows, number))
        self._batch.add(row for rows in released.values() for row in rows if not row.is_over)

    def _forget(self, number: int) -> list[Response]:
        rows = self._rows.pop(number, [])
        self._unfinished.pop(number, None)
        for row in rows:
            self._numbers.pop(row)
        return rows


def _outcome(rows: list[Response]) -> Outcome:
    errors = [row.error for row in rows if row.error is not None]
    return errors[0] if errors else [row.completion() for row in rows]
