"""Documents, and finding them: BM25 as Lucene has it, by the library bm25s (arXiv:2407.03618)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
from nemorl.base.text.suggest import did_you_mean
from nemorl.errors import DataError

READABLE = (".jsonl", ".txt", ".md")
MAX_QUERY_CHARS = 1000
"""The part of a query that is looked for: what is longer is no question."""


class Corpus:
    """An index of documents. Reading only, from any number of threads."""

    def __init__(self, documents: Sequence[str], *, k1: float, b: float) -> None:
        """
        Args:
            documents: Their texts, at least one with a word in it.
            k1: Saturation of a word's occurrences.
            b: Weight of a document's length.
        """
        self._documents = documents
        self._index: Any = bm25s.BM25(k1=k1, b=b, method="lucene")
        self._index.index([words(text) for text in documents], show_progress=False)

    def search(self, query: str, limit: int) -> list[str]:
        """The best documents that have a word of the query, best first; of equals, the first in the corpus."""
        asked = words(query[:MAX_QUERY_CHARS])
        if not asked:
            return []
        scores = self._index.get_scores(asked)
        best = np.argsort(-scores, kind="stable")[:limit]
        return [self._documents[number] for number in best if scores[number] > 0]


def words(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return re.findall(r"\w+", text.lower())


def read_documents(path: Path, text_column: str, title_column: str | None) -> list[str]:
    """The documents of a file or folder.

    Raises:
        DataError: there are none, or a row has no text.
    """
    paths = sorted(file for file in path.rglob("*") if file.suffix in READABLE) if path.is_dir() else [path]
    documents = [text for file in paths for text in _documents_of(file, text_column, title_column) if words(text)]
    if not documents:
        raise DataError(f"the corpus {path} holds no document", fix=f"give files of {', '.join(READABLE)} with text")
    return documents


def _documents_of(file: Path, text_column: str, title_column: str | None) -> Iterator[str]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {file} of the corpus: {error}", fix="give text files in UTF-8") from error
    if file.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.split("\n"), start=1):  # a document may hold other line ends
        if line.strip():
            yield _document(line, f"{file}, line {number}", text_column, title_column)


def _document(line: str, place: str, text_column: str, title_column: str | None) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place}: no JSON: {error}", fix="write one object per line") from error
    parts = []
    for column in (title_column, text_column):
        if column is None:
            continue
        if not isinstance(row, dict) or not isinstance(row.get(column), str):
            names = [str(name) for name in row] if isinstance(row, dict) else []
            raise DataError(
                f"{place}: no text in column {column!r} (it has {', '.join(names) or 'no columns'})",
                fix=did_you_mean(column, names) or "set environment.text_column and title_column",
            )
        parts.append(row[column])
    return "\n".join(parts)
