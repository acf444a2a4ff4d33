"""What `nemorl plugins install` understands and refuses. Real ones are in tests/e2e/test_isolated_installs.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from nemorl.cli.plugin_installs import distribution_named_by, install_isolated, uninstall
from nemorl.errors import PluginNotFoundError, UsageError


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
def test_what_names_nothing_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="is no package"):
        distribution_named_by(name)


def test_a_folder_without_a_project_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no package"):
        distribution_named_by(str(tmp_path))


def test_what_is_installed_here_is_not_isolated_as_well() -> None:
    with pytest.raises(UsageError, match="nemorl-grpo is installed in this environment already") as caught:
        install_isolated("nemorl-grpo", "nemorl-grpo", [], quiet=True)
    assert "nemorl plugins uninstall nemorl-grpo" in str(caught.value.fix)


def test_uninstalling_what_is_not_there_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMORL_HOME", str(tmp_path))
    with pytest.raises(PluginNotFoundError, match="no distribution 'acme-gone' is installed"):
        uninstall("acme-gone")


def test_uninstalling_removes_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMORL_HOME", str(tmp_path))
    folder = tmp_path / "plugins" / "acme-env"
    folder.mkdir(parents=True)
    uninstall("Acme_Env")
    assert not folder.exists()
