"""Known-bad combinations of packages, machines and settings: what ``nemorl doctor`` looks for.

Everything is decided from metadata and files, nothing is imported: a broken installation is the very thing to look at.
:class:`Installed` and :class:`Machine` hold the facts, each check is a function of the two that yields
:class:`Finding` objects, and a healthy environment yields none. Plugins that cannot be used are the index's to report
(:mod:`nemorl.plugins.index`); whether two engines agree is measured elsewhere (:mod:`nemorl_rl.audit.mismatch`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nemorl_insight.doctor import packages, surroundings, torch_builds
from nemorl_insight.doctor.finding import CODES, Finding, Severity
from nemorl_insight.doctor.installed import Installed
from nemorl_insight.doctor.machine import Machine

CHECKS: tuple[Callable[[Installed, Machine], Iterator[Finding]], ...] = (
    packages.check_python,
    packages.check_nemorl_versions,
    packages.check_editable_installs,
    packages.check_duplicates,
    torch_builds.check_companions,
    torch_builds.check_cuda_kernels,
    torch_builds.check_vllm,
    torch_builds.check_driver,
    packages.check_requirements,
    surroundings.check_driver_answers,
    surroundings.check_disk,
    surroundings.check_shared_memory,
    surroundings.check_threads,
    surroundings.check_open_files,
    surroundings.check_downloads,
    surroundings.check_ray_address,
    surroundings.check_ray_command,
)


def find_problems(installed: Installed, machine: Machine) -> list[Finding]:
    """Everything known to be wrong here, problems before notes."""
    found = [finding for check in CHECKS for finding in check(installed, machine)]
    return sorted(found, key=lambda finding: finding.severity == "note")


__all__ = ["CHECKS", "CODES", "Finding", "Installed", "Machine", "Severity", "find_problems"]
