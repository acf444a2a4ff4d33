"""Help texts that fill the terminal, however wide it is."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import typer

_BROKEN_LINE = re.compile(r"(?<=\S)\n(?=[^\s-])")
"""A line break in a paragraph, which is none before an indented line or one of a list."""


class App(typer.Typer):
    """A typer app that shows the paragraphs of its commands' docstrings without the line breaks of the source.

    Typer by itself keeps those of all paragraphs but the first.
    """

    def command(self, name: str | None = None, *, help: str | None = None, **options: Any) -> Callable[..., Any]:  # type: ignore[override]
        """As typer's. ``help``: in place of the docstring."""

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            text = help if help is not None else flowing(inspect.getdoc(function) or "")
            return super(App, self).command(name, help=text or None, **options)(function)

        return register


def flowing(text: str) -> str:
    """Each paragraph on one line.

    >>> flowing("One\\ntwo.\\n\\n  kept as\\n  it is\\n\\n- a\\n- b")
    'One two.\\n\\n  kept as\\n  it is\\n\\n- a\\n- b'
    """
    return _BROKEN_LINE.sub(" ", text)
