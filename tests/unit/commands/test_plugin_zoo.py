"""An environment full of broken plugins: who does not use them notices nothing, who does is told what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from nemorl.config.load import load_config
from nemorl.errors import ConfigError, PluginError
from nemorl.plugins import Index, Registry
from nemorl.plugins.hooks import build_hooks
from nemorl.plugins.index import OWN_COMMANDS
from nemorl_testing.plugin import use_registry
from nemorl_trust.source import template_text
from zoo import GOOD, ZOO, Specimen

BROKEN = [specimen for specimen in ZOO if specimen.said]
USES: dict[str, Callable[[Registry, str], object]] = {
    "hooks": lambda registry, name: build_hooks(registry, [registry.load("hooks", name)()], [], print),
    "templates": lambda registry, name: template_text(registry.index.find("templates", name)),
    "commands": lambda registry, name: registry.load("commands", name),
}
CONFIG = {"algorithm": "grpo", "model": "a/model", "data": "arithmetic", "environment": "math"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site-packages folder with all of them."""
    folder = tmp_path_factory.mktemp("zoo")
    for specimen in ZOO:
        specimen.install(folder)
    (folder / "run.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def zoo(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """The same, in this process."""
    monkeypatch.syspath_prepend(str(site))
    before = set(sys.modules)
    with use_registry(Registry(Index.installed())) as registry:
        yield registry
    for name in set(sys.modules) - before:
        if name.startswith("acme"):
            del sys.modules[name]


def nemorl(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from nemorl_cli import main; main()", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(site), "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, env=environment, cwd=site)


@pytest.mark.parametrize(
    ("arguments", "exit_code", "shown"),
    [
        ("plugins list", 0, "acme-sleeper"),
        ("plugins list --json", 0, '"id": "acme-sleeper:sleeper"'),
        ("--help", 0, "Train, or continue a run"),
        ("train --help", 0, "Train, or continue a run"),
        ("doctor --json", 1, "NRL113"),
        ("config validate run.json", 0, "ok"),
        ("config templates", 0, "acme-no-yaml"),
    ],
)
def test_commands_that_need_none_of_them_work_and_run_none_of_their_code(
    site: Path, arguments: str, exit_code: int, shown: str
) -> None:
    for trace in site.glob("*.ran"):  # of tests before
        trace.unlink()
    done = nemorl(site, *arguments.split())
    assert (done.returncode, done.stderr) == (exit_code, "")
    assert shown in done.stdout
    assert "HIJACKED" not in done.stdout
    assert list(site.glob("*.ran")) == []


def test_list_shows_each_of_them_once(site: Path) -> None:
    listed = json.loads(nemorl(site, "plugins", "list", "--json").stdout)
    ours = [entry["distribution"].replace("_", "-") for entry in listed if entry["distribution"].startswith("acme")]
    assert sorted(ours) == sorted(specimen.distribution for specimen in ZOO)


@pytest.mark.slow
def test_check_names_each_of_them_with_its_distribution_and_a_fix(site: Path, zoo: Registry) -> None:
    ids = {entry.distribution.replace("_", "-"): entry.id for entry in zoo.index.entries}
    awake = [ids[specimen.distribution] for specimen in ZOO if specimen.distribution != "acme-sleeper"]
    done = [
        nemorl(site, "plugins", "check", *awake, "--json"),
        nemorl(site, "plugins", "check", "acme-sleeper", "--timeout", "2", "--json"),
    ]
    assert [process.returncode for process in done] == [1, 1]
    found = {result["id"]: result for process in done for result in json.loads(process.stdout)}
    assert set(found) == {ids[specimen.distribution] for specimen in ZOO}
    for specimen in ZOO:
        result = found[ids[specimen.distribution]]
        assert result["ok"] is not bool(specimen.said), (specimen.distribution, result)
        assert [p for p in result["problems"] if not p["fix"]] == []
        assert specimen.said in " ".join(problem["what"] for problem in result["problems"])
    assert found["acme-printer:printer"]["notes"] == ["prints on import: 'thank you for installing'"]


def test_check_of_several_plugins_looks_at_these_only(site: Path) -> None:
    done = nemorl(site, "plugins", "check", "acme-no-colon", "twin", "acme-twin-one", "--json")
    assert done.returncode == 1
    assert [result["id"] for result in json.loads(done.stdout)] == [
        "acme-no-colon:no-colon",
        "acme-twin-one:twin",
        "acme-twin-two:twin",
    ]


@pytest.mark.parametrize(
    "specimen",
    [s for s in BROKEN if s.kind == "environments" and not s.ends_its_process and s.distribution != "acme-torch"],
    ids=lambda specimen: specimen.distribution,
)
def test_config_that_selects_one_says_whose_it_is_and_what_to_do(zoo: Registry, specimen: Specimen) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({**CONFIG, "environment": specimen.selected_as})
    (problem,) = caught.value.problems
    assert problem.path == "environment"
    assert specimen.selected_as in problem.message
    assert problem.fix
    if specimen.distribution != "acme-needs-modules":  # nothing is wrong with the plugin: its fix installs the library
        assert specimen.distribution in f"{problem.message} {problem.fix}".replace("_", "-")


@pytest.mark.parametrize(
    "specimen",
    # acme-no-yaml is missing: a template is a file that its user copies, so its mistake is one of the copy.
    [s for s in BROKEN if s.kind in USES and s.distribution != "acme-no-yaml"],
    ids=lambda specimen: specimen.distribution,
)
def test_run_that_selects_one_gets_a_plugin_error(zoo: Registry, specimen: Specimen) -> None:
    use = USES[specimen.kind]
    with pytest.raises(PluginError) as caught:
        use(zoo, specimen.selected_as)
    assert specimen.said in str(caught.value)
    assert specimen.distribution in str(caught.value).replace("_", "-")
    assert caught.value.fix


def test_train_with_a_plugin_that_exits_tells_the_user_so(site: Path) -> None:
    done = nemorl(site, "train", "run.json", "environment=sys-exit")
    assert done.returncode == 2
    assert "environment 'sys-exit' from acme-sys-exit 1.0 failed to load: SystemExit: 3" in done.stderr
    assert "fix: reinstall or update acme-sys-exit" in done.stderr
    assert "Traceback" not in done.stderr


def test_names_of_own_commands_are_those_of_the_command_line() -> None:
    from nemorl_cli.app import GROUPS, app

    groups = {"": app, **{f"{name}.": group for name, group in GROUPS.items()}}
    commands = {
        prefix + str(command.name or (command.callback and command.callback.__name__))
        for prefix, group in groups.items()
        for command in group.registered_commands
    }
    assert {*commands, *GROUPS} == OWN_COMMANDS


LEAVES_A_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({file!r}, "w").write(str(child.pid))
{then}
"""


@pytest.mark.parametrize(
    ("then", "said"),
    [pytest.param("time.sleep(600)", "took more than", marks=pytest.mark.slow), ("1 / 0", "ZeroDivisionError")],
)
def test_nothing_that_a_checked_plugin_starts_outlives_its_check(tmp_path: Path, then: str, said: str) -> None:
    noted = tmp_path / "pid"
    code = LEAVES_A_CHILD.format(file=str(noted), then=then) + dedent(GOOD)
    Specimen("acme-parent", said, code).install(tmp_path / "site")
    done = nemorl(tmp_path / "site", "plugins", "check", "acme-parent", "--timeout", "8")
    assert done.returncode == 1
    assert said in done.stdout
    child = Path("/proc") / noted.read_text()
    deadline = time.monotonic() + 60
    while child.is_dir() and "Z" not in (child / "stat").read_text().rpartition(")")[2].split()[0]:
        assert time.monotonic() < deadline, "the plugin's child is still there"
        time.sleep(0.05)
