"""Keys: who a client is. Each sees what its own key made, and what others made public."""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from nemorl.base.files.atomic import loading, storing
from nemorl.errors import UsageError

from nemorl_agents.tinker.errors import ApiError

PREFIX = "tml-"
"""Clients refuse keys that begin otherwise."""
FILE = "key"
OWNER = "client"
"""The name of the key where there is one alone."""


class Keys:
    """Names by key."""

    def __init__(self, by_name: Mapping[str, str]) -> None:
        """
        Args:
            by_name: Keys of clients.

        Raises:
            UsageError: A client could not send one, or two have the same.
        """
        for name, key in by_name.items():
            if not key.startswith(PREFIX) or not key.isascii() or len(key) < 12:
                fix = f"give it one that begins with {PREFIX} and has 12 characters at least"
                raise UsageError(f"clients cannot send the key of {name}", fix=fix)
        if len(set(by_name.values())) < len(by_name):
            raise UsageError("two clients have the same key", fix="give each one of its own")
        self.by_name = dict(by_name)

    def owner(self, key: str) -> str:
        """The name of a key. The time it takes says nothing about the keys.

        Raises:
            ApiError: It is nobody's.
        """
        found = None
        for name, each in self.by_name.items():
            if hmac.compare_digest(each.encode(), key.encode()):
                found = name
        if found is None:
            raise ApiError(
                401, "this key opens nothing here", fix="set TINKER_API_KEY to the key that the server shows"
            )
        return found


def read_keys(path: Path) -> Keys:
    """Keys of a file with a line ``NAME KEY`` per client; lines that begin with ``#`` say nothing.

    Raises:
        UsageError: A line is otherwise, or the file has none.
    """
    with loading(path):
        lines = [line.split() for line in path.read_text().splitlines() if line.strip() and line[0] != "#"]
    wrong = [number for number, words in enumerate(lines, 1) if len(words) != 2]
    if wrong or not lines or len({words[0] for words in lines}) < len(lines):
        raise UsageError(
            f"{path} is no file of keys", fix="write one line `NAME KEY` per client, each with its own name"
        )
    return Keys({words[0]: words[1] for words in lines})


def own_key(folder: Path, key: str | None = None) -> Keys:
    """One key for all clients: the given one, or that of the folder, which a server that comes back finds again."""
    if key is not None:
        return Keys({OWNER: key})
    path = folder / FILE
    with storing(path):
        folder.mkdir(parents=True, exist_ok=True)
        if not path.is_file():
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(handle, "w") as file:
                file.write(PREFIX + secrets.token_urlsafe(24))
        return Keys({OWNER: path.read_text().strip()})
