"""Structured logs: one JSON object per record, with the ids of the run, step, worker and episode that it is about.

Python's ``logging`` is the one interface. A run's handler knows the run and its step, so that records of all threads
have them; what is narrower (an episode, a worker) is a context variable, set by :func:`log_ids`. :func:`carried` and
:func:`entered` take both into another process. Secrets are taken out (:mod:`nemorl.base.text.secrets`).
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TextIO

from nemorl.base.text.secrets import Redactor

Format = Literal["json", "text"]

HOUSE = "nemorl"
"""Loggers whose names begin so are the project's; of others only warnings are kept."""

_IDS: ContextVar[Mapping[str, Any]] = ContextVar("nemorl_log_ids", default=MappingProxyType({}))
_INSTALLING = threading.Lock()


@contextmanager
def log_ids(**ids: Any) -> Iterator[None]:
    """Records that are logged within have these ids as well. Tasks that begin within keep them.

    Example:
        >>> with log_ids(episode=7):
        ...     logging.getLogger(__name__).warning("the tool failed")
    """
    token = _IDS.set({**_IDS.get(), **ids})
    try:
        yield
    finally:
        _IDS.reset(token)


@dataclass(frozen=True)
class Carried:
    """Log settings of this process, for another process to share."""

    level: int
    form: Format
    ids: Mapping[str, Any] = field(default_factory=dict)


class RunHandler(logging.Handler):
    """Writes records of a run to a stream, with the run's ids."""

    def __init__(self, stream: TextIO, level: int, form: Format, ids: Mapping[str, Any]) -> None:
        """
        Args:
            stream: Written to, and flushed after each record.
            level: Least level of the project's own records; of other libraries at least warnings.
            form: How a record is written.
            ids: Of the process, e.g. the run.
        """
        super().__init__(level)
        self._stream, self.form = stream, form
        self.ids: dict[str, Any] = dict(ids)
        """Changed as the run goes on: its step."""
        self._redacted = Redactor()

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith(HOUSE) and record.levelno < logging.WARNING:
            return
        self.write(record)
        shown = logging.lastResort
        alone = self._stream is not sys.stderr and logging.getLogger().handlers == [self]
        if alone and shown is not None and record.levelno >= shown.level:
            shown.handle(record)  # a terminal shows what it would without this handler

    def write(self, record: logging.LogRecord) -> None:
        """A record to the stream alone: no terminal shows it."""
        try:
            self._stream.write(self.line(record) + "\n")
            self._stream.flush()
        except Exception:
            self.handleError(record)

    def line(self, record: logging.LogRecord) -> str:
        """A record as one line."""
        ids = {**self.ids, **_IDS.get()}
        message = self._redacted(record.getMessage())
        trace = ""
        if record.exc_info:
            trace = self._redacted(logging.Formatter().formatException(record.exc_info))
        if self.form == "text":
            about = " ".join(f"{name}={value}" for name, value in ids.items())
            clock = time.strftime("%H:%M:%S", time.localtime(record.created))
            return f"{clock} {record.levelname} {record.name} [{about}] {message}{trace and chr(10) + trace}"
        whole = {"time": record.created, "level": record.levelname.lower(), "logger": record.name, "message": message}
        whole |= {"process": record.process, "thread": record.threadName, **ids}
        return json.dumps(whole | ({"trace": trace} if trace else {}), default=str)


@contextmanager
def installed(handler: RunHandler) -> Iterator[None]:
    """The handler among those of the process, for the length of the block."""
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(min(before, handler.level))
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before)


def carried(**ids: Any) -> Carried | None:
    """The logging of this process for another one, with further ids; ``None`` where no run logs here."""
    handler = _present()
    if handler is None:
        return None
    return Carried(handler.level, handler.form, {**handler.ids, **_IDS.get(), **ids})


@contextmanager
def entered(found: Carried | None) -> Iterator[None]:
    """Log as the process that ``found`` comes from, for the length of the block; to standard error, from now on."""
    if found is None:
        yield
        return
    with _INSTALLING:  # a worker may serve several calls at the same time
        if _present() is None:
            root = logging.getLogger()
            root.addHandler(RunHandler(sys.stderr, found.level, found.form, {}))
            root.setLevel(min(root.level, found.level))
    with log_ids(**found.ids):
        yield


def _present() -> RunHandler | None:
    return next((found for found in logging.getLogger().handlers if isinstance(found, RunHandler)), None)
