"""The worked examples in ``examples/plugins``: installed by pip, their own tests pass, and a run uses the mixture."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from nemorl.base.files.jsonl import read_jsonl
from tiers import only

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[3] / "examples/plugins"
MYPY_CACHE = EXAMPLES.parents[1] / ".mypy_cache/plugins"
NAMES = sorted(path.name for path in EXAMPLES.iterdir())


def run(site: Path, cwd: Path, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All examples, installed beside everything that is installed here."""
    folder = tmp_path_factory.mktemp("site")
    install = ["pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", folder]
    run(folder, EXAMPLES, *install, *(EXAMPLES / name for name in NAMES))
    return folder


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_the_tests_of_an_example_pass(name: str, site: Path) -> None:
    if name == "nemorl-gym-tasks":
        pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (requirements-dev.txt)")
    assert " passed" in run(site, EXAMPLES / name, "pytest", "-q", "-p", "no:cacheprovider")


@pytest.mark.parametrize("name", only(of=NAMES))
def test_an_example_has_types_that_mypy_accepts(name: str, site: Path) -> None:
    assert "no issues found" in run(site, EXAMPLES / name, "mypy", "--cache-dir", MYPY_CACHE)


def test_raft_is_two_files_of_a_hundred_lines() -> None:
    files = list((EXAMPLES / "nemorl-raft/src").rglob("*.py"))
    assert len(files) <= 3
    assert sum(len(path.read_text().splitlines()) for path in files) <= 100


def test_examples_state_a_licence_and_are_no_part_of_the_workspace() -> None:
    for name in NAMES:
        assert tomllib.loads((EXAMPLES / name / "pyproject.toml").read_text())["project"]["license"] == "Apache-2.0"
        assert name not in (EXAMPLES.parents[1] / "pyproject.toml").read_text()


@pytest.mark.full
def test_a_run_trains_on_a_mixture_of_gym_tasks(site: Path, tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (requirements-dev.txt)")
    sums = {"weight": 3, "options": {"max_terms": 2, "max_digits": 1}}
    config = {
        "algorithm": "raft",
        "model": str(tiny_model),
        "data": {"name": "gym_tasks", "tasks": {"chain_sum": sums, "spell_backward": {}}, "num_train": 20},
        "environment": "gym_tasks",
        "policy": {"init": "random", "max_sequence_tokens": 256},
        "generation": {"max_new_tokens": 4},
        "num_prompts_per_step": 8,
        "num_generations_per_prompt": 2,
        "validation": {"max_samples": 8},
        "max_steps": 2,
        "run_dir": str(tmp_path / "run"),
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    run(site, tmp_path, "nemorl", "train", tmp_path / "run.yaml")
    steps = [record for record in read_jsonl(tmp_path / "run/metrics.jsonl") if "train/reward" in record]
    assert len(steps) == 2
    for step in steps:
        assert step["train/environment/scorer_error"] == 0
        parts = [step.get(f"train/environment/{task}_reward", 0.0) for task in ("chain_sum", "spell_backward")]
        assert sum(parts) == pytest.approx(step["train/reward"])
