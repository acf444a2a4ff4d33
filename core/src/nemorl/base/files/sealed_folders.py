"""Folders that are there as a whole or not at all, with a manifest of what is in them: how checkpoints lie on disk.

A folder is filled under a temporary name, every file is hashed and flushed, ``manifest.json`` is written last, and one
rename publishes it: a kill at any moment leaves either the previous state or the new one. Readers only read; repairing
is for the owner.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nemorl.base.files.atomic import FIXES, listed
from nemorl.errors import CheckpointError, StorageError

MANIFEST = "manifest.json"
WRITING, REPLACED, REMOVED = ".writing_", ".replaced_", ".removed_"
SEAL = "sha256"
"""Key of the manifest's hash of itself."""
SAME_FOLDER = "let run_dir be on a file system that all nodes share"


def stage(final: Path) -> Path:
    """An empty folder to fill, under a temporary name beside ``final``. :func:`seal` publishes it."""
    staging = final.with_name(WRITING + final.name)
    discard(staging)
    staging.mkdir(parents=True)
    return staging


def seal(staging: Path, final: Path, facts: Mapping[str, Any], written: Mapping[str, str]) -> None:
    """Write the manifest of a staged folder that is filled, and let it become ``final``, in place of one that is there.

    Args:
        staging: From :func:`stage`.
        final: Its path.
        facts: What the manifest says besides its ``files``: JSON.
        written: Digests of files that are flushed already. All others are read and flushed here.

    Raises:
        CheckpointError: A file of ``written`` is not there.
    """
    paths = {path.relative_to(staging).as_posix(): path for path in sorted(staging.rglob("*")) if path.is_file()}
    if absent := sorted(written.keys() - paths.keys()):
        raise CheckpointError(f"{staging} lacks {absent[0]}, which a rank has written", fix=SAME_FOLDER)
    files = {name: written.get(name) or digest(path, sync=True) for name, path in paths.items()}
    _write_synced(staging / MANIFEST, json.dumps(_sealed({**facts, "files": files}), indent=1))
    _publish(staging, final)


def withdraw(path: Path, *, in_thread: bool = False) -> None:
    """Remove a folder. It first loses its name, so that no part of one is ever taken for a whole.

    What the disk refused to remove is tried again with the next one.

    Args:
        path: Of the folder.
        in_thread: Return when it has lost its name: a thread, for which the process waits at its end, does the rest.
    """
    doomed = path.with_name(REMOVED + path.name)
    discard(doomed)
    os.rename(path, doomed)
    if in_thread:
        threading.Thread(target=_discard_withdrawn, args=(path.parent,), name="nemorl-checkpoint-remover").start()
    else:
        _discard_withdrawn(path.parent)


def _discard_withdrawn(folder: Path) -> None:
    with suppress(StorageError):
        for doomed in listed(folder, f"{REMOVED}*"):
            discard(doomed)


def repair(parent: Path) -> None:
    """Undo what was cut short by a kill in a folder of such folders. Only for its owner.

    Raises:
        StorageError: The system refuses to list it.
    """
    for replaced in listed(parent, f"{REPLACED}*"):
        final = parent / replaced.name.removeprefix(REPLACED)
        if os.path.lexists(final):
            discard(replaced)
        else:
            os.rename(replaced, final)
    for prefix in (WRITING, REMOVED):
        for left in listed(parent, f"{prefix}*"):
            discard(left)


def discard(path: Path) -> None:
    """Remove a folder, or a link without what it points to, as far as the system lets it."""
    with suppress(OSError):  # ``ignore_errors`` does not ignore that a folder cannot be closed
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest as it is, which :func:`is_intact` judges.

    Raises:
        CheckpointError: There is none that can be read.
    """
    manifest = read_json(folder / MANIFEST)
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{folder} has no readable manifest: a {type(manifest).__name__}", fix="use another one")
    return manifest


def is_intact(manifest: Mapping[str, Any]) -> bool:
    """It lists files of its folder, and nothing in it was changed since it was sealed."""
    files = manifest.get("files")
    lists_files = isinstance(files, dict) and all(
        isinstance(digest, str) and stays_inside(name) for name, digest in files.items()
    )
    return lists_files and manifest.get(SEAL, _sealed(manifest)[SEAL]) == _sealed(manifest)[SEAL]


def stays_inside(name: str) -> bool:
    """A name, with slashes, of a file in a folder: whoever wrote it may want another one to be read or written."""
    return not name.startswith("/") and not {"", ".", ".."} & set(name.split("/")) and "\0" not in name


def verify(folder: Path, files: Mapping[str, str]) -> None:
    """Compare every file with the digests of a manifest.

    Raises:
        CheckpointError: names the first file that is missing, differs, does not belong or cannot be read.
    """
    try:
        _compare(folder, files)
    except OSError as error:
        what = error.filename or folder
        raise CheckpointError(f"{what} cannot be read: {error.strerror}", fix=FIXES.get(error.errno or 0)) from error


def _compare(folder: Path, files: Mapping[str, str]) -> None:
    for name, recorded in files.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{folder} lacks {name}", fix="use another checkpoint of this run")
        if digest(file) != recorded:
            raise CheckpointError(
                f"{file} does not match its checksum: it was damaged or edited after it was written",
                fix="use another checkpoint of this run",
            )
    present = {
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()
    }
    foreign = sorted(present - {*files, MANIFEST})
    if foreign:  # a backend may read whatever it finds
        raise CheckpointError(f"{folder} holds {foreign[0]}, which its manifest does not name", fix="remove it")


def read_json(file: Path) -> Any:
    """The content of a JSON file in such a folder.

    Raises:
        CheckpointError: It cannot be read.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        what = "manifest" if file.name == MANIFEST else file.name
        raise CheckpointError(f"{file.parent} has no readable {what}: {error}", fix="use another checkpoint") from error


def _sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest with a hash of itself, so that damage to its facts is seen too."""
    content = {key: value for key, value in manifest.items() if key != SEAL}
    return {**content, SEAL: hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}


def _publish(staging: Path, final: Path) -> None:
    replaced = final.with_name(REPLACED + final.name)
    if os.path.lexists(final):
        os.rename(final, replaced)
    os.rename(staging, final)
    directory = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    discard(replaced)


def digest(path: Path, *, sync: bool = False) -> str:
    """The SHA-256 of a file, in hex. With ``sync``, the file is also flushed to disk."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        if sync:
            os.fsync(file.fileno())
    return found


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
