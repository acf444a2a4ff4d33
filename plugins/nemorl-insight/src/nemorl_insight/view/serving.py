"""Viewer: the server of a process, on a thread of its own, and the thread that indexes what runs add."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from nemorl_trust.encryption import LOOPBACK, is_loopback
from nemorl_trust.http_server import HttpServer
from nemorl_trust.listening import HERE, Place

from nemorl_insight.view.server import Server
from nemorl_insight.view.watched import WatchedRun

ENDING_S = 2
"""Seconds for answers that are being sent when the viewer is shut down."""
MOST_CONNECTIONS = 256
POLL_S = 1.0
"""Seconds between two looks for new records."""


class Viewer:
    """Serves some runs until it is shut down.

    Example:
        >>> with Viewer([Path("runs/mine")], Path("/tmp/cache")) as viewer:  # doctest: +SKIP
        ...     print(viewer.url)
    """

    def __init__(self, run_dirs: Sequence[Path], cache: Path, place: Place = HERE) -> None:
        """
        Args:
            run_dirs: Of the runs.
            cache: Where their indexes are kept.
            place: Where it listens.

        Raises:
            UsageError: A folder is no run, it cannot listen there, or others would read along.
        """
        self._runs = [WatchedRun(run_dir, cache) for run_dir in run_dirs]
        self._place = place
        self._socket = place.listen("nemorl view", waiting=1024)
        self._is_over = threading.Event()
        self._token = secrets.token_urlsafe(24)
        self._once: set[str] = set()
        hosts = (*LOOPBACK, place.host.lower()) if is_loopback(place.host) else None
        app = Server(self._runs, hosts=hosts, token=self._token, once=self._once, is_over=self._is_over.is_set).app
        self._server = HttpServer(
            "nemorl view",
            app,
            most=MOST_CONNECTIONS,
            ending_s=ENDING_S,
            log_level="critical",  # answers that nobody waits for are cut when it ends
            place=place,
        )
        self._threads = [
            threading.Thread(target=self._server.run, args=([self._socket],), name="nemorl-view", daemon=True),
            threading.Thread(target=self._follow, name="nemorl-view-index", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def url(self) -> str:
        """The address of the page, with the token."""
        return self._url(self._token)

    def url_for_one_browser(self) -> str:
        """An address that lets one browser in: for a command line, which other users of the machine see."""
        token = secrets.token_urlsafe(24)
        self._once.add(token)
        return self._url(token)

    def _url(self, token: str) -> str:
        url = self._place.url(self._socket)
        for every in ("//0.0.0.0:", "//[::]:"):  # address of this machine
            url = url.replace(every, f"//{socket.gethostname()}:")
        return f"{url}/?token={token}"

    def shutdown(self) -> None:
        """Stop. Calling it twice is harmless."""
        self._is_over.set()
        self._server.should_exit = True
        for thread in self._threads:
            thread.join()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _follow(self) -> None:
        with suppress(Exception):  # who asks for it is told
            self._runs[0].overview()  # imports what all need, while the browser starts
        while not self._is_over.is_set():
            has_more = False
            for run in self._runs:
                has_more |= not self._is_over.is_set() and run.follow()
            if not has_more:
                self._is_over.wait(POLL_S)
