"""Builds every package from the commit, twice and elsewhere, and compares the bytes."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from steps import Facts, StepFailedError, run

ROOT = Path(__file__).resolve().parents[2]
PATTERNS = ("core", "toolkits/*", "nemorl-*", "plugins/nemorl-*")
OTHERWISE = {"TZ": "Pacific/Auckland", "LC_ALL": "C", "PYTHONHASHSEED": "7"}
"""The second build has another time zone, locale and order of sets, another folder and stricter rights."""


def folders(root: Path = ROOT) -> list[Path]:
    """The packages of the repository, each with its ``pyproject.toml``; the one at its root is the last."""
    found = [*(folder for pattern in PATTERNS for folder in sorted(root.glob(pattern))), root]
    return [folder for folder in found if (folder / "pyproject.toml").is_file()]


def projects(root: Path = ROOT) -> list[dict[str, Any]]:
    """The table ``project`` of each package."""
    return [tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"] for folder in folders(root)]


def build(out: Path, commit: str) -> Facts:
    """Sources and wheels of every package into ``out``; twice, and refused where a byte differs."""
    epoch = changed_at(commit)
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(2) as both:
        other = Path(scratch) / "other"
        one = both.submit(_build_all, out, commit, {"SOURCE_DATE_EPOCH": epoch}, 0o022)
        two = both.submit(_build_all, other, commit, {"SOURCE_DATE_EPOCH": epoch, **OTHERWISE}, 0o077)
        one.result()
        two.result()
        differ = different(out, other)
    if differ:
        raise StepFailedError(f"two builds of {commit[:12]} differ in {', '.join(differ)}: what they contain varies")
    wheels, sources = sorted(out.glob("*.whl")), sorted(out.glob("*.tar.gz"))
    sizes = [sum(file.stat().st_size for file in files) for files in (wheels, sources)]
    counts = {"wheels": len(wheels), "sources": len(sources)}
    return {**counts, "wheels_bytes": sizes[0], "sources_bytes": sizes[1], "equal_builds": 2}


def changed_at(commit: str) -> str:
    """Seconds since 1970 at which something that is packed last changed: other commits leave the bytes as they are."""
    packed = (*PATTERNS, "pyproject.toml", "README.md", "LICENSE")
    return run("git", "-C", ROOT, "log", "-1", "--format=%ct", commit, "--", *packed).strip()


def _build_all(out: Path, commit: str, variables: dict[str, str], umask: int) -> None:
    """``python -m build`` of each package: the wheel is made from the source archive, which thereby is complete."""
    packed = subprocess.run(["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as scratch:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(scratch, filter="data")
        for path in Path(scratch).rglob("*"):
            path.chmod(path.stat().st_mode & ~umask)
        for folder in folders(Path(scratch)):
            words = (sys.executable, "-m", "build", "--no-isolation", "--outdir", out, folder)
            run(*words, env={**os.environ, **variables}, umask=umask)


def different(one: Path, other: Path) -> list[str]:
    """Names of files that only one of two folders has, or whose bytes differ."""
    names = {file.name for folder in (one, other) for file in folder.iterdir() if file.name != ".gitignore"}
    return sorted(name for name in names if _bytes(one / name) != _bytes(other / name))


def _bytes(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def digest(built: Path) -> str:
    """One SHA-256 over names and contents of wheels and source archives."""
    whole = hashlib.sha256()
    for file in sorted([*built.glob("*.whl"), *built.glob("*.tar.gz")]):
        whole.update(f"{file.name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return whole.hexdigest()
