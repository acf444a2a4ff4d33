"""Which groups of which steps are kept, and what is dropped when the folder is full."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from nemorl.base.files.atomic import storing
from nemorl.errors import StorageError

from nemorl_cli.report.records.media_files import MediaFiles
from nemorl_cli.report.records.reading import RecordFile, record_files

MAX_FILES = 4096
"""Of training steps kept in part: readers open each file, and that takes a millisecond."""

GIB = 2**30


class Amounts(Protocol):
    """The section ``records`` of a config."""

    @property
    def every(self) -> int:
        """Training steps between two that are kept in part; 0: none is."""

    @property
    def groups(self) -> int:
        """Groups kept of such a step."""

    @property
    def around(self) -> int:
        """Steps kept whole before and after each validation."""

    @property
    def max_gib(self) -> float:
        """Of all files."""


class Selection:
    """Decides what is kept, within a budget."""

    def __init__(self, folder: Path, amounts: Amounts, validation_every: int) -> None:
        """
        Args:
            folder: Of the records.
            amounts: How much is wanted.
            validation_every: Steps between validations; 0: there are none.
        """
        self._every, self._groups, self._around = amounts.every, amounts.groups, amounts.around
        self._folder, self._validation_every, self._max_bytes = folder, validation_every, amounts.max_gib * GIB
        self._rounds = 1
        """Of so many validations one is kept, with the steps around it."""
        self.media = MediaFiles(folder)
        """Images and sounds that the records name."""
        self._files: dict[Path, int] = {}
        with suppress(StorageError):  # what is written there fails too, and is warned of
            self._files = {file.path: file.path.stat().st_size for file in record_files(folder)}

    @property
    def is_full(self) -> bool:
        """Nothing more fits, and nothing is left that could be dropped."""
        return sum(self._files.values()) + self.media.nbytes > self._max_bytes or self._max_bytes <= 0

    def is_whole(self, step: int) -> bool:
        """All groups of a training step are kept: a validation is close, one that is kept itself.

        Example: with validations at 10, 20, … and ``around`` 1 these are 1, 10, 11, 20, 21, …
        """
        every = self._validation_every
        if every <= 0:
            return False
        is_after = (step - 1) % every < self._around and self.keeps_validation(step - 1)
        return is_after or (-step % every < self._around and self.keeps_validation(step + -step % every))

    def keeps_validation(self, step: int) -> bool:
        """The records of the last validation up to a step are kept."""
        return step // max(1, self._validation_every) % self._rounds == 0

    def places(self, step: int, count: int) -> Sequence[int]:
        """The groups of a training step that are kept, of ``count``: all, some that are evenly spread, or none."""
        if self.is_whole(step):
            return range(count)
        if not self._every or step % self._every:
            return ()
        kept = min(self._groups, count)
        return [place * count // kept for place in range(kept)]

    def added(self, path: Path) -> None:
        """A file was written. Drops others until all fit again: first every second of the steps kept in part, then
        every second validation with the steps around it. The last one stays, whatever its size."""
        self._files[path] = path.stat().st_size
        while self.is_full or len(self._partial) > MAX_FILES:
            if self._every and self._partial:
                self._every *= 2
            elif len({file.step // max(1, self._validation_every) for file in self._known()}) > 1:
                self._rounds *= 2
            else:
                return
            for file in self._known():
                if not (self.places(file.step, 1) if file.split == "train" else self.keeps_validation(file.step)):
                    self.removed(file.path)
            self.media.settle()

    def removed_after(self, step: int) -> None:
        """Remove the files of later steps, as far as the disk lets us: what stays is written anew."""
        with suppress(StorageError):
            for file in record_files(self._folder):
                if file.step > step:
                    with suppress(StorageError):
                        self.removed(file.path)
            self.media.settle()

    def removed(self, path: Path) -> None:
        """Remove a file.

        Raises:
            StorageError: the disk refuses.
        """
        self.media.leave(path)
        with storing(path):
            path.unlink(missing_ok=True)
        self._files.pop(path, None)

    @property
    def _partial(self) -> list[RecordFile]:
        return [file for file in self._known() if file.split == "train" and not self.is_whole(file.step)]

    def _known(self) -> list[RecordFile]:
        found = [RecordFile.of(path) for path in self._files]
        return [file for file in found if file]
