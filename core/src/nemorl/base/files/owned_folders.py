"""Temporary folders that say whose they are, so that what killed runs leave can be found and removed.

A folder of ours is called ``nemorl-…`` (or ``nrl-…``, where paths are short), belongs to this user and holds a mark:
which process made it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from nemorl.base.files.ownership import Owner

PREFIXES = ("nemorl-", "nrl-")
MARK = ".nemorl-owner"
"""File in a folder: who made it. It names no command, since programs in a sandbox can read it."""


def owned_folder(prefix: str, parent: str | Path | None = None) -> Path:
    """A new temporary folder of this process, for nobody else to read. Whoever asks for it removes it.

    Args:
        prefix: Of its name; begins with one of ``PREFIXES``.
        parent: Unset: the folder for temporary files.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    mark(folder)
    return folder


def mark(folder: str | Path) -> None:
    """Say in a temporary folder that it is this process's."""
    assert Path(folder).name.startswith(PREFIXES), "others are not found again"
    owner = replace(Owner.me(), command="")
    (Path(folder) / MARK).write_text(json.dumps({**asdict(owner), "namespace": namespace()}))


@contextmanager
def scratch_folder(prefix: str, parent: str | Path | None = None) -> Iterator[Path]:
    """A temporary folder of this process for the length of a block, as :func:`owned_folder`."""
    folder = owned_folder(prefix, parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def namespace() -> str:
    """Numbers of processes mean something within it; elsewhere than on Linux there is one."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
