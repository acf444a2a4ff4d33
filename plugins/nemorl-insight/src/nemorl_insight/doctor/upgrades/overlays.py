"""An environment with other versions of a few distributions, and otherwise the present one's.

Its ``site-packages`` holds only what changed; a ``.pth`` file adds the folders of this process's ``sys.path`` behind
it, so that the new versions are found first. The present environment is read and never written to. Where a package is a
namespace without ``__init__`` (``megatron``), modules that only the installed version has stay importable.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemorl.base.files.atomic import listed, remove, replace_text, replacing_folder
from nemorl.errors import PluginError
from platformdirs import user_cache_path

from nemorl_insight.doctor.upgrades.processes import run_limited
from nemorl_insight.doctor.upgrades.resolving import Change, pip

RECORD = "nemorl-try.json"
"""In the folder of an environment: what it is made of. A folder without it is not ours."""
PATHS = "zz-present-environment.pth"
UNPACK_S = 3600.0
"""Longest time for pip to download and unpack."""


@dataclass(frozen=True)
class Overlay:
    """An environment on top of another."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        return next(self.folder.glob("lib/python*/site-packages"))

    @property
    def record(self) -> Mapping[str, Any]:
        return json.loads((self.folder / RECORD).read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def cache_folder() -> Path:
    """The folder that holds environments and reports."""
    return Path(user_cache_path("nemorl")) / "upgrades"


def overlay_of(changes: Sequence[Change]) -> Path:
    """The folder in which these versions on top of this environment are kept."""
    on = json.dumps([[change.pin for change in changes], sys.prefix, sys.version, present_paths()])
    return cache_folder() / f"{changes[0].name}-{changes[0].version}-{hashlib.sha256(on.encode()).hexdigest()[:8]}"


@contextmanager
def overlay(changes: Sequence[Change], pip_args: Sequence[str] = (), *, keep: bool = False) -> Iterator[Overlay]:
    """An environment with the changes: the kept one, or a new one that is removed unless it is to be kept.

    An interruption leaves nothing but an environment that is complete and kept.

    Raises:
        PluginError: pip or venv fails; says what it says.
    """
    folder = overlay_of(changes)
    if (folder / RECORD).is_file():
        yield Overlay(folder)
        return
    if not keep:  # another process may try the same
        folder = folder.with_name(f"{folder.name}-{os.getpid()}")
    try:
        yield _made(folder, changes, pip_args)
    finally:
        if not keep:
            remove(folder)


def _made(folder: Path, changes: Sequence[Change], pip_args: Sequence[str]) -> Overlay:
    with replacing_folder(folder) as draft:
        done = run_limited([sys.executable, "-P", "-m", "venv", "--without-pip", str(draft)], UNPACK_S)
        if done.code != 0:
            raise PluginError(f"venv cannot make {folder}: {done.error}", fix="see what it says")
        made = Overlay(draft)
        options = ("--quiet", "--no-deps", "--no-compile", "--ignore-installed", *pip_args)
        pins = [change.pin for change in changes]
        done = run_limited(pip("--python", str(made.python), "install", *options, *pins), UNPACK_S)
        if done.code != 0:
            raise PluginError(f"pip cannot install {', '.join(pins)}: {done.error}", fix="see what it says")
        replace_text(made.site_packages / PATHS, "\n".join(_path_lines()) + "\n")
        facts = {"pins": pins, "on": sys.prefix}
        replace_text(draft / RECORD, json.dumps(facts))
    return Overlay(folder)


def present_paths() -> list[str]:
    """The folders that this process imports from, without the standard library's."""
    standard = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    scripts = os.path.realpath(Path(sys.executable).parent)
    found = []
    for path in dict.fromkeys(sys.path):
        real = os.path.realpath(path)
        is_standard = real in standard or (os.path.dirname(real) in standard and not real.endswith("-packages"))
        if path and os.path.isdir(path) and not is_standard and real != scripts:
            found.append(os.path.abspath(path))
    return found


def _path_lines() -> Iterator[str]:
    paths = present_paths()
    yield from paths
    for path in paths:  # known by now: only their .pth files are read, for editable installs
        if listed(Path(path), "*.pth"):
            yield f"import site; site.addsitedir({path!r})"


def variables(overlay: Overlay | None) -> dict[str, str]:
    """Environment variables of a process in an overlay, or in the present environment for ``None``.

    ``PYTHONPATH`` would come before both; what it names is among the overlay's folders.
    """
    found = dict(os.environ)
    if overlay is not None:
        found.pop("PYTHONPATH", None)
        found["VIRTUAL_ENV"] = str(overlay.folder)
        found["PATH"] = os.pathsep.join((str(overlay.folder / "bin"), found.get("PATH", "")))
    return found


def kept() -> list[Overlay]:
    """Environments that are kept."""
    return [Overlay(path) for path in listed(cache_folder()) if (path / RECORD).is_file()]


def clean() -> int:
    """Remove all kept environments, and what killed processes left of others.

    Returns:
        Bytes that they took.
    """
    left = [path for name in (".writing_*", ".replaced_*") for path in listed(cache_folder(), name)]
    total = 0
    for folder in [*(overlay.folder for overlay in kept()), *left]:
        total += size(folder)
        remove(folder)
    return total


def size(folder: Path) -> int:
    """Bytes of the files below a folder."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += 0 if path.is_symlink() else path.stat().st_size
    return total
