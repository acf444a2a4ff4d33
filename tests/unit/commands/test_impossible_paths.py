"""A path that can be none is refused in one message, wherever a command or a function looks at it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import nemorl as api
import pytest
import typer
from command_line import Command
from nemorl.base.text.reading import UnreadableError, is_file, is_folder, read_text
from nemorl.config import load_config
from nemorl.errors import NemorlError
from nemorl.plugins.registry import registry
from nemorl_cli.app import app
from nemorl_rl.data.rows import rows_of

LONG = {
    "name": "x" * 5000,
    "file": "x" * 5000 + ".jsonl",
    "folders": "/" + "y/" * 3000,
    "dots": "./" + "x" * 5000 + ".yaml",
    "script": "x" * 5000 + ".py:score",
}
NUL = {"NUL": "a\0b", "NUL in a file": "a\0b.jsonl"}


def commands(group: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*names, name))
    if not hasattr(group, "commands"):
        yield names, group


def all_commands() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Own ones, and those of plugins as click has them."""
    yield from commands(typer.main.get_command(app))
    for entry in registry().index.of_kind("commands"):
        made = registry().load("commands", entry.name)
        yield from commands(typer.main.get_command(made) if isinstance(made, typer.Typer) else made, _words(entry.name))


def _words(name: str) -> tuple[str, ...]:
    return tuple(name.split("."))


def takes_path(parameter: Any) -> bool:
    return "Path" in str(vars(parameter).get("type_descriptor") or vars(parameter).get("type"))


CASES = [
    (words, command, parameter)
    for words, command in all_commands()
    for parameter in command.params
    if takes_path(parameter)
]


def test_many_commands_take_paths() -> None:
    found = {" ".join(words) for words, _, _ in CASES}
    assert {"train", "report", "config validate", "config migrate", "view page"} <= found


@pytest.mark.parametrize(
    ("words", "command", "parameter"),
    CASES,
    ids=[f"{' '.join(words)} {parameter.name}" for words, _, parameter in CASES],
)
def test_a_command_refuses_a_path_that_is_too_long(
    words: tuple[str, ...],
    command: Any,
    parameter: Any,
    nemorl: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    arguments: list[str] = []
    for other in command.params:
        is_option = type(other).__name__.endswith("Option")
        if other is not parameter and not other.required:
            continue
        value = LONG["dots"] if other is parameter else "there" if takes_path(other) else "1"
        arguments += [max(other.opts, key=len), value] if is_option else [value]
    done = nemorl(*words, *arguments)
    if words == ("config", "templates"):
        return  # it lists them all, and needs no place for one
    assert (done.code, "Traceback" in done.err, len(done.err) < 20_000) == (2, False, True)
    assert "error" in done.err.lower(), done.err
    assert "report it to whom it belongs" not in done.err, done.err


PLACES: dict[str, Callable[[str], Any]] = {
    "model": lambda path: {"model": path},
    "data": lambda path: {"data": path},
    "file": lambda path: {"data": {"name": "file", "path": path}},
    "preset": lambda path: {"data": {"name": "preset", "preset": path}},
    "rows of a preset": lambda path: {"data": {"name": "gsm8k", "path": path}},
    "hub": lambda path: {"data": {"name": "huggingface", "path": path}},
    "validation": lambda path: {"validation": {"data": path}},
    "run_dir": lambda path: {"run_dir": path},
    "environment": lambda path: {"environment": path},
    "agent's reward": lambda path: {"environment": {"name": "agent", "reward": path}},
    "agent's command": lambda path: {"environment": {"name": "agent", "command": ["python", path]}},
    "agent's files": lambda path: {"environment": {"name": "agent", "copy_in": [path]}},
    "tokenizer": lambda path: {"policy": {"tokenizer": {"name": path}}},
    "template": lambda path: {"policy": {"tokenizer": {"chat_template": path}}},
    "interpreter": lambda path: {"policy": {"python": path}},
}


@pytest.mark.parametrize("path", [*LONG.values(), *NUL.values()], ids=[*LONG, *NUL])
def test_a_config_refuses_it_or_takes_it_for_a_name(path: str, tiny_model: Path) -> None:
    base = {"algorithm": "grpo", "model": str(tiny_model), "environment": "math", "data": "arithmetic"}
    for change in PLACES.values():
        with suppress(NemorlError):
            load_config({**base, **change(path)})


@pytest.mark.parametrize("path", [*LONG.values(), *NUL.values()], ids=[*LONG, *NUL])
def test_functions_that_take_paths_refuse_them_as_well(path: str) -> None:
    for call in (load_config, lambda p: api.find_dataset(p, []), lambda p: rows_of(p, "train")):
        with pytest.raises(NemorlError):
            call(path)
    assert not is_file(path)
    assert not is_folder(path)
    with pytest.raises(UnreadableError):
        read_text(Path(path))
