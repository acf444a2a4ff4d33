"""Looks for secrets in files, in the disguises in which programs leave them by accident."""

from __future__ import annotations

import base64
import gzip
import html
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote_to_bytes

_NUMBERED = re.compile(rb"\\u00([0-9a-fA-F]{2})")


def found_in(folder: Path, secrets: Mapping[str, str]) -> list[tuple[str, Path]]:
    """Which secrets stand in the files of a folder, in their names or in targets of links, and where."""
    return [
        (name, path)
        for path in sorted(folder.rglob("*"))
        for name, secret in secrets.items()
        if any(holds(text, secret) for text in _texts(path))
    ]


def holds(text: bytes, secret: str) -> bool:
    """A text has a secret in it, however it is encoded."""
    known = [*_forms(secret)]
    readings = [text, unquote_to_bytes(text), _unescaped(text), html.unescape(text.decode(errors="replace")).encode()]
    if any(form in reading for reading in readings for form in known):
        return True
    return any(form.hex().encode() in text.lower() for form in known[:1])


def _forms(secret: str) -> Iterator[bytes]:
    plain = secret.encode()
    yield plain
    yield plain[::-1]
    yield secret.encode("utf-16-le")
    yield secret.encode("utf-16-be")
    for skipped in range(3):  # base64 looks different after one, two or three other bytes
        encoded = base64.b64encode(b"x" * skipped + plain)
        sure = encoded[(0, 2, 3)[skipped] : len(encoded) - 4]
        yield sure
        yield sure.translate(bytes.maketrans(b"+/", b"-_"))


def _unescaped(text: bytes) -> bytes:
    numbers = _NUMBERED.sub(lambda match: bytes([int(match[1], 16)]), text)
    return numbers.replace(b"\\/", b"/").replace(b'\\"', b'"')


def _texts(path: Path) -> Iterator[bytes]:
    yield path.name.encode(errors="surrogateescape")
    if path.is_symlink():
        yield os.readlink(path).encode(errors="surrogateescape")
    if not path.is_file():
        return
    try:
        content = path.read_bytes()
    except OSError:
        return
    yield content
    if content.startswith(b"\x1f\x8b"):
        yield gzip.decompress(content)
    if path.suffix == ".parquet" and content.endswith(b"PAR1"):
        import pyarrow.parquet

        yield repr(pyarrow.parquet.read_table(path).to_pylist()).encode(errors="replace")
