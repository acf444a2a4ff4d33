"""The servers of a run as files in its directory: which ones are wanted, and how each is doing.

``wanted.json`` is written by ``nemorl engines`` and read by the run, between requests; ``state.json`` the other way
round. Both are replaced as a whole: a kill leaves the old content or the new one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemorl.base.files.atomic import loading, replace_text, storing
from nemorl.errors import DataError

from nemorl_agents.servers.config import url_problem

FOLDER = Path("scratch") / "engines"
"""Below a run's directory (``WorkerContext.scratch`` is the first part)."""


class Roster:
    """The two files."""

    def __init__(self, folder: Path) -> None:
        self._wanted, self._state = folder / "wanted.json", folder / "state.json"
        self._folder = folder

    def wanted(self, configured: Sequence[str]) -> tuple[str, ...]:
        """The addresses to use: those that ``nemorl engines`` left, unless the config has other ones than it had then.

        Raises:
            DataError: The file is damaged.
        """
        found = _read(self._wanted)
        if found is None or found.get("configured") != list(configured):
            return tuple(configured)
        urls = found.get("urls")
        if not isinstance(urls, list) or not all(isinstance(url, str) and url_problem(url) is None for url in urls):
            raise DataError(
                f"{self._wanted} holds no list of addresses", fix="remove it: the config's addresses hold then"
            )
        return tuple(urls)

    def want(self, urls: Sequence[str], configured: Sequence[str]) -> None:
        """Let the run use these addresses from its next request on.

        Args:
            urls: All of them.
            configured: Those of the run's config, in whose place they come.
        """
        with storing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        replace_text(self._wanted, json.dumps({"configured": list(configured), "urls": list(urls)}, indent=2) + "\n")

    def report(self, state: Mapping[str, Any]) -> None:
        """Say how the servers are doing."""
        with storing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        replace_text(self._state, json.dumps(state, indent=2) + "\n")

    def state(self) -> dict[str, Any] | None:
        """The run's last report; ``None`` before the first."""
        return _read(self._state)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        with loading(path):
            found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}", fix="remove it: the config's addresses hold then") from error
    if found is not None and not isinstance(found, dict):
        raise DataError(f"{path} is damaged: it holds no object", fix="remove it")
    return found
