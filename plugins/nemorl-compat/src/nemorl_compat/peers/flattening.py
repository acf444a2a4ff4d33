"""Nested configs as one mapping of dotted keys, and text as the values that it stands for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from nemorl.base.text.reading import UnreadableError
from nemorl.base.text.yaml_text import parse_yaml

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def flat(data: Mapping[str, Any], system: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if system == "verl" and isinstance(value, Mapping) and value:
            yield from flat(value, system, f"{prefix}{key}.")
        elif key != "_target_":
            yield f"{prefix}{key}", scalar(value) if isinstance(value, str) else value


def scalar(text: str) -> Any:
    """``1e-6`` is a number, ``True`` is true, ``[a,b]`` a list; all else is text."""
    if _NUMBER.fullmatch(text):
        return float(text) if re.search(r"[.eE]", text) else int(text)
    words = {"true": True, "false": False, "null": None}  # `none` is a word that many options take
    if text.lower() in words:
        return words[text.lower()]
    if text[:1] in ("[", "{"):
        try:
            return parse_yaml(text)
        except UnreadableError:
            return text
    return text
