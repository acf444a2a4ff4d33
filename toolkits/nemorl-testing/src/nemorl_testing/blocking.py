"""Blocking calls on an event loop, seen where they are made: no clock is involved."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

BLOCKING = {
    "socket.getaddrinfo": "a blocking look-up of a host name",
    "http.client.connect": "a blocking HTTP request",
}
"""Audit event -> the call that raises it (https://docs.python.org/3/library/audit_events.html). Not here: what asyncio
itself does on its loop, such as starting processes."""


@cache
def _watchers() -> list[set[str]]:
    """Sets that blocking calls are added to. The hook that fills them cannot be taken away again, so there is one."""
    watchers: list[set[str]] = []

    def hook(event: str, _arguments: tuple[Any, ...]) -> None:
        if watchers and event in BLOCKING and asyncio._get_running_loop() is not None:
            for seen in watchers:
                seen.add(BLOCKING[event])

    sys.addaudithook(hook)
    return watchers


@contextmanager
def blocking_calls() -> Iterator[set[str]]:
    """The blocking calls that threads with a running event loop make while the block runs."""
    seen: set[str] = set()
    _watchers().append(seen)
    sleep = time.sleep

    def watched_sleep(seconds: float) -> None:
        if asyncio._get_running_loop() is not None:
            seen.add("time.sleep()")
        sleep(seconds)

    try:
        with patch("time.sleep", watched_sleep):  # it raises no audit event before Python 3.13
            yield seen
    finally:
        watchers = _watchers()
        watchers[:] = [other for other in watchers if other is not seen]
