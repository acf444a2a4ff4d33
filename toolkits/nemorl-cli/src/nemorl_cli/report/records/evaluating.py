"""Records of an evaluation: the responses to datasets, in the columns and the layout of a run's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from nemorl.base.files.atomic import remove, replacing, storing
from nemorl.types import Sample

from nemorl_cli.report.records.media_files import MediaFiles
from nemorl_cli.report.records.reading import FOLDER, record_files
from nemorl_cli.report.records.schema import WRITING
from nemorl_cli.report.records.table import Group, Rollout, media_of, table_of
from nemorl_cli.report.records.tokens import Vocabulary
from nemorl_cli.report.records.turns import Decode

SPLIT = "evaluation"
GROUPS_PER_FILE = 64
"""Groups that an evaluation that is killed may lose."""


class EvaluationRecords:
    """Writes ``records/evaluation/`` of a folder, in place of what an earlier evaluation left there.

    Raises:
        StorageError: the folder cannot be written.
    """

    def __init__(self, folder: Path, decode: Decode) -> None:
        """
        Args:
            folder: Made where there is none.
            decode: Token ids to text.
        """
        self._folder, self._decode = Path(folder), decode
        self._path = self._folder / FOLDER / SPLIT
        self._vocabulary = Vocabulary(self._folder / FOLDER, decode)
        self._began_s = time.monotonic()
        self._source: tuple[str, int] = ("", 0)
        self._groups: list[Group] = []
        self._count = self._part = 0
        self._media = MediaFiles(self._folder / FOLDER)
        for file in record_files(self._folder / FOLDER, split=SPLIT):
            self._media.leave(file.path)
        with storing(self._path):
            remove(self._path)
            self._path.mkdir(parents=True)
        self._media.settle()

    def add(self, dataset: str, seed: int, group: Sequence[Sample]) -> None:
        """A scored group of a dataset."""
        if self._groups and ((dataset, seed) != self._source or len(self._groups) == GROUPS_PER_FILE):
            self.flush()
        self._source = dataset, seed
        self._groups.append(Group(self._count, group))
        self._count += 1

    def flush(self) -> None:
        """Write what is left."""
        import pyarrow.parquet as pq

        groups, self._groups = self._groups, []
        if not groups:
            return
        self._part += 1
        dataset, seed = self._source
        name = self._folder.resolve().name
        rollout = Rollout(name, SPLIT, 0, time.time(), groups, dataset=dataset, seed=seed, began_s=self._began_s)
        part = f".{self._part}" if self._part > 1 else ""
        table = table_of(rollout, self._decode)
        self._vocabulary.add(table)
        path = self._path / f"step_000000{part}.parquet"
        self._media.store(path, media_of(rollout))
        with replacing(path) as file:
            pq.write_table(table, file, **WRITING)
