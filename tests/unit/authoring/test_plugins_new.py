"""``nemorl plugins new``: what it accepts, says and refuses."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from nemorl.errors import UsageError
from nemorl_testing.scaffold.command import app
from nemorl_testing.scaffold.names import Names, kind_called, kinds
from nemorl_testing.scaffold.writing import package_texts, write_package
from recorded_messages import Raises
from typer.testing import CliRunner


def test_kinds_may_be_plural_and_dashed() -> None:
    assert kind_called("environment") == kind_called("environments") == "environment"
    assert kind_called("training-backends") == kind_called("Training_Backend") == "training_backend"
    assert kind_called("report-section") == "report_section"


def test_there_is_a_package_for_every_kind_of_plugin() -> None:
    from nemorl.plugins import KINDS

    assert {f"{kind}s" for kind in kinds()} == set(KINDS)


@pytest.mark.parametrize(("typed", "meant"), [("enviroment", "environment"), ("algoritms", "algorithm")])
def test_a_misspelt_kind_is_guessed(typed: str, meant: str, raises: Raises) -> None:
    with raises(UsageError, f"{meant}s"):
        kind_called(typed)


def test_a_kind_far_from_any_gets_the_list(raises: Raises) -> None:
    with raises(UsageError, "training_backends"):
        kind_called("xyz")


def test_one_name_takes_every_form() -> None:
    names = Names.of("algorithm", "raft-2b_fast")
    assert (names.distribution, names.module) == ("nemorl-raft-2b-fast", "nemorl_raft_2b_fast")
    assert (names.stem, names.entry, names.group) == ("Raft2bFast", "raft_2b_fast", "algorithms")
    assert Names.of("algorithm", "nemorl-raft-2b_fast") == names
    assert Names.of("command", "raft-2b").entry == "raft-2b"


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("2fast", "fast"),
        ("MyEnv", "my-env"),
        ("a.b", "a-b"),
        ("a--b", "a-b"),
        ("ünicode", "nicode"),
        ("", "my-plugin"),
        ("class", "my-class"),
        ("core", "my-core"),
        ("x" * 31, "31"),
    ],
)
def test_a_bad_name_is_refused_with_a_better_one(name: str, better: str, raises: Raises) -> None:
    with raises(UsageError, better):
        Names.of("environment", name)


@pytest.mark.parametrize(
    ("kind", "name", "hidden"),
    [
        ("algorithm", "policy-gradient", "PolicyGradientConfig"),
        ("dataset", "dataset", "DatasetConfig"),
    ],
)
def test_a_name_whose_classes_would_hide_nemorls_own_is_refused(
    kind: str, name: str, hidden: str, raises: Raises
) -> None:
    with raises(UsageError, hidden):
        package_texts(Names.of(kind, name))


def test_an_existing_folder_is_never_touched(tmp_path: Path, raises: Raises) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "notes.txt").write_text("keep")
    with raises(UsageError):
        write_package(Names.of("hook", "quiet"), folder)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_nothing_is_written_when_the_author_is_not_understood(tmp_path: Path, raises: Raises) -> None:
    with raises(UsageError, "Ada", "Lovelace", "<ada@engine.org>"):
        write_package(Names.of("hook", "quiet"), tmp_path / "mine", author="<not an address>")
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    ("author", "fields"),
    [
        ("Ada Lovelace <ada@engine.org>", {"name": "Ada Lovelace", "email": "ada@engine.org"}),
        ('Zoë "Z" \\ O\'Neil', {"name": 'Zoë "Z" \\ O\'Neil'}),
    ],
)
def test_the_author_is_in_the_project_file(author: str, fields: dict[str, str]) -> None:
    texts = package_texts(Names.of("hook", "quiet"), author)
    assert tomllib.loads(texts["pyproject.toml"])["project"]["authors"] == [fields]


def test_a_taken_name_is_a_warning_that_says_what_follows(tmp_path: Path) -> None:
    taken = write_package(Names.of("environment", "exact-match"), tmp_path / "environment").warnings
    assert len(taken) == 1
    assert "plugins.prefer: {environments.exact_match: nemorl-exact-match}" in taken[0]
    replaced = write_package(Names.of("hook", "grpo"), tmp_path / "hook").warnings
    assert len(replaced) == 1
    assert "nemorl-grpo is installed: pip would replace it" in replaced[0]
    assert not write_package(Names.of("hook", "quiet"), tmp_path / "free").warnings


def test_the_command_writes_beside_and_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["environments", "word-count"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "nemorl-word-count/src/nemorl_word_count/environment.py").is_file()
    assert done.output.splitlines()[-3:] == [
        '  pip install -e "nemorl-word-count[dev]"',
        "  nemorl plugins check nemorl-word-count:word_count",
        "  pytest nemorl-word-count",
    ]


def test_the_command_answers_as_json(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["command", "look", "--folder", str(tmp_path / "here"), "--json"])
    found = json.loads(done.stdout)
    assert (found["kind"], found["name"], found["distribution"]) == ("commands", "look", "nemorl-look")
    written = {path.relative_to(tmp_path / "here").as_posix() for path in (tmp_path / "here").rglob("*")}
    assert set(found["files"]) <= written
    assert {"LICENSE", "pyproject.toml"} & set(found["files"]) == {"pyproject.toml"}  # a licence is the author's choice
    assert len(found["next"]) == 3


def test_help_shows_the_kinds_and_examples() -> None:
    shown = CliRunner().invoke(app, ["--help"]).output
    assert "nemorl plugins new environment word-count" in shown
    assert all(kind in shown for kind in kinds())
