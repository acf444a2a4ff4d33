"""Viewer: the server of a process, on a thread of its own, and the thread that indexes what runs add."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import uvicorn
from nemorl.errors import UsageError

from nemorl_view.guard import LOOPBACK
from nemorl_view.server import Server
from nemorl_view.watched import WatchedRun

ENDING_S = 2
"""Seconds for answers that are being sent when the viewer is shut down."""
POLL_S = 1.0
"""Seconds between two looks for new records."""


class Viewer:
    """Serves some runs until it is shut down.

    Example:
        >>> with Viewer([Path("runs/mine")], Path("/tmp/cache")) as viewer:  # doctest: +SKIP
        ...     print(viewer.url)
    """

    def __init__(self, run_dirs: Sequence[Path], cache: Path, *, host: str = "127.0.0.1", port: int = 0) -> None:
        """
        Args:
            run_dirs: Of the runs.
            cache: Where their indexes are kept.
            host: Where it listens. Beyond this machine, ``url`` has a token, without which nothing is shown.
            port: 0: a free one.

        Raises:
            UsageError: A folder is no run, or it cannot listen there.
        """
        self._runs = [WatchedRun(run_dir, cache) for run_dir in run_dirs]
        self._socket = _listening(host, port)
        self._is_over = threading.Event()
        self._token = None if host in LOOPBACK else secrets.token_urlsafe(24)
        hosts = LOOPBACK if self._token is None else None
        app = Server(self._runs, hosts=hosts, token=self._token, is_over=self._is_over.is_set).app
        config = uvicorn.Config(
            app,
            http="h11",
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # answers that nobody waits for are cut when it ends
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=ENDING_S,
        )
        self._server = uvicorn.Server(config)
        self._threads = [
            threading.Thread(target=self._serve, name="nemorl-view", daemon=True),
            threading.Thread(target=self._follow, name="nemorl-view-index", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def url(self) -> str:
        """The address of the page, with the token where there is one."""
        host, port = self._socket.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        if host in ("0.0.0.0", "::"):  # every address of this machine
            shown = socket.gethostname()
        return f"http://{shown}:{port}/" + (f"?token={self._token}" if self._token else "")

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

    def _serve(self) -> None:
        self._server.run(sockets=[self._socket])

    def _follow(self) -> None:
        for run in self._runs[:1]:
            run.overview()  # imports what all need, while the browser starts
        while not self._is_over.is_set():
            has_more = False
            for run in self._runs:
                has_more |= not self._is_over.is_set() and run.follow()
            if not has_more:
                self._is_over.wait(POLL_S)


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise UsageError(
            f"nemorl view cannot listen on {host}, port {port}: {error}",
            fix="choose an address of this machine, and port 0 for a free one",
        ) from error
    return listening
