"""Which errors of an environment are failures of what it depends on, and no mistakes of its code.

A failure ends its episode without a verdict; a mistake ends the run, for a silent zero would teach the wrong lesson.
"""

from __future__ import annotations

from nemorl.errors import ForeignError, InfrastructureError, NemorlError
from nemorl.types import Outcome, Score

CLIENTS = frozenset(
    {
        "aiohttp", "anthropic", "botocore", "docker", "grpc", "httpcore", "httpcore2", "httpx", "httpx2", "kubernetes",
        "openai", "ray", "redis", "requests", "urllib", "urllib3", "websockets", "http", "socket", "ssl", "paramiko",
        "asyncpg",
    }
)  # fmt: skip
"""Packages whose errors tell of a connection, a service or a machine."""
MISTAKES = frozenset(
    {"InvalidURL", "UnsupportedProtocol", "InvalidSchema", "MissingSchema", "LocationParseError", "BadRequestError",
     "AuthenticationError", "PermissionDeniedError", "NotFoundError", "UnprocessableEntityError"}
)  # fmt: skip
"""Their errors that would come again: an address or a key that is wrong."""
LATER = frozenset({408, 409, 425, 429})
"""HTTP's refusals that a later request may not meet."""
MAX_CAUSE = 200
"""Characters of an error's text that are kept."""


def failure(error: object, what: str) -> Score | None:
    """The score of an episode in which something it depends on failed; ``None``: the error is a mistake, or no error.

    Args:
        error: What was raised. The errors that it was raised from are looked at as well.
        what: The part of the episode that raised it, e.g. ``reset``.

    Example:
        >>> failure(ConnectionRefusedError("node3 refused"), "reset").cause
        'reset: ConnectionRefusedError: node3 refused'
        >>> failure(KeyError("answer"), "score") is None
        True
    """
    if not isinstance(error, Exception) or not _tells_of_infrastructure(error):
        return None
    text = " ".join(str(error).split())[:MAX_CAUSE]
    return Score(0.0, valid=False, outcome="infrastructure", cause=f"{what}: {type(error).__name__}: {text}")


def score_of(error: Exception, what: str) -> Score:
    """:func:`failure` for an ``except`` block: a mistake is raised as it is."""
    score = failure(error, what)
    if score is None:
        raise error
    return score


def late(metric: str, *, by_policy: bool) -> Score:
    """The score of an episode that was ended at a deadline.

    Args:
        metric: Its name among the environment's metrics.
        by_policy: Whose doing it was.
    """
    outcome: Outcome = "policy_timeout" if by_policy else "environment_timeout"
    return Score(0.0, metrics={metric: 1.0}, valid=by_policy, outcome=outcome, cause=metric)


def _tells_of_infrastructure(error: BaseException) -> bool:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, InfrastructureError):
            return True
        if _would_come_again(current):
            return False
        if isinstance(current, ConnectionError | TimeoutError):
            return True
        if any(kind.__module__.partition(".")[0] in CLIENTS for kind in type(current).__mro__):
            return True
        current = current.__cause__ or current.__context__
    return False


def _would_come_again(error: BaseException) -> bool:
    """It is a mistake of whoever asks, or an error of the run's own, which its workers are recovered from."""
    if isinstance(error, NemorlError):
        return not isinstance(error, ForeignError)
    # Clients say the status of HTTP in one of these ways: httpx and requests, aiohttp, urllib.
    holders = ((getattr(error, "response", None), "status_code"), (error, "status"), (error, "code"))
    statuses = (getattr(holder, name, None) for holder, name in holders)
    status = next((each for each in statuses if isinstance(each, int)), 0)
    return (400 <= status < 500 and status not in LATER) or type(error).__name__ in MISTAKES
