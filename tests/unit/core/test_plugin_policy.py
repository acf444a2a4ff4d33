"""Who may be loaded: run, user and site narrow each other, and a file that cannot be read admits nobody."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from installed_plugins import GOOD, Install
from nemorl.base.packages.plugin_policy import machine_policy, policy_files, read_policy
from nemorl.config import load_config
from nemorl.errors import ConfigError, PluginError
from nemorl.plugins import Index, PluginPolicy, Registry
from nemorl.plugins.kinds import EnvironmentConfig
from nemorl_testing.plugin import use_registry
from recorded_messages import Raises


class Own(EnvironmentConfig):
    """Defined by the running program."""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """The site's and the user's settings file; neither exists yet."""
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "site-settings"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user-settings"))
    machine_policy.cache_clear()
    site, user = policy_files()
    for file in (site, user):
        file.parent.mkdir(parents=True)
    yield site, user
    machine_policy.cache_clear()


def refusals(registry: Registry) -> dict[str, str]:
    return {e.distribution: e.diagnostics[0].message for e in registry.index.entries if e.status == "blocked"}


def test_without_files_everybody_is_admitted(settings: tuple[Path, Path]) -> None:
    assert machine_policy().admits("anybody")


def test_site_user_and_run_narrow_each_other(settings: tuple[Path, Path], install: Install, raises: Raises) -> None:
    site, user = settings
    site.write_text("plugins: {allow: [nemorl-grpo, acme-env, acme-other]}\n")
    user.write_text("plugins: {block: [acme_other]}\n")
    for name in ("acme-env", "acme-other", "acme-third"):
        install(name, {name: f"{name.replace('-', '_')}:Env"})
    index = Index.installed()
    found = refusals(Registry(index))
    assert "acme-env" not in found
    assert found["acme-other"].endswith(f"plugins.block in {user} names it")
    assert found["acme-third"].endswith(f"plugins.allow in {site} does not name it")
    narrowed = refusals(Registry(index.narrowed(PluginPolicy(block=("acme-env",)))))
    assert narrowed["acme-env"].endswith("plugins.block in the config names it")
    # A run cannot admit what the site refuses.
    widened = refusals(Registry(index.narrowed(PluginPolicy(allow=("acme-third",)))))
    assert "acme-third" in widened
    with raises(PluginError, "acme-third"):
        Registry(index).load("environments", "acme-third")


def test_the_kernel_and_what_the_program_registers_are_always_admitted() -> None:
    index = Index.installed(PluginPolicy(allow=()))
    assert index.find("weight_transports", "in_process").distribution == "nemorl-core"
    registry = Registry(index)
    registry.register("environments", "own", Own)
    assert registry.load("environments", "own") is Own


def test_the_innermost_preference_decides() -> None:
    site = PluginPolicy(prefer={"environments.gym": "a", "environments.maze": "a"})
    run = PluginPolicy(prefer={"environments.gym": "b"}).within(site)
    assert (run.preferred("environments.gym"), run.preferred("environments.maze")) == ("b", "a")
    assert run.preferred("environments.other") is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("plugins: {allow: nemorl-grpo}", "plugins.allow is a list of distribution names"),
        ("plugins: {blocked: []}", "the keys under `plugins:` are allow, block, prefer"),
        ("plugin: {}", "expected one key, `plugins:`"),
        ("plugins: [", "did not find expected"),
        ("plugins: {prefer: [a]}", "plugins.prefer maps kind.name to a distribution"),
        ("plugins: {prefer: {environments.gym: 3}}", "plugins.prefer maps kind.name to a distribution"),
        *((f"plugins: {wrong}", "the keys under `plugins:`") for wrong in ("[]", "false", "0", "''")),
        *((wrong, "expected one key, `plugins:`") for wrong in ("[]", "false", "0", "''")),
    ],
)
def test_a_policy_that_cannot_be_understood_admits_nobody_and_says_why(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    policy = read_policy(path)
    assert policy.admits("nemorl-core")
    refusal = policy.refusal("nemorl-grpo")
    assert refusal is not None
    assert f"{path} (it cannot be used: " in refusal
    assert why in refusal


@pytest.mark.parametrize("text", ["", "# nothing yet", "{}", "plugins:", "plugins: {}"])
def test_a_policy_of_nothing_admits_everybody(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert read_policy(path).admits("nemorl-grpo")


@pytest.mark.parametrize(
    "make", [lambda path: path.symlink_to("gone"), Path.mkdir, os.mkfifo], ids=["dangling link", "folder", "pipe"]
)
def test_a_policy_that_is_no_file_admits_nobody(settings: tuple[Path, Path], make: Callable[[Path], None]) -> None:
    make(settings[0])
    assert str(settings[0]) in str(machine_policy().refusal("nemorl-grpo"))


def test_a_policy_in_a_folder_that_is_closed_admits_nobody(
    settings: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "lstat", refuses)
    monkeypatch.setattr(Path, "stat", refuses)
    assert "Permission denied" in str(machine_policy().refusal("nemorl-grpo"))


@pytest.mark.parametrize("plugins", [{"block": "acme-env"}, {"blok": ["acme-env"]}, ["acme-env"], {"allow": 3}])
def test_under_a_policy_that_cannot_be_used_no_other_code_is_imported(
    plugins: object, install: Install, tmp_path: Path
) -> None:
    trace = tmp_path / "imported"
    install("acme-env", {"gym": "acme_env:Env"}, code=f"open({str(trace)!r}, 'w').close()\n" + dedent(GOOD))
    config = {"algorithm": "grpo", "model": "m", "environment": "gym", "max_steps": -1, "plugins": plugins}
    with use_registry(Registry(Index.installed())), pytest.raises(ConfigError) as caught:
        load_config(config)
    paths = {problem.path.partition(".")[0] for problem in caught.value.problems}
    assert paths == {"plugins", "environment", "max_steps"}
    assert not trace.exists()


def test_the_command_line_shows_whose_rule_it_is(settings: tuple[Path, Path]) -> None:
    import subprocess
    import sys

    site, _ = settings
    site.write_text("plugins: {block: [nemorl-sft]}\n")
    command = [sys.executable, "-m", "nemorl", "plugins", "list", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=dict(os.environ))
    (sft,) = [e for e in json.loads(done.stdout) if (e["kind"], e["id"]) == ("algorithms", "nemorl-sft:sft")]
    assert sft["status"] == "blocked"
    assert str(site) in sft["diagnostics"][0]["message"]
