"""Text for the terminal. Everything that nemorl prints goes through here, because much of it is not ours: names and
summaries of plugins, model and dataset names, messages of other people's exceptions, responses of a model.

Foreign text may not move the cursor, set links or the clipboard, recolour, reverse or hide what is around it: control
characters are shown as escapes (``\\x1b``), and rich's markup and emoji codes are plain text.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, Literal

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPE_COLUMNS = 200
"""Width of tables where no terminal says one: wide enough that little is cut."""
GAP = 2
"""Spaces between columns."""
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
_ACTIVE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and line feed, the C1 set included
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction of text
    r"\u00ad\u200b\u2028\u2029\u2060-\u2065\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # invisible
    r"\ud800-\udfff]"  # half of a pair: no terminal's encoding has it
)


def plain(text: object) -> str:
    """``text`` in which nothing acts: colours are dropped, other control characters are shown as escapes."""
    return _ACTIVE.sub(_escape, _COLOURS.sub("", str(text)).replace("\r\n", "\n"))


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def say(text: object = "", *, lead: str = "", err: bool = False, nl: bool = True) -> None:
    """Print a line.

    Args:
        text: Of any origin.
        lead: Goes before it as it is: our own words, styled by ``typer.style``.
        err: To stderr.
        nl: End the line.
    """
    typer.echo(lead + plain(text), err=err, nl=nl)


def called() -> str:
    """How this command is called from here: ``nemorl``, or by its path where a shell would not find it."""
    own = Path(sys.argv[0])
    found = shutil.which("nemorl")
    if found is not None and Path(found).resolve() == own.resolve():
        return "nemorl"
    return str(own) if own.name == "nemorl" and own.is_file() else "nemorl"


def styled(text: object, style: str = "", **options: Any) -> Text:
    """Text for a table or console, in one of rich's styles."""
    return Text(plain(text), style=style, **options)


class PlainConsole(Console):
    """A rich console to which a ``str`` is text and nothing else: no markup, no emoji codes, no control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(plain(text), **options)


def console(*, err: bool = False, quiet: bool = False) -> PlainConsole:
    """A console on stdout or stderr, wide where that is no terminal."""
    stream = sys.stderr if err else sys.stdout
    return PlainConsole(stderr=err, quiet=quiet, width=None if stream.isatty() else PIPE_COLUMNS)


def print_list(columns: Sequence[str], rows: Sequence[Sequence[str]], *, first_to_go: Sequence[str] = ()) -> None:
    """Print a table in which nothing is ever broken over lines.

    On a narrow terminal the columns of ``first_to_go`` are left out, in this order, until the rest fits; where it does
    not, each row becomes two lines: its first cell alone, so that it can be copied, and the others below.
    """
    width = console().width
    left_out: set[str] = set()
    for column in ("", *first_to_go):
        left_out.add(column)
        kept = [position for position, name in enumerate(columns) if name not in left_out]
        table = [[plain(line[position]) for position in kept] for line in (columns, *rows)]
        widths = [max(cell_len(line[place]) for line in table) for place in range(len(kept))]
        if sum(widths) + GAP * (len(kept) - 1) <= width:
            for line in table:
                cells = (cell + " " * (widths[place] - cell_len(cell)) for place, cell in enumerate(line))
                say((" " * GAP).join(cells).rstrip())
            return
    for first, *others in rows:
        say(first)
        facts = [f"{name.lower()} {cell}" for name, cell in zip(columns[1:], others, strict=True)]
        say(fill(", ".join(facts), max(width, 20), initial_indent="  ", subsequent_indent="  "))


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, whole: Sequence[str] = (), numbers: Sequence[str] = ()
) -> None:
    """Print a table without lines.

    Args:
        columns: Their titles.
        rows: One cell per column: text, or what ``styled`` returns.
        whole: Columns that are never broken over lines nor cut.
        numbers: Columns that end at one place.
    """
    table = Table(box=None, pad_edge=False)
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in numbers else "left"
        table.add_column(plain(column), overflow="fold", no_wrap=column in whole, justify=justify)
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else styled(cell) for cell in row))
    console().print(table)
