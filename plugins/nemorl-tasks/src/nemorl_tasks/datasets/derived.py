"""Columns that a preset makes of others before a row is converted: options out of a question, lines out of a list, the
box around a part of an image.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from nemorl.errors import DataError

from nemorl_tasks.datasets.mapping import look_up
from nemorl_tasks.datasets.media_rows import Media
from nemorl_tasks.datasets.preset_file import ListedOptions, Preset, Region

LETTER = re.compile(r"[A-Z]\.\s*(?=\S)")
THOUSANDTHS = 1000


def derived(row: Mapping[str, Any], preset: Preset, media: Sequence[Media], place: str) -> Mapping[str, Any]:
    """The row with the columns that the preset makes of others."""
    made: dict[str, Any] = {}
    if preset.region is not None:
        made |= _of_region(row, preset.region, media, place)
    if preset.listed is not None:
        made |= _listed(row, preset.listed, place)
    for column, texts in preset.replaced.items():
        text = str(look_up({**row, **made}, column, place))
        for before, after in texts.items():
            text = text.replace(before, after)
        made[column] = text
    for column in preset.lines:
        made[column] = "\n".join(map(str, look_up(row, column, place)))
    return {**row, **made}


def inside_tag(text: str, tag: str) -> str:
    """What the first ``<tag>…</tag>`` of a line holds, else all of it; without the space around.

    Example:
        >>> inside_tag("<answer> 3 </answer>", "answer"), inside_tag("3 ", "answer")
        ('3', '3')
    """
    found = re.search(rf"<{tag}>(.*?)</{tag}>", text)
    return (found[1] if found else text).strip()


def _listed(row: Mapping[str, Any], listed: ListedOptions, place: str) -> dict[str, Any]:
    question, _, options = str(look_up(row, listed.column, place)).partition(listed.after)
    lines = [line.strip() for line in options.splitlines() if line.strip()]
    answer = str(look_up(row, listed.answer, place))
    return {
        listed.column: question,
        "choices": [LETTER.sub("", line, count=1) if LETTER.match(line) else line for line in lines],
        listed.answer: LETTER.sub("", answer, count=1) if LETTER.match(answer) else answer,
    }


def _of_region(row: Mapping[str, Any], region: Region, media: Sequence[Media], place: str) -> dict[str, Any]:
    phrases, box = look_up(row, region.phrases, place), look_up(row, region.box, place)
    if not isinstance(phrases, list) or not phrases or not isinstance(box, list) or len(box) != 4:
        raise DataError(
            f"{place}: no phrase with a box of four numbers ({phrases!r:.60}, {box!r:.60})", fix="complete it"
        )
    width, height = _size(next(item.data for item in media if item.kind == "image"), place)
    edges = [round(edge / size * THOUSANDTHS) for edge, size in zip(box, (width, height, width, height), strict=True)]
    return {"phrase": max(phrases, key=len), "answer": str(edges)}


def _size(image: Any, place: str) -> tuple[int, int]:
    """Width and height of an image in pixels."""
    from PIL import Image

    if isinstance(image, Image.Image):
        return image.size
    encoded = image["bytes"] if isinstance(image, Mapping) else image
    try:
        with Image.open(io.BytesIO(encoded)) as opened:
            return opened.size
    except (OSError, TypeError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{place}: its image cannot be read ({type(error).__name__})", fix="replace the file"
        ) from error
