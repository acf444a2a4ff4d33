"""Append-only JSON lines: what a run leaves behind, readable at any moment and after any kind of death.

One line is one object and is flushed when written, so a killed run loses at most the line it was writing. Readers
skip such a cut line; a writer that continues the file removes it first.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

from nemorl.base.files.atomic import loading, replacing, storing
from nemorl.base.text.secrets import redacted_json


class StepLog(Protocol):
    """Records of steps, in a file or folder of a run."""

    @property
    def path(self) -> Path:
        """Where they are; it need not be there yet."""

    def truncate_after(self, step: int) -> None:
        """Drop records of later steps, which the run makes again."""

    def flush(self) -> None:
        """Return when everything that was handed over can be read."""


class JsonlWriter:
    """Appends records to a file, creating it and its folder."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        with storing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _remove_cut_line(self.path)
            self._file = self._open()

    def flush(self) -> None:
        """Nothing to wait for: the system has each line when ``write`` returns."""

    def write(self, record: Mapping[str, Any]) -> None:
        """One line, in strict JSON: NaN and infinities become null, secrets of the environment their names. The system
        has it when this returns."""
        with storing(self.path):
            rest = line = memoryview(redacted_json(dumps(record)) + b"\n")
            try:
                while rest:  # a disk that is nearly full takes a part
                    rest = rest[self._file.write(rest) :]
            except OSError:
                if len(rest) < len(line):  # the next record must not follow a part of this one
                    self._file.truncate(self._file.tell() + len(rest) - len(line))
                raise

    def truncate_after(self, step: int) -> None:
        """Drop records whose ``step`` is greater; records without a step stay.

        A run that resumes from step k repeats step k + 1, which must not appear twice. The new content replaces
        the old in one rename, so a crash leaves either.
        """
        with replacing(self.path) as target, self.path.open("rb") as source:
            for line in source:
                record = parse_line(line)
                own = None if record is None else record.get("step")
                if record is not None and not (isinstance(own, int | float) and own > step):
                    target.write(line.rstrip(b"\n") + b"\n")
        with storing(self.path):
            self._file.close()
            self._file = self._open()

    def close(self) -> None:
        """Close the file. Calling it twice is harmless."""
        with storing(self.path):
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> Any:
        return self.path.open("ab", buffering=0)


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file, in order. A missing file is empty; lines that are not whole objects are skipped.

    Raises:
        StorageError: The system refuses to give it.
    """
    with loading(path):
        if not Path(path).is_file():
            return
        with Path(path).open("rb") as file:
            yield from (record for line in file if (record := parse_line(line)) is not None)


def dumps(value: Any) -> bytes:
    """``value`` as one line of strict JSON in UTF-8.

    Numpy and torch scalars become numbers, bytes how many they are, other unknown objects text. Model output may hold
    lone surrogates, which UTF-8 cannot: they are written as JSON's own ``\\udXXX`` escapes.
    """
    text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, default=str)
    return text.encode("utf-8", errors="backslashreplace")


@runtime_checkable
class _Scalar(Protocol):
    """A tensor of torch or an array of numpy, neither of which is imported here; of one number where ``ndim`` is 0."""

    @property
    def ndim(self) -> int: ...

    def item(self) -> object: ...


def _finite(value: Any) -> Any:
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes | bytearray | memoryview):
        return [_finite(item) for item in value]
    if isinstance(value, _Scalar) and value.ndim == 0:
        item = value.item()
        return _finite(item) if type(item) is not type(value) else str(item)  # Python has no number for some of numpy
    return f"{len(value)} bytes" if isinstance(value, bytes | bytearray | memoryview) else value


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The object of a line; ``None`` for one that is cut, or is no object."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _remove_cut_line(path: Path) -> None:
    """Make the file end with a newline, so that the next record starts on a line of its own."""
    if not path.is_file() or not path.stat().st_size:
        return
    with path.open("rb+") as file:
        content_end = file.seek(0, os.SEEK_END)
        tail, start = b"", content_end
        while start > 0 and b"\n" not in tail:
            start = max(0, start - 65536)
            file.seek(start)
            tail = file.read(content_end - start)
        last_line = tail.rpartition(b"\n")[2]
        if not last_line:
            return
        if parse_line(last_line) is not None:  # whole, only its newline is missing
            file.seek(content_end)
            file.write(b"\n")
        else:
            file.truncate(content_end - len(last_line))
