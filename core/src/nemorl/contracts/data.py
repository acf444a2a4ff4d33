"""The contract of data: rows, batches of them that can be resumed, and held-out rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from nemorl.types import Row

if TYPE_CHECKING:
    from nemorl.plugins.kinds import DatasetConfig


@runtime_checkable
class DataModule(Protocol):
    """An endless, resumable stream of batches of rows.

    >>> isinstance(RowDataModule([{"prompt": "1+1="}], batch_size=1, seed=0), DataModule)
    True
    """

    def next_batch(self) -> list[Row]: ...

    @property
    def epoch(self) -> int:
        """Passes over the data completed before the next batch begins."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """JSON-serialisable position. Loading it makes ``next_batch`` continue exactly there."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class SizedDataModule(DataModule, Protocol):
    """One whose length is known, so that a run may be given in epochs.

    >>> isinstance(RowDataModule([{"prompt": "1+1="}], batch_size=1, seed=0), SizedDataModule)
    True
    """

    def steps(self, epochs: int) -> int:
        """Batches in this many passes, at least one."""
        ...


@runtime_checkable
class Table(Protocol):
    """Rows by number: a list of mappings, a ``datasets.Dataset``, or any other random access to rows.

    >>> isinstance([{"prompt": "1+1="}], Table)
    True
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


@runtime_checkable
class Fingerprinted(Protocol):
    """Rows, a ``DataModule`` or held-out rows that are known again when a run is continued.

    >>> class Squares:
    ...     def fingerprint(self): return "the squares up to 100"
    >>> isinstance(Squares(), Fingerprinted)
    True
    """

    def fingerprint(self) -> str:
        """Text that is another when the rows are. A run that has begun with one is not continued with another."""
        ...


class HeldOut(Protocol):
    """Held-out rows, in one set or several by name.

    >>> HeldOutRows({"": [{"prompt": "1+1="}]}).measure(lambda rows: {"rows": 1.0 * len(rows)}, max_rows=256)
    {'rows': 1.0}
    """

    def read(self, max_rows: int) -> Mapping[str, Sequence[Row]]:
        """The first rows of each set; the only one is called ``""``."""

    def measure(self, validate: Callable[[Sequence[Row]], Mapping[str, float]], max_rows: int) -> dict[str, float]:
        """Metrics of each set's first rows, as ``set/metric`` where there are several, and those of all together."""


DataSource: TypeAlias = "str | Path | Mapping[str, Any] | Table | DatasetConfig | DataModule"
"""Data as users give it, any of:

- the name of an installed dataset, a file, a folder of files or a dataset of the Hugging Face hub (``org/name``);
- a mapping ``{"name": …, …options}`` as in configs;
- rows: a list of mappings, a ``datasets.Dataset``, or both splits as ``{"train": rows, "validation": rows}``;
- a dataset config, or a ready ``DataModule``.

>>> rows: DataSource = [{"prompt": "1+1=", "answer": "2"}]
"""
