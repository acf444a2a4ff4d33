"""Wheels of all packages install into an empty environment and show up as plugins."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PACKAGES = [
    "core",
    "nemorl-dtensor",
    "nemorl-math-env",
    "nemorl-megatron",
    "nemorl-vllm",
    *sorted(f"toolkits/{p.name}" for p in (ROOT / "toolkits").iterdir()),
    *sorted(f"plugins/{p.name}" for p in (ROOT / "plugins").iterdir()),
]
STANDARD = {
    ("algorithms", "grpo", "nemorl-grpo"),
    ("algorithms", "ppo", "nemorl-ppo"),
    ("algorithms", "sft", "nemorl-sft"),
    ("algorithms", "dpo", "nemorl-preference"),
    ("algorithms", "distillation", "nemorl-distillation"),
    ("algorithms", "opd", "nemorl-distillation"),
    ("algorithms", "rm", "nemorl-preference"),
    ("environments", "reward_model", "nemorl-preference"),
    ("commands", "config.migrate", "nemorl-compat"),
    ("commands", "plugins.new", "nemorl-testing"),
    ("commands", "quickstart", "nemorl-tasks"),
    ("commands", "doctor", "nemorl-insight"),
    ("datasets", "arithmetic", "nemorl-math-env"),
    ("datasets", "file", "nemorl-tasks"),
    ("datasets", "huggingface", "nemorl-tasks"),
    ("environments", "math", "nemorl-math-env"),
    ("environments", "code", "nemorl-tasks"),
    ("environments", "agent", "nemorl-agents"),
    ("environments", "weighted", "nemorl-tasks"),
    ("generation_backends", "hf", "nemorl-dtensor"),
    ("weight_transports", "in_process", "nemorl-core"),
    ("weight_transports", "shared_memory", "nemorl-rl"),
    ("loggers", "tensorboard", "nemorl-insight"),
    ("hooks", "early_stopping", "nemorl-insight"),
    ("hooks", "replicate", "nemorl-ops"),
    ("training_backends", "dtensor", "nemorl-dtensor"),
    ("training_backends", "megatron", "nemorl-megatron"),
    ("generation_backends", "megatron", "nemorl-megatron"),
}
BUILD = """
import os, sys
from hatchling.build import build_wheel

for folder in sys.argv[2:]:
    os.chdir(folder)
    build_wheel(sys.argv[1])
"""
"""What ``python -m build --wheel`` calls in a process for each package."""


def run(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_pip_install_nemorl_from_wheels_lists_every_standard_plugin(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    run(sys.executable, "-c", BUILD, wheels, *(ROOT / package for package in [*PACKAGES, "."]))
    environment = tmp_path / "venv"
    venv.create(environment)
    python = environment / "bin" / "python"
    # Third-party packages come from this environment (appended to the path), ours from the wheels alone.
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    pip = [sys.executable, "-m", "pip", "--python", python]
    install = [*pip, "install", "--no-index", "--no-deps", "--find-links", wheels]
    run(*install, "nemorl", *sorted({path.name.split("-")[0].replace("_", "-") for path in wheels.iterdir()}))
    (site / "third-party.pth").write_text(sysconfig.get_path("purelib"))

    listed = json.loads(run(environment / "bin" / "nemorl", "plugins", "list", "--json"))

    ok = {(plugin["kind"], plugin["name"], plugin["distribution"]) for plugin in listed if plugin["status"] == "ok"}
    assert ok >= STANDARD
    assert {plugin["version"] for plugin in listed} == {"0.1.0"}
    where = run(python, "-c", "import nemorl, nemorl_grpo; print(nemorl.__file__); print(nemorl_grpo.__file__)")
    assert all(line.startswith(str(environment)) for line in where.splitlines())
