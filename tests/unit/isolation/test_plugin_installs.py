"""What `nemorl plugins install` understands and refuses. Real ones are in tests/e2e/test_isolated_installs.py."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import typer
from nemorl.errors import PluginError, PluginNotFoundError, UsageError
from nemorl_cli.app import app
from nemorl_cli.plugin_checks import _watched
from nemorl_cli.plugin_installs import distribution_named_by, install_isolated, uninstall
from nemorl_trust.isolation.venvs import RECORD, PluginVenv, plugin_venvs, remove_venv
from recorded_messages import Raises
from typer.testing import CliRunner


@pytest.mark.parametrize(
    ("name", "distribution"),
    [
        ("acme-env", "acme-env"),
        ("Acme_Env==1.2", "acme-env"),
        ("acme.env[gpu]>=1,<2", "acme-env"),
        ("acme_env-1.2-py3-none-any.whl", "acme-env"),
    ],
)
def test_a_requirement_names_a_distribution(name: str, distribution: str) -> None:
    assert distribution_named_by(name) == distribution


def test_a_project_folder_names_its_distribution(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "Acme_Env"\n')
    assert distribution_named_by(str(tmp_path)) == "acme-env"


@pytest.mark.parametrize("name", ["", "acme env", "acme.whl", "-e ."])
def test_what_names_nothing_is_refused(name: str, raises: Raises) -> None:
    with raises(UsageError):
        distribution_named_by(name)


def test_a_folder_without_a_project_is_refused(tmp_path: Path, raises: Raises) -> None:
    with raises(UsageError):
        distribution_named_by(str(tmp_path))


def test_what_is_installed_here_is_not_isolated_as_well(raises: Raises) -> None:
    with raises(UsageError, "nemorl-grpo"):
        install_isolated("nemorl-grpo", "nemorl-grpo", [], quiet=True)


NO_NAMES = [
    "",
    ".",
    "..",
    "/",
    "a/b",
    "../acme-env",
    "acme-env/",
    "-r",
    "acme env",
    "acme-env\n",
    "ac\u0131me",
    "acme-",
    "*",
    "~",
]
"""Texts that could be taken for a path, an option or everything, and are no name by PEP 508."""


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of isolated plugins."""
    monkeypatch.setenv("NEMORL_HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "plugins").mkdir(parents=True)
    return tmp_path / "home" / "plugins"


def make_plugin(folder: Path, distribution: str, *, complete: bool = True) -> Path:
    """A folder as `plugins install --isolated` makes it, and a file in it."""
    folder.mkdir(parents=True)
    (folder / RECORD).write_text(json.dumps({"distribution": distribution, "complete": complete}))
    (folder / "kept.txt").touch()
    return folder


def everything_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_uninstalling_what_is_not_there_says_so(plugins: Path, raises: Raises) -> None:
    with raises(PluginNotFoundError, "acme-gone"):
        uninstall("acme-gone", yes=True)


def test_what_is_no_plugin_is_left_to_pip(plugins: Path, raises: Raises) -> None:
    with raises(UsageError, "pluggy", "fix:"):
        uninstall("pluggy", yes=True)
    assert importlib.util.find_spec("pluggy") is not None


def test_uninstalling_removes_the_environment(plugins: Path) -> None:
    folder = make_plugin(plugins / "acme-env", "acme-env")
    uninstall("Acme_Env", yes=True)
    assert not folder.exists()


@pytest.mark.parametrize("name", NO_NAMES)
def test_what_is_no_name_uninstalls_nothing(plugins: Path, tmp_path: Path, name: str, raises: Raises) -> None:
    make_plugin(plugins / "acme-env", "acme-env")
    before = everything_below(tmp_path)
    with raises(UsageError):
        uninstall(name, yes=True)
    assert everything_below(tmp_path) == before


def test_an_absolute_path_uninstalls_nothing(plugins: Path, tmp_path: Path, raises: Raises) -> None:
    victim = make_plugin(tmp_path / "victim", "victim")
    with raises(UsageError):
        uninstall(str(victim), yes=True)
    assert (victim / "kept.txt").is_file()


@pytest.mark.parametrize("name", ['"/abs/path"', '""', '"../up"', "3", '["a"]'])
def test_a_project_may_not_be_called_like_a_path(tmp_path: Path, name: str, raises: Raises) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[project]\nname = {name}\n")
    with raises(UsageError):
        distribution_named_by(str(tmp_path))


@pytest.mark.parametrize("record", [None, "", "[]", "{}", '{"distribution": "acme-other"}', "[" * 100_000, "\0"])
def test_a_folder_that_nemorl_did_not_make_stays(plugins: Path, record: str | None, raises: Raises) -> None:
    folder = plugins / "acme-env"
    folder.mkdir()
    (folder / "kept.txt").touch()
    if record is not None:
        (folder / RECORD).write_text(record)
    with raises(PluginError, "nemorl-plugin.json", "acme-env"):
        uninstall("acme-env", yes=True)
    assert (folder / "kept.txt").is_file()
    with raises(PluginError):  # nor does an installation replace it
        install_isolated("acme-env", "acme-env", [], quiet=True)
    assert (folder / "kept.txt").is_file()


def test_a_link_is_not_followed(plugins: Path, tmp_path: Path, raises: Raises) -> None:
    victim = make_plugin(tmp_path / "acme-env", "acme-env")
    (plugins / "acme-env").symlink_to(victim)
    with raises(PluginError):
        uninstall("acme-env", yes=True)
    assert (victim / "kept.txt").is_file()
    (plugins / "acme-env").unlink()
    elsewhere = tmp_path / "elsewhere"
    plugins.rename(elsewhere)
    plugins.symlink_to(elsewhere)
    make_plugin(elsewhere / "acme-far", "acme-far")
    with raises(PluginError):
        uninstall("acme-far", yes=True)
    assert (elsewhere / "acme-far" / "kept.txt").is_file()


def test_a_link_inside_is_removed_and_not_what_it_leads_to(plugins: Path, tmp_path: Path) -> None:
    folder = make_plugin(plugins / "acme-env", "acme-env")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "kept.txt").touch()
    (folder / "out").symlink_to(tmp_path / "mine")
    uninstall("acme-env", yes=True)
    assert not folder.exists()
    assert (tmp_path / "mine" / "kept.txt").is_file()


def test_an_environment_elsewhere_is_not_removed(plugins: Path, tmp_path: Path, raises: Raises) -> None:
    stray = make_plugin(tmp_path / "acme-env", "acme-env")
    with raises(PluginError):
        remove_venv(PluginVenv(stray, "acme-env"))
    make_plugin(plugins / "acme-env", "acme-env")
    with raises(PluginError):
        remove_venv(PluginVenv(plugins / "acme-env", "acme-other"))
    with raises(PluginError):
        remove_venv(PluginVenv(plugins / "acme-env" / "..", "acme-env"))
    assert (stray / "kept.txt").is_file()
    assert (plugins / "acme-env" / "kept.txt").is_file()


def test_a_half_made_environment_is_not_offered_and_can_be_removed(plugins: Path) -> None:
    folder = make_plugin(plugins / "acme-env", "acme-env", complete=False)
    make_plugin(plugins / "acme-moved", "acme-other")  # a folder that somebody renamed
    assert list(plugin_venvs()) == []
    uninstall("acme-env", yes=True)
    assert not folder.exists()


@pytest.mark.parametrize(("answer", "stays"), [("n\n", True), ("\n", True), ("y\n", False)])
def test_a_person_is_asked(plugins: Path, monkeypatch: pytest.MonkeyPatch, answer: str, stays: bool) -> None:
    folder = make_plugin(plugins / "acme-env", "acme-env")
    controller, terminal = os.openpty()
    os.write(controller, answer.encode())
    monkeypatch.setattr(sys, "stdin", os.fdopen(terminal))
    with suppress(typer.Abort):
        uninstall("acme-env")
    assert folder.exists() is stays
    os.close(controller)


def test_a_script_says_yes_beforehand(plugins: Path) -> None:
    folder = make_plugin(plugins / "acme-env", "acme-env")
    refused = CliRunner().invoke(app, ["plugins", "uninstall", "acme-env"], input="y\n")
    assert isinstance(refused.exception, UsageError)
    assert refused.exception.fix == "add --yes"
    assert folder.exists()
    also = CliRunner().invoke(app, ["plugins", "uninstall", "nemorl-grpo"], input="y\n")  # what pip would remove
    assert isinstance(also.exception, UsageError)
    assert CliRunner().invoke(app, ["plugins", "uninstall", "acme-env", "--yes"]).exit_code == 0
    assert not folder.exists()


def test_an_environment_that_cannot_be_made_and_one_without_its_python_are_said(
    plugins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: Raises
) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with raises(PluginError, "venv"):
        install_isolated("acme-env", "acme-env", [], quiet=True)
    gone = str(tmp_path / "python")
    assert gone in _watched([gone, "-c", "pass"], 10.0, None)


def test_an_isolated_check_needs_nothing_of_the_command_line() -> None:
    """Beside an isolated plugin there are kernel, trust, and toolkits without what these depend on."""
    absent = ("nemorl_cli", "torch", "transformers", "typer", "rich", "pyarrow")
    plugins = [("environments", "exact_match"), ("datasets", "arithmetic"), ("loggers", "tensorboard")]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent}))\n"
        "from nemorl_testing.smoke import look\n"
        f"print(*[look(*plugin, full=False)['problems'] for plugin in {plugins}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("[] [] []\n", 0), done.stderr
