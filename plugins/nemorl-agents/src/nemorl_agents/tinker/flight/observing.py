"""Flight: whom a server tells what has run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from nemorl_agents.tinker.records import Records, Request


class Flight(Protocol):
    """Told of requests in the order in which they ran; of samples maybe by another thread. Raises nothing."""

    def open(self, folder: Path, records: Records) -> None:
        """Begin, for the server of a folder and its journal."""

    def ran(self, request: Request, answer: bytes) -> None:
        """A request of a model has run, or has been run again after a kill."""

    def sampled(self, answers: Sequence[tuple[Request, bytes]]) -> None:
        """Requests of samplers were answered by one call."""

    def end(self, model_id: str, status: Mapping[str, Any], save: Callable[[Path], None]) -> None:
        """A model's session has ended so; ``save`` writes its state into a folder."""

    def close(self) -> None:
        """The server ends; its models go on with the next one."""


class NoFlight:
    """Keeps nothing."""

    def open(self, folder: Path, records: Records) -> None: ...

    def ran(self, request: Request, answer: bytes) -> None: ...

    def sampled(self, answers: Sequence[tuple[Request, bytes]]) -> None: ...

    def end(self, model_id: str, status: Mapping[str, Any], save: Callable[[Path], None]) -> None: ...

    def close(self) -> None: ...
