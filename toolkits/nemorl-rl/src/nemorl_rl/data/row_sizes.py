"""Texts are bounded before they are tokenised: to find out that they do not fit takes minutes, or all memory.

The bound is generous. Tokens of text have about 4 characters, those of code and white space sometimes 16; what has 64
on the average is no text, or far too much of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemorl.errors import DataError
from nemorl.types import Row

CHARACTERS_PER_TOKEN = 64
COLUMNS = ("prompt", "messages", "response", "completion", "chosen", "rejected", "tools")
"""Columns that become tokens. Other columns are for environments."""


def require_size(row: Row, name: str, max_tokens: int) -> None:
    """Refuse a row that cannot fit.

    Args:
        row: Of a dataset.
        name: Which one, for the message.
        max_tokens: Of a sequence.

    Raises:
        DataError: One of its texts is longer than so many tokens can be.

    Example:
        >>> require_size({"prompt": "x" * 1000}, "row 7", max_tokens=10)
        Traceback (most recent call last):
            ...
        nemorl.errors.DataError: row 7: `prompt` has 1,000 characters, and 10 tokens hold 640 at the most
    """
    most = longest_text(max_tokens)
    for column in COLUMNS:
        if (size := _characters(row.get(column), most)) > most:
            at_least = "at least " if size > 2 * most else ""
            raise DataError(
                f"{name}: `{column}` has {at_least}{size:,} characters, and {max_tokens:,} tokens hold {most:,} at the "
                "most",
                fix="leave the row out or cut it (is a line break missing?), or raise policy.max_sequence_tokens",
            )


def longest_text(max_tokens: int) -> int:
    """Characters that so many tokens hold at the most."""
    return CHARACTERS_PER_TOKEN * max_tokens


def _characters(value: Any, most: int) -> int:
    """Of all texts in a value; of what is far beyond the bound only so many."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return 0
    size = 0
    for item in value:
        size += _characters(item, most - size)
        if size > 2 * most:
            break
    return size
