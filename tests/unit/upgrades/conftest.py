"""A package with an installed version and others in an index of files; a plugin whose rewards come from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from installed_plugins import Install
from made_wheels import unpack, write_wheel
from nemorl.plugins import Index, Registry
from nemorl_insight.doctor.upgrades.touching import imports_of
from nemorl_testing.plugin import use_registry

COUNTS_DIGITS = "def value(text): return float(sum(c.isdigit() for c in text))\n"
COUNTS_LETTERS = "def value(text): return float(sum(c.isalpha() for c in text))\n"
PLUGIN = """
    from nemorl.contracts.environment import Environment
    from nemorl.plugins.kinds import EnvironmentConfig
    from nemorl.types import Score

    class Counting(Environment):
        name = "acme_counting"

        def score(self, prompt, response):
            from acmelib import value

            return Score(value(response))

    class Env(EnvironmentConfig):
        "Counts what acmelib counts."
        summary = "counts"

        def build(self):
            return Counting()
"""
REQUIRED = "acmelib>=1.0,<2"


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """1.1 is like the installed 1.0, 2.0 lacks what its plugin imports, 3.0 gives other numbers."""
    folder = tmp_path / "index"
    write_wheel(folder, "acmelib", "1.1", COUNTS_DIGITS)
    write_wheel(folder, "acmelib", "2.0", "def worth(text): return 0.0\n")
    write_wheel(folder, "acmelib", "3.0", COUNTS_LETTERS)
    write_wheel(folder, "acmelib", "4.0", "raise ImportError('libacme.so.4: cannot open')\n")
    write_wheel(folder, "acmelib", "5.0", COUNTS_DIGITS, requires=["acmetools>=2"])
    write_wheel(folder, "acmetools", "2.1", "")
    return folder


@pytest.fixture
def acme(site: Path, install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder with acmelib 1.0, acmetools 1.0 and the plugin, which processes that are started see as well."""
    for name, code in (("acmelib", COUNTS_DIGITS), ("acmetools", "")):
        unpack(write_wheel(tmp_path / "old", name, "1.0", code), site)
    install("acme-counting", {"acme_counting": "acme_counting:Env"}, code=PLUGIN, requires=(REQUIRED, "nemorl-core"))
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    imports_of.cache_clear()
    with use_registry(Registry(Index.installed())):
        yield site


@pytest.fixture
def pip_args(index: Path) -> Sequence[str]:
    return ["--no-index", "--find-links", str(index)]
