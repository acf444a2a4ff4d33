"""Prompt files of NeMo RL: where they are, and the template that renders as their text does there."""

from __future__ import annotations

from pathlib import Path
from string import Formatter

from nemorl.errors import DataError


def text_of(folders: tuple[Path, ...], file: str) -> str | None:
    """A file as it is, from the first folder (or a folder above it) that has it.

    Returns:
        Its text; ``None`` where there is no such file.
    """
    for folder in folders:
        for above in (folder, *folder.parents):
            path = above / file
            if path.is_file():
                return path.read_text(encoding="utf-8")
    return None


def template_of(text: str, column: str, source: str = "prompt file") -> str:
    r"""The template that renders as ``text.format(problem)`` does, which is what NeMo RL makes of a prompt file.

    There ``{}`` is the problem, here the name of its column: ``{problem}``. ``{{`` and ``}}`` are braces in both.

    Raises:
        DataError: ``str.format`` would refuse the text, or fill in more than one problem.

    >>> template_of(r"Answer in \boxed{{}}: {}", "question")
    'Answer in \\boxed{{}}: {question}'
    """
    try:
        parts = list(Formatter().parse(text))
    except ValueError as error:
        raise DataError(f"{source}: {error}", fix="double the braces that are meant as such: {{ and }}") from error
    names = [name for _, name, _, _ in parts if name is not None]
    if names.count("") > 1 or ("" in names and "0" in names):
        raise DataError(f"{source}: it has several places for one problem", fix="write {0} at each of them")
    made = []
    for literal, name, spec, conversion in parts:
        made.append(literal.replace("{", "{{").replace("}", "}}"))
        if name is None:
            continue
        if name not in ("", "0") or spec or conversion:
            raise DataError(
                f"{source}: {{{name}}} asks for more than the problem, which is all that NeMo RL fills in",
                fix="write {} where the problem goes, and {{…}} for braces",
            )
        made.append(f"{{{column}}}")
    return "".join(made)
