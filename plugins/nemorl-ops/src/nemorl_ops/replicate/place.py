"""A folder anywhere that fsspec reaches, and files that are copied between two of them, verified."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from nemorl.base.files.sealed_folders import stays_inside
from nemorl.errors import StorageError, UsageError

PIECE = 8 * 2**20
"""Bytes read at a time."""
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""Extras of this package, by what a URL begins with."""


class Place:
    """A folder, local or elsewhere. Names of files in it are relative, with slashes."""

    def __init__(self, url: str, options: dict[str, Any] | None = None, *, timeout_s: float = 120.0) -> None:
        """
        Args:
            url: ``s3://bucket/folder``, ``file:///folder``, or a local path.
            options: Of fsspec's file system.
            timeout_s: Longest wait for one answer, where the file system has such a limit.

        Raises:
            UsageError: Nothing here reaches such URLs.
        """
        import fsspec

        self.url = url.rstrip("/")
        scheme = url.partition("://")[0] if "://" in url else "file"
        settings: dict[str, Any] = dict(options or {})
        if EXTRAS.get(scheme) == "s3":
            settings["config_kwargs"] = {
                **{"connect_timeout": timeout_s, "read_timeout": timeout_s, "retries": {"max_attempts": 1}},
                **settings.get("config_kwargs", {}),
            }
        try:
            self._files, self._root = fsspec.core.url_to_fs(url, **settings, skip_instance_cache=True)
        except (ImportError, ValueError) as error:
            extra = EXTRAS.get(scheme)
            fix = f'pip install "nemorl-ops[{extra}]"' if extra else "give s3://…, gs://…, file://… or a path"
            raise UsageError(f"{url} cannot be reached: {error}", fix=fix) from error
        self._files.use_listings_cache = False
        self._has_folders = scheme not in EXTRAS

    def sub(self, name: str) -> Place:
        """A folder in it."""
        self._path(name)
        found = object.__new__(Place)
        found.url, found._files, found._root = f"{self.url}/{name}", self._files, f"{self._root.rstrip('/')}/{name}"
        found._has_folders = self._has_folders
        return found

    def names(self) -> list[str]:
        """Every file below it, sorted; none where there is no such folder.

        Raises:
            StorageError: a folder in it cannot be listed. It is never taken for an empty one.
        """
        with self._named(), suppress(FileNotFoundError):
            self._files.invalidate_cache()
            found = self._below(self._root) if self._has_folders else self._files.find(self._root)
            return sorted(str(path)[len(self._root.rstrip("/")) + 1 :] for path in found)
        return []

    def _below(self, folder: str) -> Iterator[str]:
        """Every file below a folder. The walk of fsspec leaves out what it cannot list."""
        for entry in self._files.ls(folder, detail=True):
            if entry["type"] != "directory":
                yield entry["name"]
                continue
            with suppress(FileNotFoundError):  # removed meanwhile
                yield from self._below(entry["name"])

    def size(self, name: str) -> int | None:
        """Of a file, in bytes; ``None`` where there is none."""
        with self._named(name), suppress(FileNotFoundError):
            self._files.invalidate_cache()
            return int(self._files.size(self._path(name)))
        return None

    def pieces(self, name: str) -> Iterator[bytes]:
        """The content of a file."""
        with self._named(name), self._files.open(self._path(name), "rb", block_size=PIECE) as file:
            while piece := file.read(PIECE):
                yield piece

    def digest(self, name: str) -> str:
        """The SHA-256 of a file, in hex, of what is read back."""
        found = hashlib.sha256()
        for piece in self.pieces(name):
            found.update(piece)
        return found.hexdigest()

    def read_json(self, name: str) -> Any:
        """The content of a JSON file; ``None`` where it is not there or is none."""
        with suppress(FileNotFoundError, ValueError):
            return json.loads(b"".join(self.pieces(name)))
        return None

    def write(self, name: str, pieces: Iterator[bytes], seen: Callable[[int], None]) -> str:
        """Write a file, whose folders need not be there; returns the SHA-256 of what was sent.

        Args:
            name: Of the file.
            pieces: Its content.
            seen: Told the bytes of each piece that was sent.
        """
        found = hashlib.sha256()
        with self._named(name):
            if self._has_folders:  # in object stores that would make a bucket where a name is wrong
                self._files.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)
            with self._files.open(self._path(name), "wb") as file:
                for piece in pieces:
                    file.write(piece)
                    found.update(piece)
                    seen(len(piece))
        return found.hexdigest()

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all that is in it."""
        with self._named(name), suppress(FileNotFoundError):
            self._files.rm(self._path(name), recursive=True)

    def _path(self, name: str) -> str:
        if name and not stays_inside(name):
            raise StorageError(f"{self.url} names {name!r}, a file outside of it", fix="ask who wrote it")
        return f"{self._root.rstrip('/')}/{name}"

    @contextmanager
    def _named(self, name: str = "") -> Iterator[None]:
        """Errors inside are about this place: clients of stores raise whatever they like."""
        try:
            yield
        except (FileNotFoundError, StorageError):
            raise
        except Exception as error:
            where = f"{self.url}/{name}" if name else self.url
            raise StorageError(
                f"{where}: {type(error).__name__}: {' '.join(str(error).split())}",
                fix="look at the address, the credentials (AWS_ACCESS_KEY_ID, …) and whether the store answers",
            ) from error


def copy_file(
    source: Place, target: Place, name: str, seen: Callable[[int], None], *, recorded: str | None, verify: bool
) -> bool:
    """Copy one file, unless the same is there already.

    Args:
        source: Has it.
        target: Gets it, under the same name.
        name: Of the file.
        seen: Told the bytes of each piece that was sent.
        recorded: Its SHA-256, where one is known; what was read must have it.
        verify: Compare what is read back, not its size alone.

    Returns:
        Whether anything was sent.

    Raises:
        StorageError: What was read or arrived is not what it should be.
    """
    size = source.size(name)
    if size is None:
        raise FileNotFoundError(name)
    if target.size(name) == size and target.digest(name) == (recorded or source.digest(name)):
        return False
    count = 0

    def counted(sent: int) -> None:
        nonlocal count
        count += sent
        seen(sent)

    sent = target.write(name, source.pieces(name), counted)
    if recorded is not None and sent != recorded:
        target.remove(name)
        raise StorageError(f"{source.url}/{name} does not match its checksum", fix="`nemorl runs verify` the source")
    if target.size(name) != count or (verify and target.digest(name) != sent):  # it may have grown since it was sized
        target.remove(name)
        raise StorageError(f"{target.url}/{name} is not what was sent: it was removed", fix="copy it again")
    return True
