"""Writing files so that nothing is lost: replaced as a whole, and a disk that refuses is named.

A reader, or a run that is killed while it writes, sees the old content of a file or the new one, never a part.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO

from nemorl.base.text.reading import shown
from nemorl.errors import StorageError

FIXES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some disk space, then run the same command again"),
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), then run the same command again",
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make it writable, or choose another folder"),
    **dict.fromkeys((errno.EISDIR, errno.ENOTDIR, errno.EEXIST), "move away what is in its place"),
    errno.EIO: "look after the disk (dmesg says more), or choose another folder",
    errno.ESTALE: "look after the network file system, then run the same command again",
}
"""Fixes to suggest to the user, by errno."""
ERRNO = re.compile(r"\[Errno (\d+)\]|\(os error (\d+)\)")
"""The errno in messages of Python, and of libraries written in Rust such as safetensors."""
DRAFT, PROBE = ".draft", ".nemorl-"
"""End of the name of a file that is being written, and beginning of that of a folder made to see whether one can be."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write the next content of ``path`` into: it takes the place of ``path`` when the block ends well.

    Links are followed, and what is no ordinary file (a terminal, a pipe) is written to directly.

    Raises:
        StorageError: The file cannot be written; names it and the cause.
    """
    target = Path(os.path.realpath(path))
    with storing(path):
        if target.exists() and not target.is_file() and not target.is_dir():
            with target.open("wb") as file:
                yield file
            return
        draft = target.with_name(f".{target.name}.{threading.get_native_id()}{DRAFT}")  # of this thread alone
        try:
            with draft.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            draft.replace(target)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise


def replace_text(path: Path, text: str) -> None:
    """Make ``text`` the content of ``path``, in UTF-8; lone surrogates, which that cannot hold, become ``?``."""
    with replacing(path) as file:
        file.write(text.encode("utf-8", errors="replace"))


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A folder, not there yet, to be filled with the next content of ``path``, which it replaces when the block ends.

    Raises:
        StorageError: It cannot be written; names it and the cause.
    """
    draft, old = path.with_name(f".writing_{path.name}"), path.with_name(f".replaced_{path.name}")
    with storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _put_back(old, path)
        remove(draft)
        try:
            yield draft
            if os.path.lexists(path):
                path.rename(old)
            draft.rename(path)
        finally:
            _put_back(old, path)
            remove(draft)


def _put_back(old: Path, path: Path) -> None:
    """Give a folder its name again where nothing has taken its place; else remove it."""
    if os.path.lexists(old) and not os.path.lexists(path):
        old.rename(path)
    remove(old)


def listed(folder: Path, pattern: str = "*") -> list[Path]:
    """Paths in a folder whose names match a shell pattern, sorted; none where there is no folder.

    ``Path.glob`` finds nothing in a folder that cannot be read (Python 3.13), or raises a bare ``OSError`` (before).

    Raises:
        StorageError: The system refuses to list it.
    """
    with loading(folder):
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            return []
    return sorted(folder / name for name in names if fnmatchcase(name, pattern))


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there. Of a link, the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_drafts(folder: Path) -> None:
    """Remove what processes that were killed had begun to write in a folder, at any depth. Only for its owner."""
    with suppress(OSError):  # it costs some space, and the next owner tries again
        for left in [*folder.rglob(f".*{DRAFT}"), *folder.glob(f"{PROBE}*")]:
            remove(left)


def folder_refusal(folder: Path) -> str | None:
    """Why no file can be made in a folder, which need not be there yet; ``None`` where one can."""
    try:
        place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    except OSError as error:  # such as a name that is too long
        return f"{shown(str(folder))} cannot be a folder: {error.strerror}"
    try:
        with tempfile.TemporaryDirectory(prefix=PROBE, dir=place):
            return None  # the only way to know: permissions, quotas and read-only file systems all show here
    except NotADirectoryError:
        return f"{place} is a file: {folder} cannot be in it"
    except OSError as error:
        return f"{folder} cannot be written: {place}: {error.strerror}"


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Turn refusals of the system inside the block into errors about writing ``path``.

    Raises:
        StorageError: Names the path and the cause, e.g. a full disk.
    """
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        number = storage_errno(error) or (error.errno if isinstance(error, OSError) else None)
        if number is None:
            raise
        fix = FIXES.get(number, "choose another folder")
        raise StorageError(f"cannot write {path}: {os.strerror(number)}", fix=fix) from error


@contextmanager
def loading(path: Path) -> Iterator[None]:
    """Turn refusals of the system inside the block into errors about reading ``path``.

    Raises:
        StorageError: Names the path and the cause, e.g. a failing disk.
    """
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        is_forbidden = error.errno in (errno.EACCES, errno.EPERM)
        fix = "make it readable" if is_forbidden else FIXES.get(error.errno or 0, "put a sound copy in its place")
        raise StorageError(f"cannot read {path}: {error.strerror}", fix=fix) from error


def storage_errno(error: BaseException) -> int | None:
    """The errno of a disk's refusal among the causes of ``error``, at any depth; ``None`` where there is none.

    Backends wrap it in errors of their own, and errors that crossed a process keep the text alone.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        found = waiting.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        said = [int(python or rust) for python, rust in ERRNO.findall(str(found))]
        for number in [found.errno, *said] if isinstance(found, OSError) else said:
            if number in FIXES:
                return number
        waiting += [found.__context__, found.__cause__]
        waiting += found.exceptions if isinstance(found, BaseExceptionGroup) else ()
    return None


def exported(folder: Path) -> dict[str, Any]:
    """Facts about a folder of weights: where it is, and how much."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return {"to": str(folder.resolve()), "files": len(sizes), "bytes": sum(sizes)}
