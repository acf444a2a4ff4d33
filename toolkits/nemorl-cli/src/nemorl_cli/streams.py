"""Output that survives its reader: a terminal that is closed, a pipe whose other end is gone."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any, TextIO

GONE = frozenset({errno.EPIPE, errno.EIO, errno.ENXIO})
"""Errors of writing where nobody can read any more: a broken pipe, a terminal that hung up."""


class SteadyStream:
    """A text stream that drops what nobody can read, and says so in ``is_lost``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost_by = 0
        """The ``errno`` with which its reader left; 0: it is there."""

    @property
    def is_lost(self) -> bool:
        return self.lost_by != 0

    @property
    def had_enough(self) -> bool:
        """Whether the reader is a program that has read what it wanted, such as ``head``."""
        return self.lost_by == errno.EPIPE

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        if error.errno not in GONE:
            raise error
        self.lost_by = error.errno
        try:
            descriptor = self._stream.fileno()
        except (io.UnsupportedOperation, AttributeError):
            return
        # Native code and Python's own last flush write there too, and what is buffered must go somewhere.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def steady(stream: TextIO | SteadyStream) -> SteadyStream:
    """The stream, made steady once: of two around it only the inner one would hear that it is lost."""
    return stream if isinstance(stream, SteadyStream) else SteadyStream(stream)


def open_standard_streams() -> None:
    """Where the caller has closed one, it leads nowhere: the next file that is opened would take its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, number)
            if nowhere != number:
                os.close(nowhere)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w"))
