"""WatchedRun: a run as it grows. Its files are followed by offset, its records by the index, and nothing is written
into its directory."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemorl.errors import NemorlError, UsageError
from nemorl_cli.report.declared import admitted
from nemorl_cli.report.records.media_files import TYPES, media_file
from nemorl_cli.report.records.reading import FOLDER
from nemorl_cli.report.records.tokens import token_texts
from nemorl_cli.report.run_data import RunData, no_run
from nemorl_cli.report.sections import TranscriptSection, transcripts_of
from nemorl_cli.report.viewing import queries
from nemorl_cli.report.viewing.details import detail_at
from nemorl_cli.report.viewing.index import RecordIndex
from nemorl_cli.report.viewing.overview import extra, overview, shown_by
from nemorl_cli.report.viewing.queries import Wanted
from nemorl_cli.report.viewing.thumbnails import Thumbnails, type_of

FILES_AT_ONCE = 8
"""Files of records that are indexed before whoever waits for the thread is looked after."""


@dataclass(frozen=True)
class Position:
    """How far a run was read."""

    metrics: int = 0
    """Bytes of ``metrics.jsonl``."""
    events: int = 0
    """Bytes of ``events.jsonl``."""
    records: int = 0
    """Changes of the index."""

    @classmethod
    def parse(cls, text: str) -> Position | None:
        """As ``str()`` writes it; ``None`` for anything else.

        Example:
            >>> Position.parse(str(Position(1, 2, 3)))
            Position(metrics=1, events=2, records=3)
        """
        parts = text.split(".")
        if len(parts) != 3 or not all(part.isascii() and part.isdecimal() and len(part) < 19 for part in parts):
            return None
        return cls(*map(int, parts))

    def __str__(self) -> str:
        return f"{self.metrics}.{self.events}.{self.records}"


class WatchedRun:
    """One run for the server. Any thread may ask; ``follow`` is called by one.

    Raises:
        UsageError: The folder is neither a run nor the output of an evaluation.
    """

    def __init__(self, run_dir: Path, cache: Path) -> None:
        """
        Args:
            run_dir: Of the run.
            cache: Where the index is kept.
        """
        self.path = Path(run_dir)
        if not (self.path / "config.yaml").is_file() and not (self.path / FOLDER).is_dir():
            raise no_run(self.path, "config.yaml, no records")
        self.name = self.path.resolve().name
        key = hashlib.sha256(str(self.path.resolve()).encode()).hexdigest()[:24]
        self.index = RecordIndex(self.path, cache / f"{key}.sqlite")
        self._thumbnails = Thumbnails(self.path / FOLDER, cache / f"{key}.media")
        self._changes = 0
        self._problem: str | None = None
        self._lock = threading.Lock()
        self._transcripts: list[tuple[str, TranscriptSection]] | None = None

    def follow(self) -> bool:
        """Index what was added; returns whether there is more."""
        try:
            count = self.index.update(FILES_AT_ONCE)
        except (OSError, sqlite3.Error) as error:  # a full disk, a share that is away: tried again
            self._problem = f"new records are not read: {error}"
            return False
        self._problem = None
        if count:
            self._changes += 1
        return count >= FILES_AT_ONCE

    @property
    def position(self) -> Position:
        """How far it has got by now."""
        return Position(_size(self.path / "metrics.jsonl"), _size(self.path / "events.jsonl"), self._changes)

    def overview(self) -> dict[str, Any]:
        """See :func:`nemorl_cli.report.viewing.overview.overview`."""
        return overview(RunData.load(self.path))

    def extra(self) -> dict[str, Any]:
        """See :func:`nemorl_cli.report.viewing.overview.extra`."""

        def said_in_its_place(_: NemorlError) -> None:
            """A section that fails shows its error itself."""

        return extra(RunData.load(self.path), self.path, said_in_its_place)

    def steps(self) -> dict[str, Any]:
        """Summaries of the steps, and the names of the parts that rewards have."""
        found = queries.steps(self.index)
        parts = queries.parts(self.index)
        return {"steps": found, "of_steps": len(found), "parts": parts, "problem": self._problem}

    def responses(self, wanted: Wanted) -> dict[str, Any]:
        """See :func:`nemorl_cli.report.viewing.queries.responses`."""
        return queries.responses(self.index, wanted)

    def response(self, sample_id: str, split: str, step: int) -> Mapping[str, Any]:
        """One record whole, as :func:`nemorl_cli.report.viewing.details.details_of` has it.

        Raises:
            UsageError: There is no such record, or not any more.
        """
        place = self.index.place_of(sample_id, split, step)
        try:
            found = None if place is None else detail_at(place, token_texts(self.path / FOLDER))
        except (ValueError, OSError) as error:  # pyarrow's errors are both
            raise UsageError(f"the record cannot be read: {error}", fix="load the page again") from error
        if found is None or found["sample_id"] != sample_id:
            raise UsageError(f"there is no record {sample_id} of step {step}", fix="load the page again")
        return {**found, "shown": shown_by(self._sections(), found)}

    def media(self, digest: str, is_small: bool) -> tuple[Path, str]:
        """The file of an image or a sound of its records, and its media type.

        Args:
            digest: Of the item.
            is_small: The thumbnail of an image, which is made when it is first asked for.

        Raises:
            UsageError: There is none, or it cannot be decoded.
        """
        if is_small:
            path = self._thumbnails.get(digest)
            with path.open("rb") as file:
                return path, type_of(file.read(4))
        found = media_file(self.path / FOLDER, digest)
        media_type = None if found is None else TYPES.get(found.suffix[1:])
        if found is None or media_type is None:
            raise UsageError("the records show no such image or sound", fix="load the page again")
        return found, media_type

    def _sections(self) -> list[tuple[str, TranscriptSection]]:
        with self._lock:
            if self._transcripts is None:
                run = RunData.load(self.path)
                self._transcripts = transcripts_of(run, admitted(run))
            return self._transcripts


def cache_folder() -> Path:
    """Where indexes are kept from one time to the next; a new folder for this time where that cannot be written."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nemorl" / "view"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="nemorl-view-"))
    return folder if os.access(folder, os.W_OK) else Path(tempfile.mkdtemp(prefix="nemorl-view-"))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
