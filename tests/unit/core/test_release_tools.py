"""What `make release` refuses, and how it goes on after an interruption. Whole runs: docs/results/release.md."""

from __future__ import annotations

import doctest
import importlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[3] / "tools/release"
needs_openssh = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="OpenSSH signs releases")
MODULES = ("building", "installing", "licences", "metadata", "papers", "probe", "run", "steps")


@pytest.fixture(scope="module")
def tools() -> Iterator[dict[str, ModuleType]]:
    """The programs of tools/release, which import each other by short names."""
    sys.path.insert(0, str(TOOLS))
    yield {name: importlib.import_module(name) for name in MODULES}
    sys.path.remove(str(TOOLS))
    for name in MODULES:
        del sys.modules[name]


def test_the_examples_of_the_tools_hold(tools: dict[str, ModuleType]) -> None:
    assert sum(doctest.testmod(module).failed for module in tools.values()) == 0
    assert sum(doctest.testmod(module).attempted for module in tools.values()) >= 4


# Steps


def test_a_step_is_done_once_for_the_same_input_and_again_for_another(
    tools: dict[str, ModuleType], tmp_path: Path
) -> None:
    done: list[str] = []

    def build() -> dict[str, int]:
        done.append("build")
        return {"wheels": 22 + len(done)}

    first = tools["steps"].Ledger(tmp_path, "commit 1").once("build", build)
    kept = tools["steps"].Ledger(tmp_path, "commit 1").once("build", build)
    other = tools["steps"].Ledger(tmp_path, "commit 2").once("build", build)
    assert (first["wheels"], kept["wheels"], other["wheels"]) == (23, 23, 24)


def test_a_step_that_failed_is_not_done(tools: dict[str, ModuleType], tmp_path: Path) -> None:
    steps = tools["steps"]

    def fail() -> dict[str, int]:
        raise steps.StepFailedError("no network")

    with pytest.raises(steps.StepFailedError):
        steps.Ledger(tmp_path, "commit").once("install", fail)
    assert steps.Ledger(tmp_path, "commit").once("install", lambda: {"packages": 1})["packages"] == 1


# Builds and metadata


def test_builds_differ_by_a_byte_or_a_file(tools: dict[str, ModuleType], tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / "a.whl").write_bytes(b"same")
    assert tools["building"].different(one, other) == []
    (other / "a.whl").write_bytes(b"Same")
    (other / "b.whl").write_bytes(b"")
    assert tools["building"].different(one, other) == ["a.whl", "b.whl"]


GOOD = {
    "Metadata-Version": "2.4",
    "Name": "nemorl-grpo",
    "Version": "0.1.0",
    "Summary": "GRPO",
    "License-Expression": "Apache-2.0",
    "Requires-Python": ">=3.11",
}
PYTHONS = [f"Classifier: Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)]


def wheel(folder: Path, lines: dict[str, str], *more: str, code: str = "") -> Path:
    path = folder / "nemorl_grpo-0.1.0-py3-none-any.whl"
    head = [f"{key}: {value}" for key, value in lines.items()]
    with zipfile.ZipFile(path, "w") as archive:
        text = "\n".join([*head, *PYTHONS, *more, "", "read me " * 20])
        archive.writestr("nemorl_grpo-0.1.0.dist-info/METADATA", text)
        archive.writestr("nemorl_grpo-0.1.0.dist-info/licenses/LICENSE", "Apache")
        archive.writestr("nemorl_grpo/__init__.py", code)
    return path


def test_a_wheel_that_says_all_it_must_has_no_mistakes(tools: dict[str, ModuleType], tmp_path: Path) -> None:
    good = wheel(tmp_path, GOOD, "Requires-Dist: nemorl-core<0.2,>=0.1.0", "Requires-Dist: torch>=2.6")
    assert list(tools["metadata"].mistakes(good)) == []


@pytest.mark.parametrize(
    "pin", ["nemorl-core", "nemorl-core==0.1.0", "nemorl-core<0.3,>=0.1.0", "nemorl-core<0.2,>=0.0.9"]
)
def test_a_wheel_that_pins_ours_otherwise_is_refused(tools: dict[str, ModuleType], tmp_path: Path, pin: str) -> None:
    (mistake,) = tools["metadata"].mistakes(wheel(tmp_path, GOOD, f"Requires-Dist: {pin}"))
    assert pin in mistake


def test_a_wheel_without_licence_or_with_a_path_of_the_builder_is_refused(
    tools: dict[str, ModuleType], tmp_path: Path
) -> None:
    (mistake,) = tools["metadata"].mistakes(wheel(tmp_path, {**GOOD, "License-Expression": "MIT"}))
    assert "licence" in mistake
    (mistake,) = tools["metadata"].mistakes(wheel(tmp_path, GOOD, code=f"HERE = '{TOOLS.parents[1]}'"))
    assert "nemorl_grpo/__init__.py" in mistake


def test_every_package_of_the_checkout_is_released(tools: dict[str, ModuleType]) -> None:
    names = {project["name"] for project in tools["building"].projects()}
    wanted = set(tools["installing"].targets())
    assert len(names) == 22
    assert names < wanted
    assert {"nemorl[all]", "nemorl-agents[mcp]", "nemorl-trust[http]"} < wanted
    assert set(tools["installing"].ELSEWHERE) < wanted
    assert len({tools["installing"].step_name("3.11", name) for name in wanted}) == len(wanted)


# Licences


def test_licences_are_allowed_argued_or_refused(tools: dict[str, ModuleType]) -> None:
    licences = tools["licences"]
    texts = {
        "one": "MIT License\n\nPermission is hereby granted AND so on",
        "two": "BSD License; Apache Software License",
        "three": "GPL-3.0-only OR MIT",
        "four": "GPL-3.0-only AND MIT",
        "five": "UNKNOWN",
        "pebble": "GNU Library or Lesser General Public License (LGPL)",
    }
    found = [licences.Licence(name, "1.0", text) for name, text in texts.items()]
    assert [line.partition(" ")[0] for line in licences.unargued(found)] == ["five", "four"]


def test_what_was_argued_holds_for_the_licence_that_was_read(tools: dict[str, ModuleType]) -> None:
    licences = tools["licences"]
    assert licences.unargued([licences.Licence("pebble", "6.0", "GPL-3.0-only")])
    assert licences.unargued([licences.Licence("pebble-extras", "6.0", "LGPL-3.0-only")])


# Papers


def test_notes_are_the_section_of_a_version_and_at_most_60_lines(tools: dict[str, ModuleType]) -> None:
    papers = tools["papers"]
    changelog = "# Changelog\n\n## [0.2.0] - 2027-01-01\n\n- New.\n\n## [0.1.0] - unreleased\n\n" + "- Old.\n" * 57
    assert papers.notes_of(changelog, "0.2.0") == "# nemorl 0.2.0\n\n- New.\n"
    assert papers.notes_of(changelog, "0.1.0").count("\n") == 59
    for wrong, version in ((changelog + "- Old.\n" * 2, "0.1.0"), (changelog, "0.3.0")):
        with pytest.raises(tools["steps"].StepFailedError):
            papers.notes_of(wrong, version)


@needs_openssh
def test_a_signature_holds_until_a_file_changes(tools: dict[str, ModuleType], tmp_path: Path) -> None:
    papers, out = tools["papers"], tmp_path / "files"
    out.mkdir()
    (out / "a.whl").write_bytes(b"wheel")
    assert papers.write_sums(out) == {"files": 1}
    papers.sign(out, None, tmp_path / "trial-key")
    subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=out, check=True, capture_output=True)

    (out / "a.whl").write_bytes(b"other")
    with pytest.raises(tools["steps"].StepFailedError):
        papers.verify(out)

    papers.write_sums(out)  # the sums of the changed file are not those that were signed
    with pytest.raises(tools["steps"].StepFailedError):
        papers.verify(out)


@needs_openssh
def test_another_key_does_not_sign_for_ours(tools: dict[str, ModuleType], tmp_path: Path) -> None:
    papers, out = tools["papers"], tmp_path / "files"
    out.mkdir()
    papers.write_sums(out)
    papers.sign(out, None, tmp_path / "ours")
    ours = (out / "allowed_signers").read_text()
    papers.sign(out, None, tmp_path / "theirs")
    papers.verify(out)
    (out / "allowed_signers").write_text(ours)
    with pytest.raises(tools["steps"].StepFailedError):
        papers.verify(out)
