"""Datasets with a mistake each."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from nemorl.plugins.kinds import DatasetConfig


class RingOfRows(Sequence[Mapping[str, Any]]):
    """Begins again where it ends."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index % len(self._rows)]


class AnyDataset(DatasetConfig):
    """``mistake`` chooses what is wrong."""

    summary: ClassVar[str] = "a dataset with a mistake"
    mistake: str = ""
    """What is wrong."""

    def build(self, split: str) -> Sequence[Mapping[str, Any]] | None:
        rows: list[dict[str, Any]] = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40)]
        if self.mistake == "none: prompts with several answers":
            rows = [{"prompt": f"{n % 5}+1=", "answer": str(n)} for n in range(40)]
        if self.mistake == "tuples":
            rows = [{**row, "options": (1, 2)} for row in rows]
        if self.mistake == "no prompt":
            rows = [{"question": row["prompt"]} for row in rows]
        training = rows if self.mistake == "leaks" else rows[:30]
        if split == "train":
            if self.mistake == "shuffles":
                random.shuffle(training)
            return RingOfRows(training) if self.mistake == "endless" else training
        if split == "validation" or self.mistake == "any split":
            return rows[30:]
        return None
