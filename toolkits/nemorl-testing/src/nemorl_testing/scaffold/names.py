"""Typed words as a kind of plugin, and as the names of a package."""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nemorl.errors import UsageError
from nemorl.plugins import index

PACKAGES = Path(__file__).parent / "packages"
COMMON = "common"
MAX_CHARS = 30
"""Longest name: with a longer one, lines of the package would have to be broken otherwise."""
KERNEL = "core"
"""``nemorl-core`` is the kernel."""

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
_ORIGINAL = re.compile(r"(?P<distribution>nemorl-example)|(?P<module>nemorl_example)|(?P<stem>\bExample)")
_ENTRY = re.compile(r"(?<![A-Za-z0-9])example(?![A-Za-z0-9])")
_CLASS = re.compile(r"\b[A-Z]\w*")


def kinds() -> list[str]:
    """Kinds that ``nemorl plugins new`` can write, in the singular."""
    return sorted(path.name for path in PACKAGES.iterdir() if path.name != COMMON and path.is_dir())


def kind_called(text: str) -> str:
    """``environment`` for ``environments``, ``training_backend`` for ``Training-Backends``.

    Raises:
        UsageError: there is no such kind; says which one was probably meant.
    """
    return index.kind_called(text).removesuffix("s")


@dataclass(frozen=True)
class Names:
    """One name, in every form that a package needs."""

    kind: str
    words: tuple[str, ...]

    @classmethod
    def of(cls, kind: str, text: str) -> Names:
        """The names of ``raft-2`` or ``nemorl-raft-2``.

        Raises:
            UsageError: it cannot be the name of a plugin and of a Python package; says why.
        """
        name = text.strip().removeprefix("nemorl-").removeprefix("nemorl_")
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{text!r} cannot be a plugin's name: lower-case letters and digits, words joined by '-' or '_', the "
                "first a letter",
                fix=_nearest(name),
            )
        names = cls(kind, tuple(re.split("[-_]", name)))
        if keyword.iskeyword(names.identifier):
            raise UsageError(f"{text!r} is a keyword of Python", fix=f"add a word, e.g. my-{name}")
        if len(name) > MAX_CHARS:
            raise UsageError(f"{text!r} has {len(name)} characters", fix=f"use at most {MAX_CHARS}")
        if name == KERNEL:
            raise UsageError("nemorl-core is the kernel of nemorl", fix=f"add a word, e.g. my-{name}")
        return names

    @property
    def identifier(self) -> str:
        """``raft_2``"""
        return "_".join(self.words)

    @property
    def distribution(self) -> str:
        """``nemorl-raft-2``: what pip installs."""
        return f"nemorl-{'-'.join(self.words)}"

    @property
    def module(self) -> str:
        """``nemorl_raft_2``: what Python imports."""
        return f"nemorl_{self.identifier}"

    @property
    def stem(self) -> str:
        """``Raft2``: what its classes begin with."""
        return "".join(word.capitalize() for word in self.words)

    @property
    def entry(self) -> str:
        """Its name in configs: ``raft_2``. A command is typed, hence ``raft-2``."""
        return "-".join(self.words) if self.kind == "command" else self.identifier

    @property
    def group(self) -> str:
        """The kind as the index calls it."""
        return f"{self.kind}s"

    def put_into(self, text: str) -> str:
        """``text`` about the plugin ``example``, about this one."""
        named = _ORIGINAL.sub(lambda match: str(getattr(self, match.lastgroup or "")), text)
        return _ENTRY.sub(self.entry, named)

    def check_classes(self, sources: Sequence[str]) -> None:
        """Refuse names whose classes would hide others of the same file.

        Raises:
            UsageError: e.g. ``run`` for an algorithm, whose ``RunConfig`` would derive from itself.
        """
        for source in sources:
            before = set(_CLASS.findall(source))
            kept = {name for name in before if not name.startswith("Example")}
            hidden = kept & {self.put_into(name) for name in before - kept}
            if hidden:
                raise UsageError(
                    f"the {self.kind.replace('_', ' ')} {self.entry!r} would need a class {min(hidden)}, which nemorl "
                    "has already",
                    fix=f"add a word, e.g. my-{self.entry.replace('_', '-')}",
                )


def _nearest(name: str) -> str | None:
    """The same name in permitted characters, if there is anything left of it."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower())
    tidy = "-".join(words).lstrip("0123456789-")
    return f"e.g. {tidy}" if _NAME.fullmatch(tidy) else "e.g. my-plugin"
