"""From the working package of a kind to one of another name. Nothing is written before everything is known."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from nemorl.base.packages.plugin_policy import normalize
from nemorl.errors import UsageError
from nemorl.plugins import registry
from nemorl.plugins.index import singular

from nemorl_testing.scaffold.names import COMMON, PACKAGES, Names

COMMON_FILES = {"gitignore": ".gitignore", "publish.md": ".github/publish.md", "test.yml": ".github/workflows/test.yml"}
"""Files that all packages share, and where they go."""
LEFT_OUT = {"__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
AUTHORS = re.compile(r"^# authors = .*$", re.MULTILINE)
AUTHOR = re.compile(r"(?P<name>[^<>]*?)\s*(<(?P<email>[^<>\s]+@[^<>\s]+)>)?")


@dataclass(frozen=True)
class Written:
    """Result of writing a package."""

    names: Names
    folder: Path
    files: tuple[str, ...]
    """Relative to the folder"""
    warnings: tuple[str, ...]

    @property
    def next_commands(self) -> tuple[str, str, str]:
        """Commands to type next."""
        return (
            f'pip install -e "{self.folder}[dev]"',
            f"nemorl plugins check {self.names.distribution}:{self.names.entry}",
            f"pytest {self.folder}",
        )


def write_package(names: Names, folder: Path, author: str | None = None) -> Written:
    """Write the package into ``folder``, which must not exist.

    Raises:
        UsageError: it exists, or the name or author cannot be.
    """
    if folder.exists():
        raise UsageError(f"{folder} exists already", fix="choose another --folder, or move it away")
    texts = package_texts(names, author)
    for path, text in texts.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return Written(names, folder, tuple(texts), tuple(_rivals(names)))


def package_texts(names: Names, author: str | None = None) -> dict[str, str]:
    """Path -> text of every file."""
    sources = _files(PACKAGES / names.kind)
    names.check_classes([text for path, text in sources.items() if path.endswith(".py")])
    common = _files(PACKAGES / COMMON)
    sources |= {place: common[name] for name, place in COMMON_FILES.items()}
    texts = {names.put_into(path): names.put_into(text) for path, text in sorted(sources.items())}
    if author is not None:
        line = f"authors = [{_author(author)}]"
        texts["pyproject.toml"] = AUTHORS.sub(lambda _: line, texts["pyproject.toml"], count=1)
    return texts


def _files(root: Path) -> dict[str, str]:
    return {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for path in root.rglob("*")
        if path.is_file() and not LEFT_OUT & set(path.relative_to(root).parts)
    }


def _author(text: str) -> str:
    """``Ada Lovelace <ada@engine.org>`` as a TOML table."""
    found = AUTHOR.fullmatch(text.strip())
    if not found or not found["name"]:
        raise UsageError(f"--author {text!r} is not understood", fix='write "Ada Lovelace <ada@engine.org>"')
    fields = {key: value for key, value in found.groupdict().items() if value}
    return "{" + ", ".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in fields.items()) + "}"


def _rivals(names: Names) -> list[str]:
    """Installed plugins that this one would stand beside, or replace."""
    entries = registry().index.entries
    found = [
        f"{entry.distribution} {entry.version} has a {singular(entry.kind)} {entry.name!r} as well: with both "
        f"installed, configs must say which (plugins.prefer: {{{entry.kind}.{entry.name}: {names.distribution}}})"
        for entry in entries
        if (entry.kind, entry.name) == (names.group, names.entry)
    ]
    if names.distribution in {normalize(entry.distribution) for entry in entries}:
        found.append(f"{names.distribution} is installed: pip would replace it by this package; choose another name")
    return found
