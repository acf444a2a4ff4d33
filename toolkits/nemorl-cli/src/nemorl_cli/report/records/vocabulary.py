"""``records/_tokens.jsonl``: the text of each token that occurs in records, so that no reader needs a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from nemorl.base.files.jsonl import JsonlWriter, read_jsonl

if TYPE_CHECKING:
    import pyarrow as pa

FILE = "_tokens.jsonl"
"""Readers of a folder of Parquet files leave names with an underscore alone."""


class Vocabulary:
    """Adds tokens to the file when they occur for the first time."""

    def __init__(self, folder: Path, decode: Callable[[Sequence[int]], str]) -> None:
        """
        Args:
            folder: Of the records.
            decode: Token ids to text.
        """
        self._path, self._decode = folder / FILE, decode
        self._known: set[int] | None = None

    def add(self, table: pa.Table) -> None:
        """Those of a table of records."""
        if self._known is None:
            self._known = set(token_texts(self._path.parent))
        tokens = (
            table["sequences"].combine_chunks().flatten().field("token_ids").flatten().to_numpy(zero_copy_only=False)
        )
        new = sorted(set(np.unique(tokens).tolist()) - self._known)
        if not new:
            return
        with JsonlWriter(self._path) as file:
            for token in new:
                file.write({"id": token, "text": self._decode([token])})
        self._known.update(new)


def token_texts(folder: Path) -> dict[int, str]:
    """Token id -> its text, of all that occur in a folder of records."""
    lines = read_jsonl(folder / FILE)
    return {line["id"]: str(line["text"]) for line in lines if isinstance(line.get("id"), int) and "text" in line}
