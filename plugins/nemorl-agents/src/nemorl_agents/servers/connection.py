"""HTTP to one server: JSON to and fro, every failure either the server's absence or an error that says what to do.

Keys come from an environment variable and appear in no message. Redirects are refused, as by every client of
:mod:`nemorl_rl.serving.http_clients`: weights must not go where nobody sent them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import httpx2
from nemorl.errors import BackendError
from nemorl_rl.serving.http_clients import RedirectRefusedError, ReplyTooLargeError, http_client

if TYPE_CHECKING:
    from nemorl_agents.servers.config import ServerConfig

HEALTH_TIMEOUT_S = 5.0
"""A server that serves answers this in milliseconds, also under load."""
QUOTED_CHARACTERS = 400
"""Of a server's own words in a message."""


class GoneError(Exception):
    """A server that cannot be reached, hangs or fails. Another may do its work."""

    def __init__(self, message: str, *, hangs: bool = False, status: int | None = None) -> None:
        super().__init__(message)
        self.hangs = hangs
        """It did not answer in time"""
        self.status = status
        """Of its answer, where there was one: 500 and above"""


class Connection:
    """One server. Used from one event loop."""

    def __init__(self, url: str, options: ServerConfig, command: str) -> None:
        """
        Args:
            url: Its address.
            options: Time limits, and where the key is.
            command: What would start a server that fits, for messages.
        """
        self.url, self._command = url.rstrip("/"), command
        self._key_name = options.api_key_env
        self._client = http_client(
            self.url,
            timeout_s=options.timeout_s,
            headers=_key_header(options.api_key_env),
            authority=options.tls_ca,
            keepalive=options.max_concurrency,
        )

    async def get(self, path: str) -> Any:
        """
        Raises:
            GoneError: There is no server, or it does not answer in time.
            BackendError: It refuses.
        """
        return await self._call("GET", path)

    async def post(self, path: str, body: Mapping[str, Any] | None = None, **query: str) -> Any:
        """As ``get``."""
        return await self._call("POST", path, json=body, params=query or None)

    async def is_healthy(self, path: str) -> bool:
        """It serves requests."""
        try:
            response = await self._client.get(path, timeout=HEALTH_TIMEOUT_S)
        except (httpx2.HTTPError, httpx2.InvalidURL):
            return False
        return response.status_code == httpx2.codes.OK

    async def close(self) -> None:
        await self._client.aclose()

    async def _call(self, method: str, path: str, **content: Any) -> Any:
        try:
            response = await self._client.request(method, path, **content)
        except RedirectRefusedError as error:
            fix = "give the final address in generation.backend.urls"
            raise BackendError(f"{self.url}{path}: {error}", fix=fix) from None
        except ReplyTooLargeError as error:
            raise BackendError(f"{self.url}{path}: {error}") from None
        except httpx2.TimeoutException:
            raise GoneError(f"{self.url}{path} did not answer in time", hangs=True) from None
        except httpx2.TransportError as error:
            raise GoneError(f"{self.url}: {type(error).__name__}{f': {error}' if str(error) else ''}") from None
        text = response.content.decode("utf-8", errors="replace")
        if response.is_success:
            return self._parsed(path, text)
        if response.is_server_error:
            said = f"{self.url}{path} answered {response.status_code}: {_words(text)}"
            raise GoneError(said, status=response.status_code)
        raise self._refused(path, response.status_code, text)

    def _parsed(self, path: str, text: str) -> Any:
        try:
            return json.loads(text) if text else None
        except ValueError:
            fix = "generation.backend.engine must name the software behind generation.backend.urls"
            raise BackendError(f"{self.url}{path} answered no JSON: {_words(text)}", fix=fix) from None

    def _refused(self, path: str, status: int, text: str) -> BackendError:
        said = _words(text)
        if status == 401 or (status == 403 and "disabled" not in text):
            name = self._key_name
            given = f"the key in the environment variable {name}" if name else "requests without a key"
            fix = f"put the server's key into {name}" if name else "set generation.backend.api_key_env"
            return BackendError(f"{self.url} refuses {given} ({status})", fix=fix)
        if status in (403, 404, 405):
            return BackendError(f"{self.url} has no {path} ({status}: {said})", fix=f"start it with: {self._command}")
        return BackendError(f"{self.url}{path} refused a request ({status}): {said}")


def _key_header(name: str | None) -> dict[str, str]:
    if name is None:
        return {}
    key = os.environ.get(name)
    if not key:
        fix = f"export {name}=…, where the run's generation worker starts"
        raise BackendError(f"generation.backend.api_key_env: the environment variable {name} is not set", fix=fix)
    return {"Authorization": f"Bearer {key}"}


def _words(text: str) -> str:
    """A server's own words, short and on one line."""
    try:
        found = json.loads(text)
        found = found.get("error", found) if isinstance(found, dict) else found
        text = str(found.get("message", found)) if isinstance(found, dict) else str(found)
    except ValueError:
        pass
    return " ".join(text.split())[:QUOTED_CHARACTERS] or "nothing"
