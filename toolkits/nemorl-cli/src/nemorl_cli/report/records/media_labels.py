"""Images and sounds of records in the terminal: ``[image 90x60 1f3a…]``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemorl_cli.report.records.media_files import media_file
from nemorl_cli.report.records.reading import FOLDER

GONE = "not kept"


def file_size(folder: Path, digest: str) -> str:
    """Width and height of an image in pixels, or seconds of a sound; empty where its file does not say.

    Args:
        folder: Of the records.
        digest: Of the item.
    """
    from nemorl_media.labels import size_of

    path = media_file(folder, digest)
    if path is None:
        return GONE
    with path.open("rb") as file:
        return size_of(file)


def labels_of(run_dir: Path, items: Sequence[Mapping[str, Any]] | None) -> list[str]:
    """Each item of the column ``media`` in brackets.

    Args:
        run_dir: Of the run.
        items: Of a record.
    """
    if not items:
        return []
    from nemorl_media.labels import label

    folder = Path(run_dir) / FOLDER
    return [label(item["kind"], file_size(folder, item["digest"]), item["digest"]) for item in items]


def with_labels(text: str, shown: Sequence[Mapping[str, int]] | None, labels: Sequence[str]) -> str:
    """The text of a turn with its items in their places.

    Args:
        text: Of the turn.
        shown: ``shown`` of the turn.
        labels: Of the episode's items.

    Example:
        >>> with_labels("ab", [{"item": 0, "at": 1, "tokens": 4}], ["[image]"])
        'a [image] b'
    """
    found, end = "", 0
    for one in shown or ():
        found = _apart(_apart(found, text[end : one["at"]]), labels[one["item"]])
        end = one["at"]
    return _apart(found, text[end:])


def _apart(one: str, other: str) -> str:
    """One text after the other, with a space between them."""
    return f"{one}{other}" if not one or not other or one[-1].isspace() or other[0].isspace() else f"{one} {other}"
