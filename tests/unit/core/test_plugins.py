"""The index, the registry and their diagnostics, on distributions written to disk as pip would install them."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path
from textwrap import dedent

import pytest
from installed_plugins import GOOD, Install
from nemorl.base.packages.plugin_policy import normalize
from nemorl.base.text.suggest import did_you_mean
from nemorl.config.base import Config
from nemorl.errors import PluginError, PluginNotFoundError
from nemorl.plugins import Index, PluginPolicy, Registry, register
from nemorl.plugins.index import PREFIX
from nemorl.plugins.kinds import EnvironmentConfig
from nemorl.plugins.registry import config_bases
from nemorl_testing.plugin import use_registry
from nemorl_trust.source import diagnose
from recorded_messages import Raises

BAD_SYNTAX = "class Env(:\n"


class LocalEnv(EnvironmentConfig):
    """Defined in a test, registered by decorator."""


def here(policy: PluginPolicy | None = None) -> Registry:
    return Registry(Index.installed(policy))


def statuses(registry: Registry, name: str, kind: str = "environments") -> dict[str, str]:
    return {entry.id: entry.status for entry in registry.index.of_kind(kind) if entry.name == name}


def test_an_installed_plugin_is_listed_from_metadata_alone(install: Install) -> None:
    install("acme-env", {"gym": "acme_env:Env"})
    registry = here()
    entry = registry.index.find("environments", "gym")
    assert (entry.id, entry.version, entry.value, entry.status) == ("acme-env:gym", "1.2", "acme_env:Env", "ok")
    assert "acme_env" not in sys.modules


def test_loading_imports_the_selected_module_only(install: Install) -> None:
    install("acme-env", {"gym": "acme_env:Env"})
    install("acme-other", {"maze": "acme_other:Env"})
    registry = here()
    loaded = registry.load("environments", "gym")
    assert loaded.summary == "made up"
    assert "acme_env" in sys.modules
    assert "acme_other" not in sys.modules
    assert registry.load("environments", "gym") is loaded
    assert registry.load("environments", "acme-env:gym") is loaded
    assert registry.name_of("environments", loaded) == "gym"


def test_two_distributions_with_one_name_are_ambiguous(install: Install, raises: Raises) -> None:
    install("acme-env", {"gym": "acme_env:Env"})
    install("acme-other", {"gym": "acme_other:Env"})
    registry = here()
    assert statuses(registry, "gym") == {"acme-env:gym": "ambiguous", "acme-other:gym": "ambiguous"}
    with raises(PluginError, "acme-env", "acme-other", "gym", "plugins.prefer"):
        registry.load("environments", "gym")


def test_a_full_id_needs_no_decision(install: Install) -> None:
    install("acme-env", {"gym": "acme_env:Env"})
    install("acme-other", {"gym": "acme_other:Env"})
    registry = here()
    loaded = registry.load("environments", "acme-other:gym")
    assert loaded.__module__ == "acme_other"
    # What is written into the resolved config must find the same class again.
    assert registry.name_of("environments", loaded) == "acme-other:gym"


def test_prefer_decides_who_wins_a_name(install: Install) -> None:
    install("acme-env", {"gym": "acme_env:Env"})
    install("acme-other", {"gym": "acme_other:Env"})
    registry = here(PluginPolicy(prefer={"environments.gym": "Acme_Other"}))
    assert registry.load("environments", "gym").__module__ == "acme_other"
    assert registry.name_of("environments", registry.load("environments", "gym")) == "gym"


def test_a_blocked_rival_makes_the_name_unique(install: Install) -> None:
    install("acme-env", {"gym": "acme_env:Env"})
    install("acme-other", {"gym": "acme_other:Env"})
    assert statuses(here(PluginPolicy(block=("acme_env",))), "gym") == {
        "acme-env:gym": "blocked",
        "acme-other:gym": "ok",
    }
    assert statuses(here(PluginPolicy(allow=("acme-env",))), "gym") == {
        "acme-env:gym": "ok",
        "acme-other:gym": "blocked",
    }


def test_one_name_in_two_kinds_is_no_conflict(install: Install) -> None:
    install("acme-env", {"math": "acme_env:Env"}, group="datasets")
    assert statuses(here(), "math", "datasets") == {"acme-env:math": "ok"}
    assert here().index.find("environments", "math").distribution == "nemorl-math-env"


def test_a_blocked_plugin_says_so_when_it_is_selected(install: Install, raises: Raises) -> None:
    install("acme-env", {"gym": "acme_env:Env"})
    with raises(PluginError, "acme-env", "plugins.block"):
        here(PluginPolicy(block=("acme.env",))).load("environments", "gym")
    assert "acme_env" not in sys.modules


@pytest.mark.parametrize(
    ("requirement", "status"),
    [
        ("nemorl-core>=99", "incompatible"),
        ("nemorl_core<0.0.1; python_version > '3'", "incompatible"),
        ("nemorl-core[torch]>=99", "incompatible"),
        ("nemorl-core>=99; python_version < '3'", "ok"),
        ("nemorl-core>=99; extra == 'dev'", "ok"),
        ("nemorl-core>=0.1", "ok"),
        ("nemorl-core", "ok"),
        ("unrelated>=99", "ok"),
        *((f"{other}>=99", "ok") for other in ("nemorl-core-extras", "nemorl_core.extras", "nemorl-core2")),
        ("nemorl--core>=99", "incompatible"),
    ],
)
def test_compatibility_is_the_plugins_own_requirement(install: Install, requirement: str, status: str) -> None:
    install("acme-env", {"gym": "acme_env:Env"}, requires=("pydantic", requirement))
    assert statuses(here(), "gym") == {"acme-env:gym": status}


def test_an_incompatible_plugin_names_both_versions(install: Install, raises: Raises) -> None:
    install("acme-env", {"gym": "acme_env:Env"}, requires=("nemorl-core>=99",))
    with raises(PluginError, "acme-env", "1.2", "nemorl-core>=99", 0):
        here().load("environments", "gym")


def test_names_that_cannot_be_written_are_set_aside(install: Install) -> None:
    install("acme-env", {"my gym": "acme_env:Env", "gym!": "acme_env:Env", "good.gym-2": "acme_env:Env"})
    entries = {entry.name: entry.status for entry in here().index.entries if entry.distribution == "acme-env"}
    assert entries == {"my gym": "bad-name", "gym!": "bad-name", "good.gym-2": "ok"}


def test_an_unknown_kind_is_reported_with_the_closest_one(install: Install) -> None:
    install("acme-env", {"gym": "acme_env:Env"}, group="enviroments")
    (entry,) = here().index.of_kind("enviroments")
    assert entry.status == "unknown-kind"
    assert entry.diagnostics[0].fix == "Did you mean 'environments'?"


BROKEN = {
    "import-error": (
        "import no_such_library\n",
        "acme_env:Env",
        "'no_such_library'",
    ),
    "syntax-error": (BAD_SYNTAX, "acme_env:Env", "SyntaxError"),
    "exits": ("import sys\nsys.exit(3)\n", "acme_env:Env", "SystemExit"),
    "raises": ("1 / 0\n", "acme_env:Env", "ZeroDivisionError"),
    "no-attribute": (GOOD, "acme_env:Enf", "AttributeError"),
    "no-module": (GOOD, "acme_nowhere:Env", "'acme_nowhere'"),
}


@pytest.mark.parametrize(("code", "value", "cause"), BROKEN.values(), ids=BROKEN)
def test_a_broken_plugin_disturbs_nobody_until_it_is_selected(
    install: Install, code: str, value: str, cause: str, raises: Raises
) -> None:
    install("acme-env", {"gym": value}, code=code)
    registry = here()
    assert statuses(registry, "gym") == {"acme-env:gym": "ok"}
    assert registry.load("environments", "math").__name__ == "MathConfig"
    with raises(PluginError, "gym", "acme-env", "1.2", "acme-env:gym", cause):
        registry.load("environments", "gym")
    diagnostic = diagnose(registry.index.find("environments", "gym"), registry)
    assert diagnostic is not None
    assert (diagnostic.state, diagnostic.code, diagnostic.plugin) == ("broken", "NRL106", "acme-env:gym")


@pytest.mark.parametrize(
    "code",
    ["Env = 3\n", "class Env: pass\n", "from nemorl.plugins.kinds import DatasetConfig as Env\n", "def Env(): pass\n"],
    ids=["a number", "a plain class", "another kind", "a function"],
)
def test_what_is_not_a_config_of_its_kind_is_refused(install: Install, code: str, raises: Raises) -> None:
    install("acme-env", {"gym": "acme_env:Env"}, code=code)
    with raises(PluginError, "nemorl.plugins.kinds.EnvironmentConfig"):
        here().load("environments", "gym")


def test_ctrl_c_while_a_plugin_imports_is_not_swallowed(install: Install) -> None:
    install("acme-env", {"gym": "acme_env:Env"}, code="raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        here().load("environments", "gym")


def test_a_missing_library_is_diagnosed_without_importing_it(install: Install) -> None:
    install("acme-env", {"gym": "acme_env:Env"}, code=dedent(GOOD) + '    requires_modules = ("no_such_library",)\n')
    registry = here()
    diagnostic = diagnose(registry.index.find("environments", "gym"), registry)
    assert diagnostic is not None
    assert (diagnostic.state, diagnostic.fix) == ("missing", "pip install no_such_library")


def test_a_missing_library_inside_a_missing_package_is_diagnosed_too(install: Install) -> None:
    install("acme-env", {"gym": "acme_env:Env"}, code=dedent(GOOD) + '    requires_modules = ("no_such.library",)\n')
    registry = here()
    diagnostic = diagnose(registry.index.find("environments", "gym"), registry)
    assert diagnostic is not None
    assert diagnostic.message == "needs no_such.library, which cannot be found"


@pytest.mark.parametrize(
    ("code", "status", "what"),
    [(BAD_SYNTAX, "broken", "not valid Python (line 1"), ("import sys\nsys.exit(3)\n", "ok", "SystemExit: 3")],
    ids=["syntax error", "exits"],
)
@pytest.mark.slow
def test_the_command_line_lists_and_checks_a_broken_plugin(
    install: Install, site: Path, code: str, status: str, what: str
) -> None:
    import json
    import subprocess

    code += "Env = None\n" if status == "ok" else ""
    install("acme-env", {"gym": "acme_env:Env"}, code=code)

    def nemorl(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from nemorl_cli import main; main()", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(site)}
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)

    listed = nemorl("plugins", "list", "--json")
    assert listed.returncode == 0
    assert {e["id"]: e["status"] for e in json.loads(listed.stdout)}["acme-env:gym"] == status
    checked = nemorl("plugins", "check", "acme-env:gym", "--json")
    assert checked.returncode == 1
    (result,) = json.loads(checked.stdout)
    assert result["ok"] is False
    assert what in result["problems"][0]["what"]
    assert "acme-env" in result["problems"][0]["fix"]


def test_the_first_of_two_installations_wins_as_it_does_for_import(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("acme-env", {"gym": "acme_env:Env"})
    shadow = tmp_path / "shadow"
    install("Acme_Env", {"gym": "acme_env:Env"}, folder=shadow, version="9.9")
    monkeypatch.setattr(sys, "path", [*sys.path, str(shadow)])
    entries = [entry for entry in here().index.entries if entry.name == "gym"]
    assert [(entry.version, entry.status) for entry in entries] == [("1.2", "ok")]


def test_a_name_nobody_has_lists_who_has_others_and_guesses(install: Install, raises: Raises) -> None:
    install("acme-env", {"gym": "acme_env:Env"})
    with raises(PluginNotFoundError, "gmy", "acme-env", "1.2", "gym"):
        here().load("environments", "gmy")


def test_a_well_known_name_says_what_to_install() -> None:
    with pytest.raises(PluginNotFoundError) as caught:
        Registry(Index([])).load("training_backends", "dtensor")
    assert caught.value.fix == "pip install nemorl-dtensor"
    assert "(installed: none)" in caught.value.message


def test_a_decorator_registers_next_to_the_installed() -> None:
    with use_registry(here()) as registry:
        assert register("environments", "local_env")(LocalEnv) is LocalEnv
        assert registry.load("environments", "local_env") is LocalEnv
        assert registry.name_of("environments", LocalEnv) == "local_env"
        # Found by module and name, as a worker process would find it, also under a run's plugin policy.
        assert Registry(registry.index.narrowed(PluginPolicy())).load("environments", "local_env") is LocalEnv
        assert registry.load("environments", "math").__name__ == "MathConfig"
    with pytest.raises(PluginNotFoundError):
        here().load("environments", "local_env")


def test_registering_nonsense_is_refused(raises: Raises) -> None:
    registry = here()
    with raises(PluginError, "gyms"):
        registry.register("gyms", "a", LocalEnv)
    with raises(PluginError):
        registry.register("datasets", "a", LocalEnv)


def test_registering_an_installed_name_is_refused(raises: Raises) -> None:
    registry = here()
    with raises(PluginError, "MathConfig", "nemorl-math-env", "LocalEnv"):
        registry.register("environments", "math", LocalEnv)


def test_a_class_that_nothing_offers_has_no_name(raises: Raises) -> None:
    for kind in config_bases():
        with raises(PluginError, "LocalEnv", f'nemorl.plugins.register("{kind}",'):
            here().name_of(kind, LocalEnv)


def test_a_registry_is_in_force_inside_its_block_only() -> None:
    from nemorl.plugins import registry

    outside, inner = registry(), here()
    with use_registry(inner):
        assert registry() is inner
    assert registry() is outside


@pytest.mark.parametrize("name", ["My_Plugin", "my.plugin", "MY--plugin", "my-plugin"])
def test_distribution_names_compare_as_pip_compares_them(name: str) -> None:
    assert normalize(name) == "my-plugin"
    assert not PluginPolicy(block=("my_plugin",)).admits(name)
    assert PluginPolicy(allow=("MY-PLUGIN",)).admits(name)


def test_block_wins_over_allow() -> None:
    assert not PluginPolicy(allow=("a",), block=("a",)).admits("a")
    assert not PluginPolicy(allow=()).admits("a")


def test_everything_that_ships_with_nemorl_loads() -> None:
    registry = here()
    ours = [entry for entry in registry.index.entries if entry.distribution.startswith("nemorl-")]
    assert len(ours) >= 13
    for entry in ours:
        diagnostic = diagnose(entry, registry)
        assert diagnostic is None or diagnostic.state == "missing", diagnostic
        if entry.kind == "templates":  # files
            continue
        loaded = registry.load(entry.kind, entry.id)
        if isinstance(loaded, type) and issubclass(loaded, Config):
            assert getattr(loaded, "summary", ""), f"{entry.id} has no summary"


def test_diagnostics_are_plain_data(install: Install) -> None:
    install("acme-env", {"gym!": "acme_env:Env"})
    (entry,) = [entry for entry in here().index.entries if entry.distribution == "acme-env"]
    assert set(entry.diagnostics[0].as_dict()) == {"state", "code", "plugin", "message", "fix", "cause"}


def test_an_entry_point_without_a_distribution_is_named() -> None:
    point = metadata.EntryPoint("gym", f"{__name__}:LocalEnv", f"{PREFIX}environments")
    assert Index([point]).find("environments", "gym").id == f"registered in {__name__}:gym"


@pytest.mark.parametrize(
    ("word", "answer"), [("dtensr", "Did you mean 'dtensor'?"), ("hf", "Did you mean 'hf'?"), ("xyz", None)]
)
def test_did_you_mean_offers_only_what_is_close(word: str, answer: str | None) -> None:
    assert did_you_mean(word, ["dtensor", "hf", "megatron"]) == answer


def test_names_of_distributions_of_before_mean_those_of_today() -> None:
    index = Index.installed()
    assert index.find("environments", "nemorl-environments:chain").id == "nemorl-tasks:chain"
    assert index.find("algorithms", "nemorl-rm:rm").distribution == "nemorl-preference"
    policy = PluginPolicy(allow=("nemorl_environments",), block=("nemorl-view",))
    assert policy.admits("nemorl-tasks")
    assert not policy.admits("nemorl-insight")
    assert not policy.admits("nemorl-agents")
