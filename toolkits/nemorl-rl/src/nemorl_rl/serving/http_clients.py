"""Clients of other people's servers. Whoever calls one over HTTP gets the client here, so that three rules hold:

1. No redirect is followed: the body holds tasks and references, the headers a key, and the site admitted one address.
2. Replies are bounded by what they unpack to. They are asked for as they are (``Accept-Encoding: identity``), and one
   that comes packed all the same is refused.
3. Proxies and ``.netrc`` of the environment are not used.

Needs httpx2, the client that the packages of OpenAI and of the Model Context Protocol bring.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import httpx2

CONNECT_TIMEOUT_S = 10.0
MAX_REPLY_BYTES = 256 * 2**20
"""Of one answer: a hundred times what the longest response takes."""
UNPACKED = ("", "identity")
ASK_UNPACKED = {"Accept-Encoding": "identity"}


class RedirectRefusedError(httpx2.TransportError):
    """A server answered that what is sought lies elsewhere."""


class ReplyTooLargeError(httpx2.TransportError):
    """A server answered with more than anybody asked for, or with what unpacks to nobody knows how much."""


def http_client(
    url: str = "",
    *,
    timeout_s: float | None,
    headers: Mapping[str, str] | None = None,
    authority: Path | None = None,
    keepalive: int = 20,
    max_reply_bytes: int = MAX_REPLY_BYTES,
) -> httpx2.AsyncClient:
    """A client for one server, for use from one event loop.

    Args:
        url: Of the server: what paths of requests are added to.
        timeout_s: Longest wait for a reply to begin or to go on. ``None``: the caller has a deadline of its own.
        headers: Sent with every request, e.g. with a key.
        authority: PEM certificate of who signed the server's. Unset: those that the system trusts.
        keepalive: Most idle connections that are kept.
        max_reply_bytes: Longer replies are a :class:`ReplyTooLargeError`.

    Example:
        >>> http_client("https://node7:8000", timeout_s=5).follow_redirects
        False
    """
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=keepalive)
    wire = httpx2.AsyncHTTPTransport(verify=_verification(url, authority), limits=limits, trust_env=False)
    return httpx2.AsyncClient(
        base_url=url,
        headers={**(headers or {}), **ASK_UNPACKED},
        timeout=httpx2.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s or CONNECT_TIMEOUT_S)),
        transport=_Guarded(wire, max_reply_bytes),
        follow_redirects=False,
        trust_env=False,
    )


def read_json(url: str, *, timeout_s: float, max_reply_bytes: int = 2**20) -> Any:
    """The answer to one GET, as JSON, by the same rules. Blocks.

    Raises:
        httpx2.HTTPError: Nobody answers, or not with success.
        ValueError: It is no JSON.
    """
    with (
        httpx2.Client(timeout=timeout_s, follow_redirects=False, trust_env=False, headers=ASK_UNPACKED) as client,
        client.stream("GET", url) as response,
    ):
        _check(response)
        if not response.is_success:
            said = f"it answers {response.status_code} {response.reason_phrase}"
            raise httpx2.HTTPStatusError(said, request=response.request, response=response)
        text = bytearray()
        for part in response.iter_raw():
            text += part
            if len(text) > max_reply_bytes:
                raise ReplyTooLargeError(f"{response.url.host} answered with more than {max_reply_bytes} bytes")
    return json.loads(text)


class _Guarded(httpx2.AsyncBaseTransport):
    """Keeps the rules below everything that a client does, so that no option of a call leads round them."""

    def __init__(self, wire: httpx2.AsyncBaseTransport, most: int) -> None:
        self._wire, self._most = wire, most

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await self._wire.handle_async_request(request)
        response.request = request
        try:
            _check(response)
        except httpx2.TransportError:
            await response.aclose()
            raise
        stream = cast(httpx2.AsyncByteStream, response.stream)
        response.stream = _Bounded(stream, self._most, request.url.host)
        return response

    async def aclose(self) -> None:
        await self._wire.aclose()


def _check(response: httpx2.Response) -> None:
    host = response.request.url.host
    if response.is_redirect:
        target = urlsplit(response.headers.get("location", "")).hostname or "another path"
        raise RedirectRefusedError(
            f"{host} redirects ({response.status_code}) to {target}, which is not followed: a request carries what was "
            "meant for the address that was given"
        )
    packed = response.headers.get("content-encoding", "").strip().lower()
    if packed not in UNPACKED:
        raise ReplyTooLargeError(f"{host} answers packed ({packed}), which it was asked not to")


class _Bounded(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, most: int, host: str) -> None:
        self._stream, self._most, self._host = stream, most, host

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for part in self._stream:
            size += len(part)
            if size > self._most:
                raise ReplyTooLargeError(f"{self._host} answered with more than {self._most} bytes")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


def _verification(url: str, authority: Path | None) -> ssl.SSLContext | bool:
    if urlsplit(url).scheme == "http":
        return False  # reading the certificates takes a while, and http needs none
    return True if authority is None else ssl.create_default_context(cafile=authority)
