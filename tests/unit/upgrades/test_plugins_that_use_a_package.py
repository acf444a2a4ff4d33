"""Which plugins use a package, by requirements and imports."""

from __future__ import annotations

from pathlib import Path

from nemorl_insight.doctor.installed import Installed
from nemorl_insight.doctor.upgrades.bounds import broken_requirements, suggestions
from nemorl_insight.doctor.upgrades.drill import backends_of_step
from nemorl_insight.doctor.upgrades.touching import by_kind, modules_of, touched


def users_of(name: str) -> dict[str, list[str]]:
    installed = Installed()
    package = installed.get(name)
    assert package is not None
    found = touched(package, modules_of(package), installed)
    return {why: [f"{entry.kind}:{entry.name}" for entry in entries] for why, entries in found.items()}


def test_a_plugin_that_imports_it_late_uses_it(acme: Path) -> None:
    assert users_of("acmelib") == {"imports it": ["environments:acme_counting"]}


def test_a_package_that_no_plugin_needs_concerns_none(acme: Path) -> None:
    assert users_of("acmetools") == {}


def test_backends_use_what_they_import_or_require() -> None:
    direct = users_of("transformers")["imports it"]
    assert {"training_backends:dtensor", "generation_backends:hf"} <= {*direct}
    assert "datasets:arithmetic" not in direct
    assert {"training_backends:dtensor"} <= {*users_of("ray")["through what it requires"]}


def test_modules_are_those_at_the_top_and_in_a_namespace(acme: Path) -> None:
    installed = Installed()
    packages = [installed.get(name) for name in ("acmelib", "transformers")]
    assert [modules_of(package) for package in packages if package] == [["acmelib"], ["transformers"]]


def test_the_built_in_step_uses_the_default_backends_where_they_use_the_package() -> None:
    installed = Installed()
    package = installed.get("transformers")
    assert package is not None
    assert backends_of_step(by_kind(touched(package, ["transformers"], installed))) == ("dtensor", "hf")
    assert backends_of_step([]) == ("dtensor", "hf")


def test_requirements_of_plugins_are_read_and_compared(acme: Path) -> None:
    installed = Installed()
    [found] = suggestions("acmelib", "1.0", {"3.0": True}, installed)
    assert (found.where, found.now, found.after) == ("acme-counting", "acmelib>=1.0,<2", "acmelib>=1.0,<3.1")
    assert list(broken_requirements({"acmelib": "3.0"}, installed)) == ["acme-counting 1.2 asks for acmelib>=1.0,<2"]
    assert list(broken_requirements({"acmelib": "1.1"}, installed)) == []
