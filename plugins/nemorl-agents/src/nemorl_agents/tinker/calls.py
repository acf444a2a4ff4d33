"""Calls: one HTTP request whose client is known, and the table of what is served under which path."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from nemorl.errors import DataError

from nemorl_agents.tinker.errors import ApiError
from nemorl_agents.tinker.wire.bodies import Body, body_of

B = TypeVar("B", bound=Body)
MOST_LISTED = 1000
"""Rows of one page."""


@dataclass(frozen=True)
class Call:
    """One request."""

    owner: str
    """The name of the client's key."""
    raw: bytes
    path: Mapping[str, str]
    """Parts of the path by their names."""
    query: Mapping[str, str]
    base_url: str
    """Where the client reached this server."""

    def body(self, kind: type[B]) -> B:
        """The JSON body.

        Raises:
            ApiError: It is otherwise.
        """
        try:
            return body_of(kind, self.raw)
        except DataError as error:
            raise ApiError(422, error.message, fix=error.fix) from error

    def number(self, name: str, default: int) -> int:
        """A number of the query.

        Raises:
            ApiError: It is none, or negative.
        """
        text = self.query.get(name, str(default))
        if not text.isdecimal():
            raise ApiError(422, f"{name}: {text[:50]!r} is no number")
        return int(text[:18])

    def page(self, default: int = 20) -> tuple[int, int]:
        """(limit, offset) of the query."""
        return min(self.number("limit", default), MOST_LISTED), self.number("offset", 0)


Handler = Callable[[Call], Awaitable[Any]]
"""Returns JSON, a response of starlette's, or None for an empty answer"""


@dataclass(frozen=True)
class Endpoint:
    """What is served under one path below ``/api/v1``."""

    method: str
    path: str
    handler: Handler
