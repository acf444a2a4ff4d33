"""The files that a distribution's code is in: what pip recorded, what lies beside it, what this process has loaded.

A record of a run hashes them. They are found anew each time: a cache would not see what changes meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import Distribution
from importlib.util import cache_from_source
from itertools import accumulate, zip_longest
from pathlib import Path, PurePosixPath

from nemorl.base.packages.distributions import InstalledDistribution
from nemorl.plugins.index import PluginEntry

from nemorl_trust import bytecode
from nemorl_trust.source import locate

OF_THIS_MACHINE = frozenset({"RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json", "uv_build.json"})
"""Files of a ``.dist-info`` that say how it came here; two installations of one release differ in them."""
CACHE = "__pycache__"
COMPARE_S = 300.0
"""Longest time that compiling a distribution's sources may take; nemorl-core's take half a second."""
NAMESPACE_DEPTH = 2
"""Of the namespace packages that an editable install is searched for: ``acme.plugins.grader`` has two."""


def files_of(entries: Sequence[PluginEntry]) -> dict[str, Path]:
    """Every file of a distribution by a name that is the same on every machine, bytecode caches left out.

    Args:
        entries: All entries of the distribution.
    """
    path, dist = entries[0].search_path, entries[0].point.dist
    recorded = _recorded(dist) if dist is not None else {}
    modules = {_module_of(name) for name in recorded} | {entry.point.module for entry in entries}
    modules |= set((dist.read_text("top_level.txt") or "").split()) if dist is not None else set()
    modules |= {name for file in recorded.values() if file.suffix == ".pth" for name in _offered_by(file)}
    found, seen = dict(recorded), set[str]()
    known: dict[str, Path | None] = {}
    for module in sorted(filter(None, modules)):
        root = _root_of(module, path, known)
        if root is not None and root[0] not in seen:
            seen.add(root[0])
            prefix = PurePosixPath(*root[0].split(".")[:-1])
            found.update((str(prefix / name), file) for name, file in _below(root[1]))
    if path is None:
        found.update(_loaded_from_elsewhere(seen, found))
    return found


def hash_of(files: Mapping[str, Path]) -> str:
    """One hash of names and contents."""
    digest = hashlib.sha256()
    for name, content in sorted(hashes_of(files).items()):
        digest.update(f"{name}\0{content}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def hashes_of(files: Mapping[str, Path]) -> dict[str, str]:
    """A hash of each file's content."""
    return {name: hashlib.sha256(_content(file)).hexdigest() for name, file in files.items()}


def foreign_bytecode(files: Mapping[str, Path], dist: Distribution | None) -> Iterator[Path]:
    """Compiled files that Python would run, and that do not come from the source beside them."""
    recorded = set(_recorded(dist).values()) if dist is not None else set()
    yield from (file for file in files.values() if file.suffix == ".pyc" and file not in recorded)
    sources = {Path(cache_from_source(file)): file for file in files.values() if file.suffix == ".py"}
    pairs = [(str(compiled), str(source)) for compiled, source in sources.items() if compiled.is_file()]
    verdicts = _compared(pairs) if pairs else []
    for (compiled, _), verdict in zip_longest(pairs, verdicts):
        if verdict != bytecode.OWN:
            yield Path(compiled)
        if verdict is None:  # which ended the comparison
            return


def _compared(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """A verdict per pair of compiled file and source, up to one that cannot even be read."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", bytecode.__file__],
        input=json.dumps({"pairs": pairs, "optimize": sys.flags.optimize}),
        capture_output=True, text=True, check=False, timeout=COMPARE_S,
    )  # fmt: skip
    return done.stdout.split()[: len(pairs)]


def _recorded(dist: Distribution) -> dict[str, Path]:
    """Files that pip wrote, by the names in its RECORD."""
    found = {}
    for entry in dist.files or ():
        in_metadata = entry.parent.suffix in (".dist-info", ".egg-info")
        if CACHE not in entry.parts and not (in_metadata and entry.name in OF_THIS_MACHINE):
            found[entry.as_posix()] = Path(os.path.abspath(str(dist.locate_file(entry))))
    if (
        not found and isinstance(dist, InstalledDistribution) and isinstance(dist.place, Path)
    ):  # no RECORD: its metadata
        found = {name: file for name, file in _below(dist.place) if file.name not in OF_THIS_MACHINE}
    return found


def _module_of(name: str) -> str:
    """``acme.sub.module`` for ``acme/sub/module.py``; empty for what is no module."""
    path = PurePosixPath(name)
    if path.suffix not in (".py", ".so", ".pyd", ".pyc") or ".." in path.parts or path.is_absolute():
        return ""
    parts = [*path.parts[:-1], path.name.partition(".")[0]]
    return ".".join(parts) if all(part.isidentifier() for part in parts) else ""


def _offered_by(pth: Path) -> Iterator[str]:
    """Packages and modules in the folders that a ``.pth`` file puts on ``sys.path``: an editable install."""
    for line in _content(pth, whole=True).decode(errors="replace").splitlines():
        if line.strip() and not line.startswith(("#", "import ", "import\t")):
            yield from _packages_in(Path(pth.parent, line.strip()), NAMESPACE_DEPTH)


def _packages_in(folder: Path, depth: int) -> Iterator[str]:
    """Packages and modules of a folder, and of what may be namespace packages in it."""
    children = list(folder.iterdir()) if folder.is_dir() and os.access(folder, os.R_OK | os.X_OK) else []
    for child in children:
        if module := _module_of(child.name):
            yield module
        elif child.name.isidentifier() and (child / "__init__.py").is_file():
            yield child.name
        elif child.name.isidentifier() and depth:
            yield from (f"{child.name}.{name}" for name in _packages_in(child, depth - 1))


def _root_of(module: str, path: list[str] | None, known: dict[str, Path | None]) -> tuple[str, Path] | None:
    """The outermost package that is no namespace, or the module, and where it is."""
    for name in accumulate(module.split("."), "{}.{}".format):
        if name not in known:
            place = locate(name, path)
            known[name] = place.file.parent if place.file and place.folders else place.file
        if (found := known[name]) is not None:
            return name, found
    return None


def _below(root: Path) -> Iterator[tuple[str, Path]]:
    """The files of a folder, links to folders followed, or the file that it is, by names that begin with its own."""
    if root.is_file():
        yield root.name, root
    visited: set[tuple[int, int]] = set()
    for folder, folders, names in os.walk(root, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in visited:
            folders.clear()  # a link to a folder around it
            continue
        visited.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if name != CACHE)
        inside = PurePosixPath(folder).relative_to(root.parent)
        yield from ((f"{inside}/{name}", Path(folder, name)) for name in sorted(names))


def _loaded_from_elsewhere(roots: set[str], found: Mapping[str, Path]) -> Iterator[tuple[str, Path]]:
    """Modules of these packages that this process took from a file which is none of theirs."""
    beginnings, below = tuple(roots), tuple(f"{root}." for root in roots)
    likely = [name for name in list(sys.modules) if name.startswith(beginnings)]  # of thousands a few
    ours = [name for name in likely if name in roots or name.startswith(below)]
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in ours}
    as_named = set(map(str, found.values()))
    others = {name: file for name, file in files.items() if isinstance(file, str) and file not in as_named}
    if not others:  # nearly always: following links takes the longest
        return
    known = set(map(os.path.realpath, as_named))
    for name, file in others.items():
        if os.path.realpath(file) not in known:
            yield f"loaded as {name}", Path(file)


def _content(file: Path, *, whole: bool = False) -> bytes:
    """The content of a file, without the folders of this machine that it names; empty where there is no file."""
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # reading a pipe would wait for ever
            return b""
        content = file.read_bytes()
    except OSError as error:
        return f"cannot be read: {type(error).__name__}".encode()
    if whole:
        return content
    if file.suffix == ".pth":  # its folders say where the packages are, which are hashed; other lines are run
        return b"\n".join(line for line in content.splitlines() if line.startswith((b"import ", b"import\t")))
    if content.startswith(b"#!") and file.parent.name in ("bin", "Scripts"):
        return content.partition(b"\n")[2]
    return content
