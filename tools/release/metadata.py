"""What every wheel must say of itself, and what none may contain."""

from __future__ import annotations

import email
import socket
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

from building import ROOT
from packaging.requirements import Requirement
from packaging.version import Version
from steps import Facts, StepFailedError, run, tool

PYTHONS = ("3.11", "3.12", "3.13")
"""What the packages promise to run on."""


def check(built: Path) -> Facts:
    """``twine check``, and :func:`mistakes` of each wheel.

    Raises:
        StepFailedError: with everything that is wrong.
    """
    files = sorted(file for file in built.iterdir() if file.suffix in (".whl", ".gz"))
    run(tool("twine"), "check", "--strict", *files)
    wheels = [file for file in files if file.suffix == ".whl"]
    wrong = [f"{wheel.name}: {mistake}" for wheel in wheels for mistake in mistakes(wheel)]
    versions = {wheel.name.split("-")[1] for wheel in wheels}
    if len(versions) != 1:
        wrong.append(f"the packages have several versions: {sorted(versions)}")
    if wrong:
        raise StepFailedError("\n".join(wrong))
    homeless = [wheel.name.split("-")[0] for wheel in wheels if "Project-URL" not in metadata_of(wheel)]
    return {"checked": len(files), "version": versions.pop(), "without_url": len(homeless)}


def mistakes(wheel: Path) -> Iterator[str]:
    """What is wrong with a wheel."""
    found = metadata_of(wheel)
    names = zipfile.ZipFile(wheel).namelist()
    if found["License-Expression"] != "Apache-2.0" or not any(name.endswith("licenses/LICENSE") for name in names):
        yield "the licence is not stated, or its text is not in the wheel"
    if not found["Summary"] or len(str(found.get_payload())) < 100:
        yield "it has no summary, or hardly a readme"
    missing = [f"Programming Language :: Python :: {python}" for python in PYTHONS]
    missing = [line for line in missing if line not in found.get_all("Classifier", [])]
    if missing or found["Requires-Python"] != f">={PYTHONS[0]}":
        yield f"its classifiers lack {missing}, or Requires-Python is not >={PYTHONS[0]}"
    yield from _wrong_pins(found)
    places = {str(ROOT), str(Path.home()) + "/", socket.gethostname()}
    yield from (f"{name} names {place}" for name, place in _named(wheel, [p for p in places if len(p) > 3]))


def _wrong_pins(found: Message) -> Iterator[str]:
    """Our packages are released together and work together within a minor version: ``>=0.1.0,<0.2``."""
    version = Version(found["Version"])
    wanted = f"<{version.major}.{version.minor + 1},>={version}"
    for line in found.get_all("Requires-Dist", []):
        requirement = Requirement(line)
        is_ours = requirement.name == "nemorl" or requirement.name.startswith("nemorl-")
        is_self = requirement.name == found["Name"] and not requirement.specifier  # an extra made of extras
        if is_ours and not is_self and str(requirement.specifier) != wanted:
            yield f"it requires {requirement.name}{requirement.specifier}, not {wanted}"


def _named(wheel: Path, words: list[str]) -> Iterator[tuple[str, str]]:
    """Files of a wheel that contain one of these words, with the word."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            content = archive.read(name)
            yield from ((name, word) for word in words if word.encode() in content)


def metadata_of(wheel: Path) -> Message:
    """The file ``METADATA`` of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))
