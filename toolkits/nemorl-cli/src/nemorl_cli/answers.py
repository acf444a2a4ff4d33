"""``--json``: standard output holds the answer and nothing else, whatever a plugin or a library prints."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from typing import Annotated, Any, TextIO

import click
import typer

_stream: ContextVar[TextIO | None] = ContextVar("nemorl_answers", default=None)


def echo_json(answer: Any, *, indent: int | None = None, default: Any = None) -> None:
    """Write the answer of a command where its caller reads it."""
    typer.echo(json.dumps(answer, indent=indent, default=default), file=_stream.get())


@contextmanager
def reserved_stdout() -> Iterator[None]:
    """Let everything that is printed appear on standard error, but for answers.

    Also what C code and processes started meanwhile print, which know standard output by its number.
    """
    if _stream.get() is not None:  # by a command that has called this one
        yield
        return
    answers = sys.stdout
    try:
        number = answers.fileno()
    except (io.UnsupportedOperation, AttributeError):  # replaced, by a test or a notebook
        number = None
    if number is None:
        with redirect_stdout(sys.stderr):
            yield from _answering_on(answers)
        return
    answers.flush()
    saved = os.dup(number)
    os.dup2(sys.stderr.fileno(), number)
    try:
        with os.fdopen(os.dup(saved), "w", encoding="utf-8") as stream, redirect_stdout(sys.stderr):
            yield from _answering_on(stream)
    finally:
        os.dup2(saved, number)
        os.close(saved)


def _answering_on(stream: TextIO) -> Iterator[None]:
    token = _stream.set(stream)
    try:
        yield
    finally:
        _stream.reset(token)


def _reserve(context: click.Context, wanted: bool) -> bool:
    if wanted:
        context.with_resource(reserved_stdout())  # until the command has ended
    return wanted


AsJson = Annotated[
    bool, typer.Option("--json", callback=_reserve, help="One JSON object on stdout, no progress display.")
]
