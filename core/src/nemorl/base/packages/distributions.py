"""Installed distributions, read so that a damaged one concerns nobody else.

``importlib.metadata`` raises if a file of a distribution is no text or holds a line that it does not expect: one
interrupted installation would end every question about all of them. :func:`installed` finds the same distributions and
leaves out what cannot be read of them; :meth:`InstalledDistribution.damage_of` says what that was. Other libraries read
metadata as they always do.
"""

from __future__ import annotations

import stat
import traceback
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from sysconfig import get_paths
from typing import Any

from nemorl.base.text.reading import is_file

MAX_BYTES = 32 << 20
"""Of one metadata file. torch's RECORD, among the longest, has 1.5 MB; 50,000 entry points have 3."""
POINTS = "entry_points.txt"
RECORD = "RECORD"


class InstalledDistribution(metadata.PathDistribution):
    """A distribution whose files may be damaged, missing or no files at all. Reading them never raises nor waits."""

    def __init__(self, path: Any) -> None:
        super().__init__(path)
        self.place = path
        """The ``.dist-info`` or ``.egg-info`` folder, which may be a file or in an archive."""

    def read_text(self, filename: Any) -> str | None:
        return self.examine(str(filename))[0]

    def damage_of(self, filename: str) -> str | None:
        """The fault of a file; ``None``: it has none, or there is no file."""
        return self.examine(filename)[1]

    def examine(self, filename: str) -> tuple[str | None, str | None]:
        """The usable part of a file's text, and the fault of the rest."""
        try:
            content = self._content(filename)
            if content is None:
                return None, None
        except _UnreadableError as error:
            return None, f"its {filename or 'file'} {error}"
        except Exception as error:  # of an archive that is damaged, whatever its reader raises
            return None, f"its {filename or 'file'} cannot be read ({error})"
        damage = None
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            text, damage = content.decode(errors="replace"), f"its {filename} cannot be read ({error.reason})"
        return _sound_points(text, damage) if filename == POINTS else (text, damage)

    def _content(self, filename: str) -> bytes | None:
        if not isinstance(self.place, Path):  # in a zip archive
            member = self.place.joinpath(filename) if filename else self.place
            found: bytes | None = member.read_bytes() if member.is_file() else None
            return found
        path = self.place / filename
        with suppress(FileNotFoundError, NotADirectoryError):
            found_as = path.stat()
            if stat.S_ISDIR(found_as.st_mode) and not filename:
                return None  # PathDistribution asks for "" to find an .egg-info that is a file
            if not stat.S_ISREG(found_as.st_mode):
                raise _UnreadableError("is no file")  # reading a pipe would wait for ever
            if found_as.st_size > MAX_BYTES:
                raise _UnreadableError(f"is larger than {MAX_BYTES >> 20} MiB")
            return path.read_bytes()
        return None

    @property
    def files(self) -> list[metadata.PackagePath] | None:
        try:
            return super().files
        except Exception:  # a RECORD is a table, of which each cell may be anything
            return None

    @property
    def _normalized_name(self) -> str:  # what importlib.metadata tells distributions apart by
        try:
            return str(super()._normalized_name)  # type: ignore[misc]
        except Exception:
            return self.folder_name.lower()

    @property
    def folder_name(self) -> str:
        """The name in the folder's, for a distribution whose METADATA has none."""
        name = Path(str(self.place)).name.encode(errors="replace").decode()
        return name.partition("-")[0].removesuffix(".dist").removesuffix(".egg") or "unknown"


class _UnreadableError(Exception):
    """A metadata file that nobody should try to read."""


def guarded(found: metadata.Distribution) -> metadata.Distribution:
    """A distribution in a folder, read so that it can be damaged."""
    place = vars(found).get("_path")
    return found if place is None or isinstance(found, InstalledDistribution) else InstalledDistribution(place)


def installed(path: list[str] | None = None) -> Iterator[metadata.Distribution]:
    """Every distribution on ``sys.path``, or on another path. The first of a name wins, as it does for import."""
    seen = set()
    everyone = metadata.distributions() if path is None else metadata.distributions(path=path)
    for found in map(guarded, everyone):
        name = found._normalized_name  # type: ignore[attr-defined]
        if name not in seen:
            seen.add(name)
            yield found


def points_of(found: metadata.Distribution, prefix: str) -> tuple[list[metadata.EntryPoint], str | None]:
    """The entry points of groups that start with ``prefix``, and what is wrong with the distribution's list."""
    if isinstance(found, InstalledDistribution):
        text, damage = found.examine(POINTS)
        if text is None or prefix not in text:
            return [], damage or _damage_of_place(found)
        return [point for point in found.entry_points if point.group.startswith(prefix)], damage
    try:  # of a finder that is not Python's own
        return [point for point in found.entry_points if point.group.startswith(prefix)], None
    except Exception as error:
        return [], f"its entry points cannot be read ({type(error).__name__}: {error})"


def _damage_of_place(found: InstalledDistribution) -> str | None:
    place = found.place
    if not isinstance(place, Path) or place.suffix != ".dist-info":
        return None
    try:
        return None if stat.S_ISDIR(place.stat().st_mode) else f"{place.name} is no folder"
    except OSError as error:
        return f"{place.name} cannot be opened ({error.strerror})"


def _sound_points(text: str, damage: str | None) -> tuple[str, str | None]:
    """The lines that importlib.metadata can parse: groups in brackets, and ``name = value``."""
    sound, in_a_group, no_text = [], False, damage is not None
    for line in filter(None, map(str.strip, text.splitlines())):
        readable = not (no_text and "\N{REPLACEMENT CHARACTER}" in line)
        if readable and line.startswith("[") and line.endswith("]"):
            in_a_group = True
        elif line.startswith("#"):
            continue
        elif not (readable and in_a_group and "=" in line):
            damage = damage or f"its {POINTS} has a line that is no entry point: {line[:80]!r}"
            in_a_group = in_a_group and not line.startswith("[")  # nobody knows whose the lines after such a group are
            continue
        sound.append(line)
    return "\n".join(sound), damage


def place_of(error: BaseException) -> str | None:
    """The innermost line of a traceback that is neither nemorl's nor of an installed package or Python itself.

    >>> place_of(ValueError("never raised")) is None
    True
    """
    libraries = tuple(get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib"))
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
        is_ours = module.startswith("nemorl") and "." in module
        if is_file(file) and not file.startswith(libraries) and not is_ours:
            with suppress(OSError, ValueError):  # the current folder is gone, or the file is elsewhere
                file = str(Path(file).relative_to(Path.cwd()))
            return f"{file}, line {line}"
    return None
