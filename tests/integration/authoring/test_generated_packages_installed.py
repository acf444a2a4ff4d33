"""What ``nemorl plugins new`` writes, as pip installs it: listed, its own tests pass, and real runs use it."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from nemorl.base.files.jsonl import read_jsonl
from nemorl_testing.scaffold.names import Names, kinds
from nemorl_testing.scaffold.writing import write_package

pytestmark = pytest.mark.slow

MYPY_CACHE = Path(__file__).parents[3] / ".mypy_cache/plugins"
"""All packages have the same settings, so what torch says about its types is worked out once."""
NAMES = {kind: Names.of(kind, f"own-{kind.replace('_', '-')}-1") for kind in kinds()}


@dataclass(frozen=True)
class World:
    """An environment in which a package of every kind is installed."""

    packages: Path
    site: Path

    def folder(self, kind: str) -> Path:
        return self.packages / NAMES[kind].distribution

    def run(self, *arguments: object, cwd: Path | None = None) -> str:
        """A Python module as a command; its output."""
        return self.python("-m", *arguments, cwd=cwd)

    def python(self, *arguments: object, cwd: Path | None = None) -> str:
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=cwd or self.packages,
            env={**os.environ, "PYTHONPATH": str(self.site), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The packages of all kinds, written and installed beside everything that is installed here."""
    root = tmp_path_factory.mktemp("world")
    found = World(root / "packages", root / "site")
    for kind, names in NAMES.items():
        write_package(names, found.folder(kind))
    install = ["pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", found.site]
    found.run(*install, *map(found.folder, kinds()))
    return found


def test_every_package_is_listed_as_ok(world: World) -> None:
    listed = json.loads(world.run("nemorl", "plugins", "list", "--json"))
    ok = {(entry["kind"], entry["name"], entry["distribution"]) for entry in listed if entry["status"] == "ok"}
    assert {(names.group, names.entry, names.distribution) for names in NAMES.values()} <= ok


@pytest.mark.full
def test_the_tests_of_every_package_pass(world: World) -> None:
    # One process for all: it has torch to load once.
    results = world.packages / "results.xml"
    options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir=."]
    options += ["-o", "junit_family=xunit1", f"--junitxml={results}"]
    world.run("pytest", *options, *map(suite_of, kinds()))
    cases = [case for case in ElementTree.parse(results).iter("testcase") if not list(case)]  # skipped ones hold why
    passed = {Path(case.attrib["file"]).parts[0] for case in cases}
    assert {names.distribution for names in NAMES.values()} <= passed  # checks of the kit are in the kit's file


def suite_of(kind: str) -> str:
    return f"{NAMES[kind].distribution}/tests"


@pytest.mark.full  # half a minute; `test_example_plugins` has one of them
def test_every_package_has_types_that_mypy_accepts(world: World, tmp_path: Path) -> None:
    # One process for all. Their test files have one name, and mypy takes each module once.
    for kind in kinds():
        shutil.copy(world.folder(kind) / "tests/test_conformance.py", tmp_path / f"test_{kind}.py")
    sources = [world.folder(kind) / "src" for kind in kinds() if kind != "template"]
    settings = ["--config-file", world.folder("algorithm") / "pyproject.toml", "--cache-dir", MYPY_CACHE]
    shown = world.run("mypy", *settings, *sources, *sorted(tmp_path.glob("*.py")))
    files = [path for source in sources for path in source.rglob("*.py")]
    assert f"no issues found in {len(files) + len(kinds())} source files" in shown


TRAIN = """
import sys
from nemorl_cli import main

for config in sys.argv[1:]:
    sys.argv = ["nemorl", "train", config]
    try:
        main()
    except SystemExit as end:
        assert not end.code, config
"""
OVER_STANDARD_BACKENDS = "standard"
TRANSPORTS = ["in_process", NAMES["weight_transport"].entry]


@pytest.fixture(scope="module")
def runs(world: World, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of run directories, by name. One process for all: it has torch to load once."""
    entry = {kind: names.entry for kind, names in NAMES.items()}
    changes: dict[str, dict[str, Any]] = {
        OVER_STANDARD_BACKENDS: {
            "algorithm": entry["algorithm"],
            "data": entry["dataset"],
            "environment": {"name": entry["environment"], "max_chars": 3},
            "cluster": {"weight_transport": entry["weight_transport"]},
            "loggers": [entry["logger"]],
            "plugins": {"hooks": [entry["hook"]], "report_sections": [entry["report_section"]]},
        }
    }
    for transport in TRANSPORTS:
        changes[transport] = {
            "policy": {"backend": entry["training_backend"]},
            "generation": {"backend": entry["generation_backend"]},
            "cluster": {"weight_transport": transport},
        }
    folder = tmp_path_factory.mktemp("runs")
    files = [write_config(tiny_model, folder / name, change) for name, change in changes.items()]
    (folder / "train.py").write_text(TRAIN)
    world.python(folder / "train.py", *files)
    return folder


def write_config(tiny_model: Path, run_dir: Path, changes: Mapping[str, Any]) -> Path:
    """The config of a short run."""
    config: Mapping[str, Any] = {
        "algorithm": "grpo",
        "model": str(tiny_model),
        "data": "arithmetic",
        "environment": "exact_match",
        "policy": {"init": "random", "max_sequence_tokens": 32, "optimizer": {"lr": 1e-3}},
        "generation": {"max_new_tokens": 4},
        "num_prompts_per_step": 2,
        "num_generations_per_prompt": 4,
        "max_steps": 2,
        "cluster": {"gpus_per_node": 0},
        "run_dir": str(run_dir),
    }
    file = run_dir.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(merged(config, changes)))
    return file


def rewards(run_dir: Path) -> list[Any]:
    return [record for record in read_jsonl(run_dir / "metrics.jsonl") if "train/reward" in record]


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        key: merged(base[key], changes[key])
        for key in base.keys() & changes.keys()
        if isinstance(base[key], dict) and isinstance(changes[key], dict)
    }
    return {**base, **changes, **both}


@pytest.mark.full
def test_a_run_of_the_generated_parts_over_the_standard_backends(world: World, runs: Path) -> None:
    entry = {kind: names.entry for kind, names in NAMES.items()}
    run_dir = runs / OVER_STANDARD_BACKENDS
    assert len(rewards(run_dir)) == 2
    with (run_dir / "metrics.csv").open(newline="") as file:
        logged = {row["name"] for row in csv.DictReader(file)}
    assert {"train/reward", "train/environment/too_long", "validation/accuracy"} <= logged
    assert "Hardest prompts" in (run_dir / "report.html").read_text()
    command = json.loads(
        world.run("nemorl", entry["command"], run_dir, "--metric", "train/environment/too_long", "--json")
    )
    assert command["highest"] <= 1.0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_run_of_the_generated_backends(transport: str, runs: Path) -> None:
    run_dir = runs / transport
    assert len(rewards(run_dir)) == 2
    resolved = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert resolved["cluster"]["weight_transport"] == transport
    assert (run_dir / "model/model.safetensors").is_file()


def test_the_template_is_offered(world: World) -> None:
    text = world.run("nemorl", "config", "templates", NAMES["template"].entry)
    assert yaml.safe_load(text)["algorithm"] == "grpo"
