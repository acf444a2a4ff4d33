"""The hook ``logs``: a run's log records, and its events, as lines of JSON or text in one file."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from nemorl.base.process.logs import Format, RunHandler, installed
from nemorl.plugins.hooks import hookimpl
from nemorl_cli.following import Tail

log = logging.getLogger(__name__)

LEVELS: Mapping[str, int] = {"failed": logging.ERROR, "warning": logging.WARNING, "alert": logging.WARNING}
"""Of events; of all others, ``info``."""


class Logs:
    """One run's log."""

    def __init__(self, level: str, form: Format, file: str) -> None:
        self._level, self._form, self._file = logging.getLevelNamesMapping()[level.upper()], form, file
        self._open = ExitStack()
        self._handler: RunHandler | None = None
        self._events: Tail
        """Of ``events.jsonl``, beyond what the log has"""

    @hookimpl(tryfirst=True)  # what other hooks do is logged
    def on_build_end(self, trainer: Any) -> None:
        directory = trainer.directory
        self._events = Tail(directory.events.path)
        for _ in self._events.read():  # of before: an earlier process has told them
            pass
        stream = self._open.enter_context((directory.path / self._file).open("a", encoding="utf-8"))
        self._handler = RunHandler(stream, self._level, self._form, {"run": directory.path.resolve().name})
        self._open.enter_context(installed(self._handler))

    @hookimpl(tryfirst=True)
    def on_step_begin(self, step: int) -> None:
        if self._handler is not None:
            self._handler.ids["step"] = step

    @hookimpl(trylast=True)
    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        self._tell_events()
        log.info("step %d: %s", step, ", ".join(f"{n} {metrics[n]:.4g}" for n in ("reward", "loss") if n in metrics))

    @hookimpl(trylast=True)
    def on_validation_end(self, metrics: Mapping[str, float]) -> None:
        self._tell_events()
        log.info("validation: %s", ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))

    @hookimpl(trylast=True)
    def on_fit_end(self) -> None:
        self._tell_events()
        self._open.close()

    @hookimpl(trylast=True)
    def on_exception(self, error: BaseException) -> None:
        if self._handler is not None:
            log.error("the run ends: %s", error, exc_info=error)
            self._tell_events()
        self._open.close()

    def _tell_events(self) -> None:
        """New lines of ``events.jsonl``, as records."""
        for event in self._events.read():
            name = str(event.get("event"))
            facts = ", ".join(f"{key} {value}" for key, value in event.items() if key not in ("time", "event"))
            said = f"{event.get('rule')}: {event['text']}" if name == "alert" and "text" in event else facts
            self._write(LEVELS.get(name, logging.INFO), f"{name}: {said}")

    def _write(self, level: int, message: str) -> None:
        """To the file alone: the run's console says its events by itself."""
        if self._handler is not None and level >= self._handler.level:
            self._handler.write(log.makeRecord(log.name, level, __file__, 0, message, (), None))
