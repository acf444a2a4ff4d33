"""Files of images and sounds beside records: ``media/<digest>.<suffix>``, each once, as long as a record names it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nemorl.base.files.atomic import listed, replacing, storing
from nemorl.errors import StorageError, UsageError
from nemorl.media import NAME_DIGITS, Media

from nemorl_cli.report.records.reading import FOLDER, RecordFile, read_table, record_files

MEDIA = "media"
"""In a folder of records."""
DIGEST = re.compile(r"[0-9a-f]{12,128}", re.ASCII)
BEGINNINGS: Mapping[bytes, str] = {
    b"\x89PNG": "png",
    b"\xff\xd8\xff": "jpg",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"II*\0": "tiff",
    b"MM\0*": "tiff",
    b"fLaC": "flac",
    b"OggS": "ogg",
    b"ID3": "mp3",
}
"""First bytes of a file -> its suffix."""
RIFF: Mapping[bytes, str] = {b"WEBP": "webp", b"WAVE": "wav"}
TYPES: Mapping[str, str] = {
    **{suffix: f"image/{suffix}" for suffix in ("png", "gif", "bmp", "tiff", "webp")},
    "jpg": "image/jpeg",
    **{suffix: f"audio/{suffix}" for suffix in ("flac", "ogg", "wav")},
    "mp3": "audio/mpeg",
}
"""Suffix -> media type, as browsers know it."""
UNKNOWN = "bin"
SUFFIXES = (*TYPES, UNKNOWN)


def suffix_of(data: bytes) -> str:
    """By the first bytes of a file.

    Example:
        >>> suffix_of(b"\\x89PNG\\r\\n"), suffix_of(b"RIFF\\0\\0\\0\\0WAVEfmt "), suffix_of(b"?")
        ('png', 'wav', 'bin')
    """
    if data[:4] == b"RIFF":
        return RIFF.get(data[8:12], UNKNOWN)
    if data[:1] == b"\xff" and data[1:2] and data[1] & 0xE0 == 0xE0 and not data.startswith(b"\xff\xd8"):
        return "mp3"  # without tags, it begins with a frame
    return next((suffix for start, suffix in BEGINNINGS.items() if data.startswith(start)), UNKNOWN)


def media_file(folder: Path, digest: str) -> Path | None:
    """The file of an item; ``None`` where there is none.

    Args:
        folder: Of records.
        digest: As a record or a browser names it.
    """
    if DIGEST.fullmatch(digest) is None:
        return None
    paths = (Path(folder) / MEDIA / f"{digest}.{suffix}" for suffix in SUFFIXES)
    return next((path for path in paths if path.is_file()), None)


def read_media(run_dir: Path, items: Iterable[Mapping[str, Any]]) -> dict[str, Media]:
    """Items of records, by digest.

    Args:
        run_dir: Of the run.
        items: Of the column ``media``.

    Raises:
        UsageError: the file of one is gone.
    """
    found: dict[str, Media] = {}
    for item in items:
        if item["digest"] in found:
            continue
        path = media_file(Path(run_dir) / FOLDER, item["digest"])
        if path is None:
            raise UsageError(
                f"{Path(run_dir) / FOLDER / MEDIA} has no file of {item['kind']} {item['digest'][:NAME_DIGITS]}, which "
                "a record shows",
                fix="copy the whole folder `records` of the run",
            )
        found[item["digest"]] = Media(item["kind"], path.read_bytes(), item["digest"])
    return found


class MediaFiles:
    """The files of a folder of records, for whoever writes there."""

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: Of the records.
        """
        self._folder = Path(folder)
        self._paths: dict[str, Path] = {}
        self._sizes: dict[str, int] = {}
        self._named: dict[Path, frozenset[str]] = {}
        """What files of records name, as far as they were read"""
        self._leaving: set[str] = set()
        with suppress(StorageError, OSError):  # what is written there fails too, and is warned of
            for path in listed(self._folder / MEDIA):
                if DIGEST.fullmatch(path.stem) and path.suffix[1:] in SUFFIXES:
                    self._paths[path.stem], self._sizes[path.stem] = path, path.stat().st_size

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return sum(self._sizes.values())

    def store(self, records: Path, items: Iterable[Media]) -> None:
        """Write those that are not there, before the file of records that names them.

        Args:
            records: That file.
            items: All that it names.

        Raises:
            StorageError: the disk refuses.
        """
        self.leave(records)
        named = {item.digest: item for item in items}
        for digest, item in named.items():
            if digest not in self._paths:
                path = self._folder / MEDIA / f"{digest}.{suffix_of(item.data)}"
                with storing(path):
                    path.parent.mkdir(parents=True, exist_ok=True)
                with replacing(path) as file:
                    file.write(item.data)
                self._paths[digest], self._sizes[digest] = path, len(item.data)
        self._named[records] = frozenset(named)

    def leave(self, records: Path) -> None:
        """A file of records is about to be removed or replaced."""
        if self._paths and (records in self._named or records.exists()):
            self._leaving |= self._of(records) or frozenset()
        self._named.pop(records, None)

    def settle(self) -> None:
        """Remove the files of items that files of records which have gone named, and none that is left does.

        Raises:
            StorageError: the disk refuses.
        """
        if not self._leaving:
            return
        named = [self._of(file.path) for file in record_files(self._folder)]
        if None in named:  # nobody knows what a damaged file shows
            return
        unnamed = self._leaving.difference(*(found for found in named if found is not None))
        self._leaving = set()
        for digest in unnamed & self._paths.keys():
            path = self._paths.pop(digest)
            del self._sizes[digest]
            with storing(path):
                path.unlink(missing_ok=True)

    def _of(self, path: Path) -> frozenset[str] | None:
        """Digests that a file of records names; ``None`` where it cannot be read."""
        if path not in self._named:
            file = RecordFile.of(path)
            assert file is not None, "only files of records are asked for"
            try:
                rows = read_table(file, ["media"])["media"].to_pylist()
            except (ValueError, OSError):  # pyarrow's errors are both
                return None
            self._named[path] = frozenset(item["digest"] for row in rows for item in row or ())
        return self._named[path]
