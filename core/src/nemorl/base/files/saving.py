"""Checkpoints that are being written, and which of those that are written stay.

The driver's part of a checkpoint, also of one that is written while training goes on, is :class:`Draft`: a folder that
ranks are still writing has no name that a reader knows, and gets it with the manifest, once every rank has said which
files it has flushed to disk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemorl.base.files import sealed_folders
from nemorl.base.files.atomic import FIXES, storage_errno
from nemorl.errors import CheckpointError

FilesOfRanks = Callable[..., "Mapping[str, str] | None"]
"""``snapshot_files`` of all ranks of a model together; called with ``wait``."""


class Draft:
    """A checkpoint that is being written. Nobody sees it before :meth:`publish` says that it is whole.

    >>> draft = Draft(folder / "step_000003", {"step": 3}, {"policy": policy.snapshot_checkpoint}, {"step": 3},
    ...               [policy.snapshot_files])  # doctest: +SKIP
    """

    def __init__(
        self,
        final: Path,
        facts: Mapping[str, Any],
        writers: Mapping[str, Callable[[Path], None]],
        state: Mapping[str, Any],
        ranks: Sequence[FilesOfRanks] = (),
    ) -> None:
        """
        Args:
            final: Its path, once it is whole.
            facts: What the manifest says besides its files.
            writers: Each fills its (existing, empty) folder, of the name given, or has others begin to.
            state: The trainer's JSON state, as it is now.
            ranks: Those who are still writing when the writers return, by model.

        Raises:
            CheckpointError: The disk refused it.
        """
        self.final, self._facts, self._ranks = final, dict(facts), ranks
        with self._removed_on_failure():
            self._staging = sealed_folders.stage(final)
            for name, write in writers.items():
                (self._staging / name).mkdir()
                write(self._staging / name)
            (self._staging / "trainer.json").write_text(json.dumps(state, indent=1))

    def publish(self, *, wait: bool) -> bool:
        """Give it its name, if all of it is on disk by now.

        Args:
            wait: Until it is.

        Raises:
            CheckpointError: The disk refused it, there or on a rank.
        """
        with self._removed_on_failure():
            written: dict[str, str] = {}
            for files in self._ranks:
                if (found := files(wait=wait)) is None:
                    return False
                written |= {Path(file).relative_to(self._staging).as_posix(): digest for file, digest in found.items()}
            sealed_folders.seal(self._staging, self.final, self._facts, written)
        return True

    def discard(self) -> None:
        """Forget it: whoever is writing it has ended."""
        sealed_folders.discard(self.final.with_name(sealed_folders.WRITING + self.final.name))

    @contextmanager
    def _removed_on_failure(self) -> Iterator[None]:
        with refusals_named(self.final):
            try:
                yield
            except BaseException:
                self.discard()
                raise


@contextmanager
def refusals_named(final: Path) -> Iterator[None]:
    """Turn a disk's refusal inside the block, at any depth of what is raised, into an error about a checkpoint.

    Raises:
        CheckpointError: Names the checkpoint, the cause and what helps.
    """
    try:
        yield
    except BaseException as error:  # torch reports a rank's failure as one
        number = storage_errno(error)
        if number is None:
            raise
        raise CheckpointError(f"cannot write {final}: {os.strerror(number)}", fix=FIXES[number]) from error


def kept_steps(
    steps: Sequence[int], ranked: Sequence[int], *, last: int, best: int, every: int | None
) -> Collection[int]:
    """Those of a run's checkpoints that stay.

    Args:
        steps: Of all, oldest first.
        ranked: Of those that have the metric, the best first.
        last: So many of the newest stay.
        best: So many of the best stay.
        every: Multiples of it stay. Unset: none for that.

    >>> sorted(kept_steps([10, 20, 30, 40, 50], [20, 50, 10], last=1, best=1, every=30))
    [20, 30, 50]
    """
    return {*steps[-last:], *ranked[:best], *(step for step in steps if every is not None and step % every == 0)}
