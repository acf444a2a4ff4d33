"""Access: the address and the key of one episode, and which episode a request belongs to."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from nemorl_agents.gateway.episodes import OpenEpisode
from nemorl_agents.gateway.errors import RequestError, closed_error

PREFIX = "nemorl-"
"""Prefix of all keys, so that one that leaks into a log is known for what it is."""


@dataclass(frozen=True, slots=True)
class Access:
    """How one episode's agent reaches the policy."""

    base_url: str
    """Without ``/v1``: the base URL of Anthropic's clients. OpenAI's take ``openai_base_url``."""
    api_key: str = field(repr=False)
    model: str
    """A name that is answered."""
    name: str = field(repr=False)
    """Of the episode, within the gateway."""

    @property
    def openai_base_url(self) -> str:
        return f"{self.base_url}/v1"

    def variables(self) -> Mapping[str, str]:
        """The environment variables by which OpenAI's and Anthropic's clients find the policy."""
        return {
            "OPENAI_BASE_URL": self.openai_base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url,
            "ANTHROPIC_API_KEY": self.api_key,
        }


class AccessControl:
    """Knows the open episodes, and the keys of all that ever were: a key follows from its episode's name."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._open: dict[str, tuple[OpenEpisode, str]] = {}

    def admit(self, episode: OpenEpisode, *, name: str | None = None, key: str | None = None) -> tuple[str, str]:
        """Let an episode's agent in; returns the episode's name and key.

        Args:
            episode: Newly opened.
            name: In its address. Unset: one that nobody can guess.
            key: Unset: one that nobody can guess.
        """
        name = secrets.token_urlsafe(12) if name is None else name
        key = self._key(name) if key is None else key
        self._open[name] = episode, key
        return name, key

    def dismiss(self, name: str) -> OpenEpisode | None:
        """Let nobody in any more; returns the episode, if it was open."""
        found = self._open.pop(name, None)
        return None if found is None else found[0]

    def find(self, name: str) -> OpenEpisode | None:
        """An open episode."""
        found = self._open.get(name)
        return None if found is None else found[0]

    def names(self) -> list[str]:
        return [*self._open]

    def enter(self, name: str, key: str) -> OpenEpisode:
        """The episode of a request.

        Raises:
            RequestError: The key is another's (401), the episode has ended (409), or there never was one (404).
        """
        episode, expected = self._open.get(name, (None, self._key(name)))
        is_right = hmac.compare_digest(key.encode(), expected.encode())
        if episode is not None and is_right:
            return episode
        if episode is not None:
            raise RequestError(
                401, "this key does not open this episode", fix="use the key that came with it", code="invalid_api_key"
            )
        if is_right:
            raise closed_error()
        raise RequestError(
            404, "there is no such episode", fix="use the base URL that came with the key", code="not_found"
        )

    def _key(self, name: str) -> str:
        return PREFIX + hmac.new(self._secret, name.encode(), sha256).hexdigest()
