"""TensorBoard event files through TensorBoard's own writer: no torch, no TensorFlow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoardLogger:
    """One event per step, holding all its scalars under the names they have in ``metrics.jsonl``."""

    def __init__(self, folder: Path, *, flush_seconds: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder), flush_secs=flush_seconds)
        self._is_closed = False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._writer.close()
