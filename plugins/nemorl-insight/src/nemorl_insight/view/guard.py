"""Who may ask: only pages that this server gave out, and, where others can reach it, only those who have the token.

A page of another site can make a browser send requests here, and, with a name that it lets point to this machine, read
the answers (DNS rebinding). Such requests name that site's host, and are refused by it.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, quote

from nemorl_cli.report.viewing.page import POLICY
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "nemorl-view"
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """ASGI middleware: checks of each request, and headers of each answer."""

    def __init__(
        self, app: ASGIApp, *, hosts: Collection[str] | None, token: str | None, once: set[str] | None = None
    ) -> None:
        """
        Args:
            app: What is guarded.
            hosts: Names by which requests may call this machine. ``None``: any; then there is a token.
            token: What a browser must bring, first as ``?token=``, then as a cookie. ``None``: nothing.
            once: Tokens that do as well, each for one browser; taken out when it has come.
        """
        assert hosts is not None or token is not None, "something must keep others out"
        self._app, self._hosts, self._token = app, hosts, token
        self._once = set() if once is None else once

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        answer = self._refusal(scope, headers) or self._welcome(scope)
        await (answer or self._app)(scope, receive, marked)

    def _refusal(self, scope: Scope, headers: Headers) -> PlainTextResponse | None:
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("nothing can be changed here", 405)
        if self._hosts is not None and host_name(headers.get("host", "")) not in self._hosts:
            return PlainTextResponse("this host name is not served: use the address that nemorl view printed", 421)
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return PlainTextResponse("another site may not ask", 403)
        if self._token is not None and not self._has_token(scope, headers):
            return PlainTextResponse("the token is missing: use the address that nemorl view printed", 403)
        return None

    def _welcome(self, scope: Scope) -> RedirectResponse | None:
        """Who comes with the token in the address keeps it as a cookie, and an address without it."""
        given = _token_in(scope)
        if self._token is None or given is None:
            return None
        self._once.discard(given)
        answer = RedirectResponse(quote(scope["path"]), 303)
        is_https = scope["scheme"] == "https"
        answer.set_cookie(cookie_name(scope), self._token, secure=is_https, httponly=True, samesite="strict")
        return answer

    def _has_token(self, scope: Scope, headers: Headers) -> bool:
        assert self._token is not None
        cookies: SimpleCookie = SimpleCookie()
        try:
            cookies.load(headers.get("cookie", ""))
        except CookieError:
            return False
        name = cookie_name(scope)
        given = _token_in(scope)
        kept = cookies[name].value if name in cookies else ""
        right = (self._token,) if given is None else (self._token, *self._once)
        return any(hmac.compare_digest((given or kept).encode(), each.encode()) for each in right)


def cookie_name(scope: Scope) -> str:
    """Of this server: a browser sends the cookies of a host to each of its ports."""
    server = scope.get("server")
    return f"{COOKIE}-{server[1]}" if server else COOKIE


def host_name(host: str) -> str:
    """Without the port.

    Example:
        >>> host_name("[::1]:8000"), host_name("LocalHost:80")
        ('::1', 'localhost')
    """
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    return name.lower()


def _token_in(scope: Scope) -> str | None:
    found = parse_qs(scope["query_string"].decode("latin-1")).get("token")
    return found[0] if found else None
