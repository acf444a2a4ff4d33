"""Two plugins that pin incompatible versions of one package: installed by the command line, used in one run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from textwrap import dedent

import pytest
from nemorl_cli.report.records.reading import read_records

pytestmark = pytest.mark.slow

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "{name}"
version = "1.0"
description = "{name} of the tests"
dependencies = ["nemorl-core>=0.1,<0.2", "inflection=={pin}"]
[project.entry-points."nemorl.{kind}"]
{entry} = "{package}:Plugin"
"""
SHOUT = '''
from typing import ClassVar
from nemorl.plugins.kinds import EnvironmentConfig

class Plugin(EnvironmentConfig):
    """Scores with the old release."""

    summary: ClassVar[str] = "scores with the old release"

    def build(self):
        import inflection
        from nemorl.contracts.environment import Environment
        from nemorl.types import Score

        class Shout(Environment):
            name = "shout"

            def score(self, prompt, response):
                old = float(inflection.__version__ == "0.3.1")
                return Score(old, metrics={"plural_is_cows": float(inflection.pluralize("cow") == "kine")})

        return Shout()
'''
WORDS = '''
from typing import ClassVar
from nemorl.plugins.kinds import DatasetConfig

class Plugin(DatasetConfig):
    """Rows made with the new release."""

    summary: ClassVar[str] = "rows made with the new release"

    def build(self, split):
        import inflection

        rows = [{"prompt": f"{inflection.__version__} {n}", "answer": ""} for n in range(8)]
        return rows if split == "train" else None
'''
ENGINE = '''
from typing import ClassVar
from nemorl_dtensor.config import HFGenerationConfig

class Plugin(HFGenerationConfig):
    """The hf engine, where the old release is."""

    summary: ClassVar[str] = "the hf engine, where the old release is"

    def build(self, *args):
        import inflection

        assert inflection.__version__ == "0.3.1"
        return super().build(*args)
'''


def write_project(folder: Path, name: str, kind: str, entry: str, pin: str, code: str) -> Path:
    package = name.replace("-", "_")
    (folder / name / "src" / package).mkdir(parents=True)
    (folder / name / "src" / package / "__init__.py").write_text(dedent(code))
    text = PROJECT.format(name=name, kind=kind, entry=entry, pin=pin, package=package)
    (folder / name / "pyproject.toml").write_text(text)
    return folder / name


def nemorl(home: Path, *arguments: str | Path, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "nemorl", *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=900, cwd=home,
        env={**os.environ, "NEMORL_HOME": str(home), **variables},
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def builds_at_once(tmp_path: Path) -> dict[str, str]:
    """Variables with which pip builds projects with hatchling and setuptools from here, not in an environment each."""
    folder = tmp_path / "backend"
    folder.mkdir()
    for package in ("hatchling", "packaging", "pathspec", "pluggy", "setuptools", "trove_classifiers"):
        (folder / package).symlink_to(Path(sysconfig.get_path("purelib")) / package)
    # pip's way to say: without. What is not compiled now (all of Ray) is, where it is imported.
    return {"PYTHONPATH": str(folder), "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_COMPILE": "1"}


def config(tiny_model: Path, home: Path, **changes: object) -> Path:
    data: dict[str, object] = {
        "algorithm": "grpo",
        "model": str(tiny_model),
        "run_dir": str(home / "run"),
        "environment": "shout",
        "data": "pinned_words",
        "max_steps": 2,
        "num_prompts_per_step": 2,
        "num_generations_per_prompt": 2,
        "policy": {"init": "random", "max_sequence_tokens": 48},
        "generation": {"max_new_tokens": 3},
        "validation": {"every": 0, "at_end": False},
        "checkpoint": {"export": False},
        **changes,
    }
    path = home / "run.json"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.full
def test_two_plugins_that_exclude_each_other_work_in_one_run(
    tiny_model: Path, builds_at_once: dict[str, str], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    old = write_project(tmp_path, "acme-shout", "environments", "shout", "0.3.1", SHOUT)
    new = write_project(tmp_path, "acme-words", "datasets", "pinned_words", "0.5.1", WORDS)
    for project in (old, new):
        said = nemorl(home, "plugins", "install", project, "--isolated", "--json", **builds_at_once)
        (entry,) = json.loads(said)
        assert (entry["status"], Path(entry["venv"])) == ("ok", home / "plugins" / project.name)

    for name in ("shout", "pinned_words"):
        (result,) = json.loads(nemorl(home, "plugins", "check", name, "--json"))
        assert result["ok"], result

    nemorl(home, "train", config(tiny_model, home), "--json")
    samples = list(read_records(home / "run"))
    assert {sample["prompt"].split()[0] for sample in samples} == {"0.5.1"}
    assert {sample["reward"] for sample in samples} == {1.0}  # graded by 0.3.1
    locked = json.loads((home / "run" / "plugins.lock.json").read_text())["plugins"]
    assert {"acme-shout", "acme-words"} <= {plugin["distribution"] for plugin in locked}
    nemorl(home, "train", home / "run.json", "max_steps=3", "--locked", "--json")

    nemorl(home, "plugins", "uninstall", "acme-shout", "--yes")
    names = {entry["name"] for entry in json.loads(nemorl(home, "plugins", "list", "--json"))}
    assert "pinned_words" in names
    assert "shout" not in names


def borrowing_venv(home: Path, project: Path, pin: str) -> None:
    """An isolated plugin whose environment has torch and nemorl-dtensor from here, and a pin of its own."""
    folder = home / "plugins" / project.name
    venv.create(folder)
    site = next(folder.glob("lib/python*/site-packages"))
    purelib = Path(sysconfig.get_path("purelib"))
    # Editable packages of this environment are path files, which are not read from a borrowed folder.
    editable = [line for file in purelib.glob("*nemorl*.pth") for line in file.read_text().splitlines()]
    (site / "borrowed.pth").write_text("\n".join([*editable, str(purelib)]))
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    install = [*pip, "install", "--quiet", "--no-deps", "--no-build-isolation"]  # hatchling is borrowed, too
    subprocess.run([*install, f"inflection=={pin}", str(project)], check=True)
    (folder / "nemorl-plugin.json").write_text(json.dumps({"distribution": project.name}))


@pytest.mark.ray
@pytest.mark.full
def test_an_isolated_engine_generates_on_workers_of_its_own_interpreter(tiny_model: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    engine = write_project(tmp_path, "acme-engine", "generation_backends", "pinned_hf", "0.3.1", ENGINE)
    words = write_project(tmp_path, "acme-words", "datasets", "pinned_words", "0.5.1", WORDS)
    borrowing_venv(home, engine, "0.3.1")
    borrowing_venv(home, words, "0.5.1")
    path = config(
        tiny_model,
        home,
        environment={"name": "format", "pattern": "a"},
        generation={"max_new_tokens": 3, "backend": "pinned_hf"},
        cluster={"launcher": "ray", "workers_per_node": 2, "gpus_per_node": 0, "colocated": False},
    )
    result = json.loads(nemorl(home, "train", path, "--json"))
    assert result["steps"] == 2
    assert result["metrics"]["train/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-3)
