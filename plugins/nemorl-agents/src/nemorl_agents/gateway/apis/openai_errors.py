"""Errors as OpenAI words them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemorl_agents.gateway.apis.base import event
from nemorl_agents.gateway.errors import RequestError, TooLongError

TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error"}


class OpenAIErrors:
    """Of chat completions, completions and, with other events, responses."""

    def __init__(self, *, names_events: bool = False) -> None:
        """
        Args:
            names_events: Events have a name, and an error is one of its own.
        """
        self._names_events = names_events

    def body(self, error: RequestError, request_id: str) -> Mapping[str, Any]:
        facts = {
            "message": self._message(error),
            "type": TYPES.get(error.status, "invalid_request_error"),
            "param": error.param,
            "code": error.code,
        }
        return {"error": facts}

    def event(self, error: RequestError, request_id: str) -> bytes:
        if not self._names_events:
            return event(self.body(error, request_id))
        told = {"type": "error", "code": error.code, "message": self._message(error), "param": error.param}
        return event({**told, "sequence_number": 0}, "error")

    @staticmethod
    def _message(error: RequestError) -> str:
        if isinstance(error, TooLongError):
            return (
                f"This model's maximum context length is {error.limit} tokens. However, your messages resulted in "
                f"{error.prompt_tokens} tokens. Please reduce the length of the messages."
            )
        return error.text
