"""RequestError: what a client did wrong, or what became of its episode, before an API puts it in its own words."""

from __future__ import annotations

from nemorl.errors import DataError, UsageError
from nemorl_rl.agents.contract import CallLimitError, ContextOverflowError, EpisodeClosedError


class RequestError(UsageError):
    """A request that gets an error for an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        fix: str | None = None,
        code: str | None = None,
        param: str | None = None,
        may_retry: bool = False,
    ) -> None:
        """
        Args:
            status: Of HTTP.
            message: For the client; nothing of other episodes may be in it.
            fix: What the client can do.
            code: A word that programs can tell it by.
            param: The field of the body that is at fault, e.g. ``messages[2].content``.
            may_retry: The same request may succeed later. The SDKs try again on 408, 409, 429 and 500 unless told not
                to (header ``x-should-retry``).
        """
        super().__init__(message, fix=fix)
        self.status, self.code, self.param, self.may_retry = status, code, param, may_retry

    @property
    def text(self) -> str:
        """One line: what happened, and the way out."""
        return f"{self.message}: {self.fix}" if self.fix else self.message

    @property
    def headers(self) -> dict[str, str]:
        return {"x-should-retry": "true", "retry-after": "1"} if self.may_retry else {"x-should-retry": "false"}


class TooLongError(RequestError):
    """The prompt leaves no room for an answer. Agents that shorten their history know it by their API's phrase."""

    def __init__(self, prompt_tokens: int, limit: int) -> None:
        super().__init__(400, f"{prompt_tokens} tokens > {limit}", code="context_length_exceeded", param="messages")
        self.prompt_tokens, self.limit = prompt_tokens, limit


def bad_field(param: str, message: str, *, fix: str | None = None, code: str = "invalid_value") -> RequestError:
    """A field that cannot be understood."""
    return RequestError(400, f"{param}: {message}", fix=fix, code=code, param=param)


def unsupported(param: str, message: str, *, fix: str) -> RequestError:
    """A field that is understood and cannot be served."""
    return bad_field(param, message, fix=fix, code="unsupported_parameter")


def closed_error() -> RequestError:
    """The episode has ended."""
    return RequestError(
        409, "this episode has ended", fix="call the model before the agent ends", code="episode_closed"
    )


def as_request_error(error: Exception) -> RequestError:
    """The client's error for an exception. Of one that is not its own fault it learns the class alone: a message may
    hold what belongs to other episodes, and the driver has it."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ContextOverflowError):
        return TooLongError(error.prompt_tokens, error.limit)
    if isinstance(error, CallLimitError):
        return RequestError(429, error.message, fix=error.fix, code="call_limit_reached")
    if isinstance(error, EpisodeClosedError):
        return closed_error()
    if isinstance(error, DataError):
        return RequestError(400, error.message, fix=error.fix, code="invalid_messages", param="messages")
    return RequestError(500, f"the policy could not answer ({type(error).__name__})", code="policy_failed")
