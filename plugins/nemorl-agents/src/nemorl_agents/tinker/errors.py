"""ApiError: a request that is refused at once; and the words for one whose work failed, which its future carries."""

from __future__ import annotations

from typing import Any, Literal

from nemorl.errors import DataError, UsageError
from starlette.responses import JSONResponse, Response

Category = Literal["user", "server", "unknown"]
"""Whose fault a failure is, as clients are told it."""


class ApiError(UsageError):
    """A request that gets a status for an answer, and no future."""

    def __init__(self, status: int, message: str, *, fix: str | None = None, may_retry: bool = False) -> None:
        """
        Args:
            status: Of HTTP. Never 409: the SDK would send the request again for five minutes. 410 says that a session
                or a request is gone for good.
            message: For the client; nothing of other clients may be in it.
            fix: What the client can do.
            may_retry: The same request may succeed later.
        """
        super().__init__(message, fix=fix)
        self.status, self.may_retry = status, may_retry

    @property
    def text(self) -> str:
        return f"{self.message}: {self.fix}" if self.fix else self.message


def missing(what: str, name: str) -> ApiError:
    """The answer about what is not there, and about what belongs to another client."""
    return ApiError(404, f"there is no {what} {name[:200]}", fix="names are those that this server gave to this key")


def ended(session: str, reason: str) -> ApiError:
    """The answer to whoever goes on with a session that has ended."""
    return ApiError(410, f"session {session} has ended ({reason})", fix="make a new ServiceClient; checkpoints remain")


def failure_of(error: Exception) -> tuple[str, Category]:
    """What a future says of an exception. Of one that is the server's fault, its class and message without a trace."""
    if isinstance(error, UsageError | DataError):
        return f"{error.message}: {error.fix}" if error.fix else error.message, "user"
    return f"{type(error).__name__}: {error}"[:2000], "server"


def refusal(error: ApiError) -> Response:
    """The response for a request that is refused, with the header by which the SDK knows not to send it again."""
    text = error.text.encode(errors="replace").decode()  # a name in it may be no Unicode
    body: dict[str, Any] = {"error": text, "detail": text}
    headers = {"x-should-retry": "true" if error.may_retry else "false"}
    if error.status == 413:
        headers["connection"] = "close"
    return JSONResponse(body, status_code=error.status, headers=headers)
