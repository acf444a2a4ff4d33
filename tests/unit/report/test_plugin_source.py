"""What is known of a plugin without running it: located as import would, parsed, never executed."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Any

import pytest
from installed_plugins import GOOD, Install
from nemorl.errors import PluginError
from nemorl.plugins import Index, PluginEntry, Registry
from nemorl.plugins.kinds import EnvironmentConfig
from nemorl_testing.plugin import use_registry
from nemorl_trust.source import Place, locate, read_source, template_text
from recorded_messages import Raises

EXPLODES = "raise RuntimeError('a module that must not run')\n"


def entry(name: str, kind: str = "environments") -> PluginEntry:
    return next(entry for entry in Index.installed().of_kind(kind) if entry.name == name)


def test_a_summary_is_read_from_the_source_and_nothing_runs(install: Install) -> None:
    install("acme-env", {"gym": "acme_env:Env"}, code=EXPLODES + "class Env:\n    summary: ClassVar[str] = 'a gym'\n")
    facts = read_source(entry("gym"))
    assert (facts.summary, facts.problem) == ("a gym", None)
    assert "acme_env" not in sys.modules


@pytest.mark.parametrize(
    ("code", "summary"),
    [
        ("app = make(help='Words of the app.')\n", "Words of the app."),
        ("app = make()\n@app.command()\ndef one():\n    '''The\n    one.\n\n    More.'''\n", "The one."),
        ("app = make()\n@app.callback()\ndef all_(): 'All.'\n@app.command()\ndef one(): 'One.'\n", "All."),
        ("app = make()\n@app.command()\ndef one(): 'One.'\n@app.command()\ndef two(): 'Two.'\n", ""),
        ("app = make()\n@other.command()\ndef one(): 'One.'\n", ""),
        ("app = make(help=words())\n", ""),
        ("def app(args):\n    'A function.'\n", "A function."),
    ],
)
def test_a_command_is_summarised_by_its_help_or_its_docstring(install: Install, code: str, summary: str) -> None:
    install("acme-do", {"do": "acme_do:app"}, code=EXPLODES + code, group="commands")
    facts = read_source(entry("do", "commands"))
    assert (facts.summary, facts.problem) == (summary, None)


def test_every_command_of_this_repository_has_a_sentence_of_its_own() -> None:
    commands = [one for one in Index.installed().of_kind("commands") if one.distribution.startswith("nemorl-")]
    said = {one.name: read_source(one).summary for one in commands}
    assert len(set(said.values())) == len(said)
    assert all(text.endswith((".", "?")) for text in said.values()), said


def test_what_the_program_registered_is_read_from_the_object() -> None:
    class Here(EnvironmentConfig):
        """Defined in a function, where no file has a name for it."""

    with use_registry(Registry(Index.installed())) as registry:
        registry.register("environments", "here", Here)
        facts = read_source(registry.index.find("environments", "here"))
    assert (facts.summary, facts.problem) == ("Defined in a function, where no file has a name for it.", None)


@pytest.mark.parametrize(
    ("code", "summary"),
    [
        ("class Env:\n    summary = 'plain'\n", "plain"),
        ("class Env:\n    '''First line.\n\n    More.'''\n", "First line."),
        ("def Env(run):\n    'A function.'\n", "A function."),
        ("if True:\n    class Env:\n        summary = 'below an if'\n", "below an if"),
        ("try:\n    import fast\nexcept ImportError:\n    class Env:\n        summary = 'fallback'\n", "fallback"),
        ("from elsewhere import Env\n", ""),
        ("Env = make()\n", ""),
        ("from elsewhere import *\n", ""),
        ("def __getattr__(name): ...\n", ""),
    ],
)
def test_whatever_may_define_the_name_is_believed(install: Install, code: str, summary: str) -> None:
    install("acme-env", {"gym": "acme_env:Env"}, code=code)
    facts = read_source(entry("gym"))
    assert (facts.summary, facts.problem) == (summary, None)


@pytest.mark.parametrize(
    ("value", "code", "message"),
    [
        ("acme_gone:Env", GOOD, "there is no module acme_gone"),
        ("acme_env.inner:Env", GOOD, "there is no module acme_env.inner"),
        ("acme_env:Environment", GOOD, "acme_env defines no 'Environment'"),
        ("acme_env:Env", "x = 1\nclass Env(:\n", "not valid Python (line 2: "),
        ("acme_env:Env", "class Env: ...\0", "not valid Python"),
    ],
)
def test_what_can_only_fail_is_broken_before_anyone_asks(install: Install, value: str, code: str, message: str) -> None:
    install("acme-env", {"gym": value}, code=code)
    problem = read_source(entry("gym")).problem
    assert problem is not None
    assert (problem.state, problem.code, problem.plugin) == ("broken", "NRL106", "acme-env:gym")
    assert message in problem.message
    assert problem.fix == "reinstall or update acme-env, or tell its authors"


def test_a_source_that_cannot_be_read_is_said_of_its_plugin_alone(install: Install, monkeypatch: Any) -> None:
    install("acme-env", {"gym": "acme_env:Env"}, code=GOOD)

    def refused(self: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    found = entry("gym")
    monkeypatch.setattr(Path, "read_bytes", refused)
    problem = read_source(found).problem
    assert problem is not None
    assert "acme_env.py cannot be read: Permission denied" in problem.message


def test_a_submodule_is_found_without_importing_its_package(site: Path) -> None:
    (site / "acme_pkg").mkdir()
    (site / "acme_pkg" / "__init__.py").write_text(EXPLODES)
    (site / "acme_pkg" / "config.py").write_text("")
    assert locate("acme_pkg.config") == Place(site / "acme_pkg" / "config.py")
    assert locate("acme_pkg.config.deeper") == locate("acme_gone") == Place()
    assert "acme_pkg" not in sys.modules


def test_a_template_is_a_file_of_a_package_that_is_not_imported(install: Install, site: Path, raises: Raises) -> None:
    (site / "acme_pkg" / "templates").mkdir(parents=True)
    (site / "acme_pkg" / "__init__.py").write_text(EXPLODES)
    (site / "acme_pkg" / "templates" / "small.yaml").write_text("# A run for one GPU.\nalgorithm: grpo\n")
    values = {"small": "acme_pkg.templates:small.yaml", "gone": "acme_pkg.templates:gone.yaml"}
    install("acme-tpl", values, group="templates")
    assert template_text(entry("small", "templates")) == "# A run for one GPU.\nalgorithm: grpo\n"
    assert read_source(entry("small", "templates")).summary == "A run for one GPU."
    with raises(PluginError, "acme_pkg.templates", "acme-tpl", "gone.yaml"):
        template_text(entry("gone", "templates"))
