"""What pip would change for another version, and what it would download: asked of pip, which changes nothing."""

from __future__ import annotations

import json
import re
import ssl
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

from nemorl.errors import PluginError, UsageError
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from nemorl_insight.doctor.installed import Installed
from nemorl_insight.doctor.packages import VLLM
from nemorl_insight.doctor.torch_builds import COMPANIONS
from nemorl_insight.doctor.upgrades.processes import run_limited

PIP_S = 600.0
"""Longest time for pip to work out versions."""
HEAD_S = 15.0
"""Longest time for a server to say how large a file is."""


@dataclass(frozen=True)
class Change:
    """A distribution that pip would install."""

    name: str
    before: str | None
    """The version that is installed; ``None``: none."""
    version: str
    size: int | None
    """Bytes of its file; ``None``: the server does not say."""

    @property
    def pin(self) -> str:
        return f"{self.name}=={self.version}"

    def __str__(self) -> str:
        return f"{self.name} {self.before or '-'} -> {self.version}"


def parse(text: str) -> Requirement:
    """
    Raises:
        UsageError: it is no requirement, or of a file.
    """
    try:
        found = Requirement(text)
    except InvalidRequirement as error:
        raise UsageError(
            f"{text!r} is no requirement: {error}", fix="write for example transformers==5.18.0"
        ) from error
    if found.url is not None:
        raise UsageError(f"{text!r} names a file", fix="name a version, and give --pip '--find-links FOLDER'")
    return found


def pip(*arguments: str) -> list[str]:
    """The command of pip in this environment.

    Raises:
        PluginError: there is none.
    """
    if find_spec("pip") is None:
        raise PluginError("this environment has no pip", fix="python -m ensurepip, or uv pip install pip")
    return [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", *arguments]


def resolve(requirement: Requirement, pip_args: Sequence[str] = ()) -> list[Change]:
    """The distributions that a version would bring in place of installed ones, the asked one first.

    torchvision, torchaudio and torchcodec are left out where only vLLM asks for them and none is installed: its text
    models do without, and builds for another torch break imports (docs/backends/vllm.md).

    Raises:
        PluginError: pip finds no such version, or none that fits; says what it says.
    """
    with tempfile.TemporaryDirectory(prefix="nemorl-try-") as scratch:
        report = Path(scratch) / "report.json"
        command = pip("install", "--dry-run", "--quiet", "--report", str(report), str(requirement), *pip_args)
        done = run_limited(command, PIP_S)
        if done.code != 0:
            what = f"pip cannot install {requirement}: {done.error}{of_another_python(requirement, done.err)}"
            raise PluginError(what, fix=f"`pip index versions {requirement.name}` shows what there is for this Python")
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    here, root = Installed(), canonicalize_name(requirement.name)
    changes = []
    for item in found:
        name, version = item["metadata"]["name"], item["metadata"]["version"]
        package = here.get(name)
        if root in VLLM and package is None and canonicalize_name(name) in COMPANIONS:
            continue
        before = None if package is None else package.version
        changes.append(Change(name, before, version, _size(item["download_info"]["url"])))
    return sorted(changes, key=lambda change: canonicalize_name(change.name) != root)


def of_another_python(requirement: Requirement, said: str) -> str:
    """The Python that an asked version is for, where pip left it out for that: it says so among all other versions.

    >>> of_another_python(Requirement("a==2.0"), "Ignored: 1.0 Requires-Python <3; 2.0 Requires-Python >=3.12")
    '; it is for Python >=3.12'
    """
    pythons = re.findall(r"(\S+) Requires-Python ([^;\n]+)", said)
    wanted = [python.strip() for version, python in pythons if requirement.specifier.contains(version)]
    return f"; it is for Python {wanted[-1]}" if wanted else ""


def versions(requirement: Requirement, pip_args: Sequence[str] = ()) -> list[str]:
    """The newest release of each minor version that the index has for this Python and the requirement admits, oldest
    first.

    Raises:
        PluginError: pip cannot say.
    """
    done = run_limited(pip("index", "versions", requirement.name, "--json", *pip_args), PIP_S)
    if done.code != 0:
        raise PluginError(f"pip knows no versions of {requirement.name}: {done.error}", fix="check the name")
    found = sorted(map(Version, json.loads(done.out)["versions"]))
    admitted = [version for version in found if requirement.specifier.contains(version)]
    return [str(version) for version in {version.release[:2]: version for version in admitted}.values()]


def download(changes: Sequence[Change]) -> tuple[int, bool]:
    """Bytes of all files, and whether all of them are known."""
    return sum(change.size or 0 for change in changes), all(change.size is not None for change in changes)


def _size(url: str) -> int | None:
    parts = urlsplit(url)
    try:
        if parts.scheme == "file":
            return Path(unquote(parts.path)).stat().st_size
        if parts.scheme not in ("http", "https"):
            return None
        request = Request(url.partition("#")[0], method="HEAD", headers={"Accept-Encoding": "identity"})
        with urlopen(request, timeout=HEAD_S, context=ssl.create_default_context()) as answer:
            length: Any = answer.headers.get("Content-Length")
            return None if length is None else int(length)
    except (OSError, URLError, ValueError):
        return None
