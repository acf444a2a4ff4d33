"""The commands in code blocks of the pages, as a reader would type them, and the command line that must know them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import typer.main
from typer.core import TyperGroup

ROOT = Path(__file__).parents[1]
SHELL = ("", "bash", "sh", "shell", "console", "text")
"""Languages of blocks that may hold commands."""
PROGRAMS = ("nemorl", "make", "python", "python3", "pytest")
UNCLOSED = "--unclosed-quote"
_FENCE = re.compile(r" *(`{3,}|~{3,}) *(\w*)")
_BLOCK = re.compile(r"^( *)(```|~~~).*?^\1\2", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(nemorl [^`]+)`")
_PROMPT = re.compile(r"(?:[\w-]*\$ )?")
_VARIABLE = re.compile(r"[A-Z_]+=.*")
_SUBSTITUTION = re.compile(r"\$\(([^()]*)\)")
_ENDS = {"&&", "||", "|", ";", "&", ">", ">>", "<"}
"""What separates one command from the next, or from where its output goes."""


class Documented(NamedTuple):
    """One command of a page: its program and arguments, without variables before it."""

    page: str
    line: int
    words: tuple[str, ...]

    @property
    def program(self) -> str:
        return self.words[0].rpartition("/")[2]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {shlex.join(self.words)}"


def pages() -> list[Path]:
    """All but those that are made anew from the code."""
    every = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in every if not page.is_relative_to(ROOT / "docs/reference")]


@cache
def documented() -> tuple[Documented, ...]:
    """All commands in blocks of all pages, in their order."""
    return tuple(found for page in pages() for found in commands_of(page))


def mentioned(page: Path) -> Iterator[Documented]:
    """What a page's prose calls a command of ``nemorl``, seldom with all its arguments."""
    text = _BLOCK.sub(lambda block: "\n" * block[0].count("\n"), page.read_text(encoding="utf-8"))
    for found in _INLINE.finditer(text):
        words = found[1].translate(str.maketrans("[]|", "   ")).split()
        yield Documented(page.relative_to(ROOT).as_posix(), text.count("\n", 0, found.start()) + 1, tuple(words))


def commands_of(page: Path) -> Iterator[Documented]:
    """The commands of one page's blocks.

    A block that shows prompts holds what was typed and what was printed; only what follows a prompt is a command then.
    """
    name = page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name
    for first, lines in _blocks(page.read_text(encoding="utf-8")):
        has_prompts = any(line.startswith("$ ") for line in lines)
        for number, line in _joined(lines, first):
            if has_prompts and not line.startswith("$ "):
                continue
            for words in _commands(line[_PROMPT.match(line).end() :]):  # type: ignore[union-attr]  # matches all
                yield Documented(name, number, words)


def _blocks(text: str) -> Iterator[tuple[int, list[str]]]:
    """The number of its first line, and the lines of each block that may hold commands."""
    fence, is_shell, first, lines = "", False, 0, list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        found = _FENCE.match(line)
        if fence and found and found[1].startswith(fence):
            if is_shell:
                yield first, lines
            fence = ""
        elif fence:
            lines.append(line.strip())
        elif found:
            fence, is_shell, first, lines = found[1], found[2] in SHELL, number + 1, []


def _joined(lines: list[str], first: int) -> Iterator[tuple[int, str]]:
    """Lines by their number; one that ends with a backslash goes on in the next."""
    begun, whole = 0, ""
    for number, line in enumerate(lines, first):
        begun, whole = begun or number, f"{whole} {line}".strip()
        if line.endswith("\\"):
            whole = whole[:-1]
            continue
        yield begun, whole
        begun, whole = 0, ""


def _commands(line: str) -> Iterator[tuple[str, ...]]:
    """The commands of a line that are ours to know, also those in ``$(…)``."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
    lexer.whitespace_split, lexer.commenters = True, "#"
    try:
        words = list(lexer)
    except ValueError:  # output, or a command that no shell would read, and no program either
        words = [line.split(maxsplit=1)[0], UNCLOSED]
    for inner in _SUBSTITUTION.findall(line):
        yield from _commands(inner)
    command: list[str] = []
    for word in [*words, ";"]:
        if word not in _ENDS:
            command += [] if not command and _VARIABLE.fullmatch(word) else [word]
            continue
        if command and command[0].rpartition("/")[2] in PROGRAMS:
            yield tuple(command)
        command = []


class Call(NamedTuple):
    """What the command line makes of the arguments of ``nemorl``."""

    name: str
    """As ``view page`` or ``runs list``."""
    given: dict[str, Any]
    """Values of its parameters."""


def understood(arguments: Sequence[str]) -> Call:
    """The command that would run, which does not.

    Raises:
        Exception: the command line's own, if it refuses the arguments.
    """
    _calls.clear()
    _tree().main(list(arguments), prog_name="nemorl", standalone_mode=False)
    return _calls[0] if _calls else Call("", {})  # a help text


def unknown(words: Sequence[str]) -> list[str]:
    """Of words that prose gives to ``nemorl``: a command that is none, and options that it does not have."""
    command, found = _tree(), list[str]()
    for word in words:
        below = getattr(command, "commands", {})
        if word in below:
            command = below[word]
        elif command is _tree() and not found and re.fullmatch(r"[a-z][a-z-]*", word):
            found.append(word)
    known = {*_options(_tree()), *_options(command)}
    return found + [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]


def _options(command: Any) -> set[str]:
    """Those of a command and of all below it."""
    below = getattr(command, "commands", {}).values()
    own = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    return own.union({"--help"}, *map(_options, below))


_calls: list[Call] = []
"""What the commands of the tree below have been called with."""


@cache
def _tree() -> Any:
    """The command line with all plugins' commands in their places, each of which only says that it was called."""
    from nemorl.plugins import registry
    from nemorl_cli.app import app

    root: Any = typer.main.get_command(app)
    for entry in registry().index.of_kind("commands"):
        group, _, name = entry.name.rpartition(".")
        own = typer.main.get_command(registry().load("commands", entry.id))
        (root.commands[group] if group else root).commands[name] = own
    _replace(root, ())
    return root


def _replace(command: Any, path: tuple[str, ...]) -> None:
    if not isinstance(command, TyperGroup):
        command.callback = lambda **given: _calls.append(Call(" ".join(path), given))
    for name, below in getattr(command, "commands", {}).items():
        _replace(below, (*path, name))
