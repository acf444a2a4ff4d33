"""Python interpreters of other virtual environments, for workers whose dependencies conflict with the rest.

Ray starts an actor in any interpreter, but says nothing useful when that one has no Ray, or another version of it. So
each is asked before an actor starts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from nemorl.errors import BackendError

PROBE_S = 60.0
"""Longest time an interpreter may take to answer."""
MUST_MATCH = ("ray", "nemorl-core")
"""Distributions that talk to their own version on the other side."""
_PROBE = """
import json, sys
from importlib import metadata, util
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
found = {name: version(name) for name in json.loads(sys.argv[1])}
missing = [name for name in json.loads(sys.argv[2]) if util.find_spec(name) is None]
print(json.dumps({"python": list(sys.version_info[:3]), "versions": found, "missing": missing}))
"""


def require_interpreter(python: Path, modules: Sequence[str] = ()) -> None:
    """Check that workers can run under ``python``.

    Args:
        python: Path of an interpreter, e.g. ``/opt/vllm/bin/python``.
        modules: Top-level modules that the worker will import.

    Raises:
        BackendError: It is not there, does not answer, or has another Python, Ray or nemorl than this process.
    """
    found = _probe(python, ("ray", "nemorl", *modules))
    mine = ".".join(map(str, sys.version_info[:2]))
    theirs = ".".join(map(str, found["python"][:2]))
    if mine != theirs:
        raise BackendError(
            f"{python} is Python {theirs}, the driver runs {mine}",
            fix=f"make its environment with Python {mine}: Ray needs the same version on both sides",
        )
    for name in MUST_MATCH:
        wanted, has = metadata.version(name), found["versions"][name]
        if wanted != has:
            raise BackendError(
                f"{python} has {name} {has or 'not installed'}, the driver has {wanted}",
                fix=f"{python} -m pip install {name}=={wanted}",
            )
    if found["missing"]:
        raise BackendError(
            f"{python} lacks {', '.join(found['missing'])}",
            fix=f"{python} -m pip install {' '.join(found['missing'])}",
        )


@cache
def _probe(python: Path, modules: tuple[str, ...]) -> dict[str, Any]:
    command = [str(python), "-c", _PROBE, json.dumps(MUST_MATCH), json.dumps(modules)]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, check=True)
        found: dict[str, Any] = json.loads(answer.stdout)
    except FileNotFoundError as error:
        raise BackendError(f"no interpreter {str(python)!r}", fix="give the bin/python of an environment") from error
    except subprocess.TimeoutExpired as error:
        raise BackendError(f"{python} did not answer in {PROBE_S:.0f} s", fix="try it by hand") from error
    except (subprocess.CalledProcessError, json.JSONDecodeError, OSError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise BackendError(
            f"{python} cannot be used: {said.strip().splitlines()[-1] if said.strip() else error}",
            fix="give the bin/python of a working environment",
        ) from error
    return found
