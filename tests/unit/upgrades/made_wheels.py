"""Wheels made by hand, in a folder that pip takes for an index."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path


def write_wheel(
    folder: Path, name: str, version: str, code: str, *, module: str | None = None, requires: Sequence[str] = ()
) -> Path:
    """A pure-Python wheel of one package."""
    underscored = name.replace("-", "_")
    info = f"{underscored}-{version}.dist-info"
    files = {
        f"{module or underscored}/__init__.py": code,
        f"{info}/METADATA": "\n".join(
            [
                "Metadata-Version: 2.1",
                f"Name: {name}",
                f"Version: {version}",
                *(f"Requires-Dist: {r}" for r in requires),
            ]
        )
        + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{underscored}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(path, text)
    return wheel


def unpack(wheel: Path, folder: Path) -> None:
    """Install a wheel as pip would."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
