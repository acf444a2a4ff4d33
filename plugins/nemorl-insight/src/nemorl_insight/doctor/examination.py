"""The list of checks of ``nemorl doctor``, and what they found on this machine: as one JSON object, or as tables.

Everything is decided from metadata and files, nothing is imported: a broken installation is the very thing to look at.
:class:`Installed` and :class:`Machine` hold the facts, each check is a function of the two that yields
:class:`Finding` objects, and a healthy environment yields none. Plugins that cannot be used are the index's to report
(:mod:`nemorl.plugins.index`); whether two engines agree is measured elsewhere (:mod:`nemorl_rl.audit.mismatch`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemorl.plugins import PluginEntry, registry
from nemorl_cli.plugins import as_dict
from nemorl_cli.terminal import PlainConsole, console, styled
from nemorl_trust.provenance import describe_environment
from rich.padding import Padding
from rich.table import Table

from nemorl_insight.doctor import packages, surroundings, torch_builds
from nemorl_insight.doctor.finding import Finding
from nemorl_insight.doctor.installed import Installed
from nemorl_insight.doctor.machine import Machine
from nemorl_insight.doctor.torch_builds import build_of

SCHEMA = 1
"""Grows when a key changes its meaning or goes away; new keys may come at any time."""
CONFIG_DECIDES = ("ambiguous", "blocked")
"""States of a plugin that a run's config settles: notes. Others stop it whatever a config says."""


@dataclass(frozen=True)
class Examination:
    """Facts and findings."""

    environment: Mapping[str, Any]
    machine: Machine
    torch_built_for: str | None
    stopped: tuple[PluginEntry, ...]
    """Plugins that cannot be used."""
    findings: tuple[Finding, ...]

    @classmethod
    def of_this_machine(cls) -> Examination:
        """This process's environment, with runs below the working folder."""
        installed, machine = Installed(), Machine.read(Path.cwd())
        torch = installed.get("torch")
        build = build_of(torch) if torch is not None else None
        stopped = tuple(entry for entry in registry().index.entries if entry.diagnostics)
        found = [*map(_as_finding, stopped), *find_problems(installed, machine)]
        found.sort(key=lambda finding: finding.severity == "note")
        environment = describe_environment(registry())
        return cls(environment, machine, str(build) if build is not None else None, stopped, tuple(found))

    @property
    def ok(self) -> bool:
        """Whether nothing is worse than a note."""
        return not any(finding.severity == "problem" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """The object that docs/doctor.md describes."""
        machine = self.machine
        return {
            "schema": SCHEMA,
            "ok": self.ok,
            "findings": [finding.as_dict() for finding in self.findings],
            **self.environment,
            **self._numbers(),
            "devices": [{"name": device.name, "memory_gib": device.memory_gib} for device in machine.devices],
            "cuda": self._cuda(),
            "ray": self._ray(),
            "variables": dict(machine.environment),
            "broken_plugins": [as_dict(entry) for entry in self.stopped],
        }

    def show(self) -> None:
        """Tables of facts, then what was found, on standard output."""
        out = console()
        facts = {name: self.environment[name] for name in ("python", "platform")} | self._numbers()
        facts["threads"] = self.environment["threads"]
        _table(out, "Machine", facts)
        devices = [f"{device.name}, {device.memory_gib} GiB" for device in self.machine.devices]
        _table(out, "CUDA", self._cuda() | {f"device {number}": text for number, text in enumerate(devices)})
        _table(out, "Ray", self._ray())
        _table(out, "Libraries", self.environment["libraries"])
        plugins = self.environment["plugins"]
        _table(out, "Plugins", {"plugins": f"{len(plugins)} installed, {len(self.stopped)} cannot be used"})
        _table(out, "Variables", self.machine.environment)
        self._show_findings(out)

    def _show_findings(self, out: PlainConsole) -> None:
        for finding in self.findings:
            style = "red" if finding.severity == "problem" else "yellow"
            title = styled(f"\n{finding.severity} {finding.code}", f"bold {style}")
            out.print(title, styled(f" {finding.what}"))
            rows = Table.grid(padding=(0, 2))
            rows.add_row(styled("why", "dim"), styled(finding.why))
            rows.add_row(styled("fix", "dim"), styled(finding.fix))
            out.print(Padding(rows, (0, 0, 0, 2)))
        counts = [_counted(sum(f.severity == s for f in self.findings), s) for s in ("problem", "note")]
        text = f"\n{' and '.join(filter(None, counts))}" if self.findings else "\nnothing is known to be wrong here"
        out.print(styled(text, "green" if self.ok else "red"))

    def _numbers(self) -> dict[str, Any]:
        machine = self.machine
        return {
            "cpus": machine.cpus,
            "gpus": machine.gpus,
            "memory_gib": machine.memory_gib,
            "memory_free_gib": machine.memory_free_gib,
            "disk_free_gib": machine.disk_free_gib,
            "shared_memory_free_gib": machine.shared_memory_free_gib,
            "open_files": machine.open_files,
        }

    def _cuda(self) -> dict[str, str | None]:
        machine = self.machine
        return {
            "driver": machine.driver,
            "driver_cuda": machine.driver_cuda,
            "driver_error": machine.driver_error,
            "torch_built_for": self.torch_built_for,
        }

    def _ray(self) -> dict[str, Any]:
        machine = self.machine
        return {
            "version": self.environment["libraries"].get("ray"),
            "address": machine.environment.get("RAY_ADDRESS"),
            "reachable": machine.ray_reachable,
            "command": str(machine.ray_command) if machine.ray_command else None,
        }


def _as_finding(entry: PluginEntry) -> Finding:
    diagnostic = entry.diagnostics[0]
    return Finding(
        diagnostic.code,
        "note" if diagnostic.state in CONFIG_DECIDES else "problem",
        what=f"{entry.id}: {diagnostic.message}",
        why="a run that selects this plugin is refused; others are not touched",
        fix=diagnostic.fix,
    )


def _table(out: PlainConsole, title: str, facts: Mapping[str, Any]) -> None:
    """One row per fact; what is not there is left out."""
    rows = [(name, _shown(value)) for name, value in facts.items() if value is not None]
    if not rows:
        return
    out.print(styled(title, "bold"))
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=24)
    for name, value in rows:
        table.add_row(styled(f"  {name}"), styled(value, overflow="fold"))
    out.print(table)


def _shown(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'s' if count != 1 else ''}" if count else ""


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
