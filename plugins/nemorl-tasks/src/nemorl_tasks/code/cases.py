"""The tests of a row, and the program of a response."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nemorl.errors import DataError

_FENCE = re.compile(r"([ \t]*)(`{3,}(?=[^`]*$)|~{3,})[ \t]*([\w+-]*)")
LANGUAGES = ("", "python", "py", "python3")


@dataclass(frozen=True)
class Pair:
    """The input of a program, and the output that it must print."""

    input: str
    output: str

    def accepts(self, printed: str) -> bool:
        """Line by line, space at line ends and empty lines at the end aside."""
        return _lines(printed) == _lines(self.output)


def last_program(response: str) -> str | None:
    """The last fenced block that is Python or says nothing else; ``None`` where there is none.

    Fences are Markdown's: of backticks or tildes, closed by as many at least, or by the end of the response.
    """
    programs = [text for language, text in _blocks(response) if language.lower() in LANGUAGES and text.strip()]
    return programs[-1] if programs else None


def _blocks(response: str) -> Iterator[tuple[str, str]]:
    """Language and text of each fenced block, without the indentation that its fence has."""
    language, mark, indent = "", "", 0
    lines: list[str] = []
    for line in response.split("\n"):
        text = line.strip()
        if mark and text.startswith(mark) and not text.strip(mark[0]):
            yield language, "".join(lines)
            mark = ""
        elif mark:
            lines.append(line[min(indent, len(line) - len(line.lstrip())) :] + "\n")
        elif found := _FENCE.match(line):
            indent, mark, language, lines = len(found[1]), found[2], found[3], []
    if mark:
        yield language, "".join(lines)


def read_tests(given: Any, where: str) -> list[Pair] | list[str]:
    """Pairs or assert statements, out of the forms that datasets have.

    Args:
        given: A list of either, ``{"inputs": […], "outputs": […]}``, or JSON text of these.
        where: For the error.

    Raises:
        DataError: it is none of these.
    """
    if isinstance(given, str):
        with suppress(ValueError):  # it is a statement
            given = json.loads(given)
    if isinstance(given, str):
        given = [given] if given.strip() else None
    if isinstance(given, Mapping) and {"inputs", "outputs"} <= given.keys():
        inputs, outputs = given["inputs"], given["outputs"]
        if isinstance(inputs, list | tuple) and isinstance(outputs, list | tuple) and len(inputs) == len(outputs):
            given = [{"input": i, "output": o} for i, o in zip(inputs, outputs, strict=True)]
    if isinstance(given, Sequence) and given:
        if all(isinstance(test, str) for test in given):
            return list(given)
        if all(isinstance(test, Mapping) and {"input", "output"} <= test.keys() for test in given):
            return [Pair(_text(test["input"]), _text(test["output"])) for test in given]
    raise DataError(
        f"{where} has no usable tests: {given!r:.200}",
        fix='give rows `tests`: a list of {"input": "…", "output": "…"}, or of assert statements (or set tests_column)',
    )


def _text(value: Any) -> str:
    """Datasets hold numbers, or lists of lines, where a program reads and prints text."""
    if isinstance(value, list | tuple):
        return "\n".join(map(str, value))
    return str(value)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
