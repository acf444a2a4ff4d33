"""What a stranger with a shell may put beside a signed plugin, so that Python runs it in the plugin's place."""

from __future__ import annotations

import importlib.machinery
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from installed_plugins import GOOD, Install
from nemorl.plugins import Index, Registry
from nemorl_testing.plugin import use_registry
from nemorl_trust.lock import entries_by_distribution
from nemorl_trust.lock_files import files_of, hashes_of

NAME = "acme-env"
EVIL = "print('evil')\n"


def extension_module(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python prefers a compiled module to a source of its name."""
    (site / f"acme_env{importlib.machinery.EXTENSION_SUFFIXES[0]}").write_bytes(b"\x7fELF")


def package_of_its_name(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python prefers a package to a module."""
    (site / "acme_env").mkdir()
    (site / "acme_env" / "__init__.py").write_text(EVIL)


def earlier_on_the_path(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``PYTHONPATH`` does."""
    elsewhere = site.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "acme_env.py").write_text(EVIL)
    monkeypatch.syspath_prepend(str(elsewhere))


def bytecode_alone(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled file in the place of its source."""
    (site / "acme_env.py").rename(site / "acme_env.pyc")


def link_to_another_file(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (site.parent / "other.py").write_text(EVIL)
    (site / "acme_env.py").unlink()
    (site / "acme_env.py").symlink_to(site.parent / "other.py")


def namespace_becomes_a_package(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the namespace had no code for runs first now."""
    (site / "acme" / "__init__.py").write_text(EVIL)


def another_part_of_the_namespace(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A namespace has parts all over the path; the first part that has the module wins."""
    elsewhere = site.parent / "elsewhere"
    (elsewhere / "acme").mkdir(parents=True)
    (elsewhere / "acme" / "graders.py").write_text(EVIL)
    monkeypatch.syspath_prepend(str(elsewhere))


def data_in_the_package(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that the code may read."""
    (site / "acme" / "pack" / "prompts.txt").write_text("other words")


def data_by_a_link_to_a_folder(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (site.parent / "more").mkdir()
    (site.parent / "more" / "a.txt").write_text("x")
    (site / "acme" / "pack" / "more").symlink_to(site.parent / "more", target_is_directory=True)


@pytest.fixture
def hashes(site: Path, install: Install) -> Iterator[Callable[[], dict[str, str]]]:
    """The hash of each file that is compared with a signed set, by name; taken anew at each call."""
    (site / "acme" / "pack").mkdir(parents=True)
    (site / "acme" / "pack" / "__init__.py").write_text("")
    (site / "acme" / "pack" / "prompts.txt").write_text("words")
    install(NAME, {NAME: "acme_env:Env", "graders": "acme.graders:Env", "pack": "acme.pack:Env"})
    (site / "acme" / "graders.py").write_text(GOOD)

    def taken() -> dict[str, str]:
        importlib.invalidate_caches()
        with use_registry(Registry(Index.installed())):
            return hashes_of(files_of(entries_by_distribution()[NAME]))

    return taken


@pytest.mark.parametrize(
    "attack",
    [
        extension_module, package_of_its_name, earlier_on_the_path, bytecode_alone, link_to_another_file,
        namespace_becomes_a_package, another_part_of_the_namespace, data_in_the_package, data_by_a_link_to_a_folder,
    ],
)  # fmt: skip
def test_whatever_python_would_run_or_read_in_a_plugins_place_shows(
    hashes: Callable[[], dict[str, str]],
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
    attack: Callable[[Path, pytest.MonkeyPatch], None],
) -> None:
    before = hashes()
    assert before == hashes()
    assert {"acme_env.py", "acme/graders.py", "acme/pack/prompts.txt"} <= before.keys()
    attack(site, monkeypatch)
    assert hashes() != before
