"""What ``nemorl plugins new`` writes, kind by kind: tidy under any name, valid, and conforming as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from generated import installed, write
from nemorl import __version__
from nemorl.plugins import Registry
from nemorl_testing import conformance
from nemorl_testing.scaffold.names import PACKAGES, Names, kinds
from nemorl_testing.scaffold.writing import package_texts
from nemorl_trust.source import diagnose, read_source
from packaging.requirements import Requirement

LENGTHS = {"short": "q", "digits": "v2-x9", "longest": "the-longest-name-that-is-all-1"}


@pytest.fixture(scope="module", autouse=True)
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """One package of every kind, known to the registry in force."""
    parent = tmp_path_factory.mktemp("packages")
    with installed(*(write(kind, f"fresh-{kind.replace('_', '-')}", parent)[1] for kind in kinds())) as scoped:
        yield scoped


@pytest.mark.parametrize("name", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("kind", kinds())
def test_a_package_is_tidy_under_any_name(kind: str, name: str, tmp_path: Path) -> None:
    _, folder = write(kind, name, tmp_path)
    for arguments in (["check"], ["format", "--check", "--diff"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *arguments, "--no-cache", "."],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", kinds())
def test_nothing_of_the_original_name_is_left(kind: str) -> None:
    for path, text in package_texts(Names.of(kind, "quiet-7")).items():
        found = re.findall(r"\w*[Ee]xample(?!s\b)\w*", path + "\n" + text)
        assert not found, f"{path}: {found}"


@pytest.mark.parametrize("kind", kinds())
def test_the_project_file_states_what_pip_needs(kind: str) -> None:
    names = Names.of(kind, "quiet-7")
    project = tomllib.loads(package_texts(names)["pyproject.toml"])["project"]
    assert project["name"] == "nemorl-quiet-7"
    assert list(project["entry-points"]) == [f"nemorl.{names.group}"]
    assert list(project["entry-points"][f"nemorl.{names.group}"]) == [names.entry]
    kernel = [Requirement(text) for text in project["dependencies"] if text.startswith("nemorl-core")]
    assert len(kernel) == 1
    assert kernel[0].specifier.contains(__version__)
    assert {"pytest", "ruff", "mypy"} <= {Requirement(text).name for text in project["optional-dependencies"]["dev"]}


def test_tools_are_set_alike_in_all_packages() -> None:
    tools = []
    for kind in kinds():
        found = tomllib.loads((PACKAGES / kind / "pyproject.toml").read_text())["tool"]
        found["ruff"]["lint"].pop("ignore", None)  # shape suffixes, where there are tensors
        tools.append(found)
    assert all(found == tools[0] for found in tools)
    assert tools[0]["mypy"]["strict"] is True


@pytest.mark.parametrize("kind", kinds())
def test_a_package_is_complete(kind: str) -> None:
    names = Names.of(kind, "quiet-7")
    texts = package_texts(names)
    source = f"src/{names.module}"
    wanted = {"pyproject.toml", "README.md", ".gitignore", ".github/workflows/test.yml", "tests/test_conformance.py"}
    assert wanted | {f"{source}/__init__.py", f"{source}/py.typed"} <= set(texts)
    assert "Before you publish it: choose a licence" in texts["README.md"]
    for yaml in re.findall(r"```yaml\n(.*?)```", texts["README.md"], re.DOTALL):
        assert len(yaml.splitlines()) <= 10
    tests = re.findall(r"^def (test_\w+)|^(test_conformance) = ", texts["tests/test_conformance.py"], re.MULTILINE)
    assert len(tests) >= 2


@pytest.mark.parametrize("kind", kinds())
def test_a_package_loads_and_is_summed_up_in_one_line(kind: str, packages: Registry) -> None:
    names = Names.of(kind, f"fresh-{kind.replace('_', '-')}")
    entry = packages.index.find(names.group, names.entry)
    facts = read_source(entry)
    assert (entry.status, facts.problem) == ("ok", None)
    assert facts.summary
    if kind != "template":  # read, never loaded
        assert packages.load(names.group, names.entry) is not None
        assert diagnose(entry, packages) is None


SUM = {"text": "12+7=", "answer": "19"}
# The tests that each package has of its own do the same, installed: `test_generated_packages_installed`.
test_algorithm = pytest.mark.full(conformance("algorithms", {"name": "fresh_algorithm", "num_prompts_per_step": 4}))
test_command = conformance("commands", "fresh-command")
test_dataset = conformance("datasets", "fresh_dataset")
test_environment = conformance("environments", "fresh_environment", examples=[(SUM, "19", 1.0), (SUM, "20", 0.0)])
test_generation_backend = pytest.mark.slow(conformance("generation_backends", "fresh_generation_backend"))
test_hook = conformance("hooks", "fresh_hook")
test_report_section = conformance("report_sections", "fresh_report_section")
test_template = conformance("templates", "fresh_template")
test_logger = conformance("loggers", "fresh_logger")
test_training_backend = pytest.mark.slow(conformance("training_backends", "fresh_training_backend"))
test_weight_transport = conformance("weight_transports", "fresh_weight_transport")
