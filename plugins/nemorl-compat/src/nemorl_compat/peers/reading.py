"""Configs of TRL, verl and OpenRLHF as one flat mapping: YAML, JSON, or the command line in a shell script.

Of a script, the command of the system counts that bash would run. Options of ``accelerate`` say how many processes
there are. verl's command line is Hydra's.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any

from nemorl.base.text.reading import UnreadableError, parse_json, read_text
from nemorl.base.text.yaml_text import parse_yaml
from nemorl.errors import DataError, UsageError

from nemorl_compat.peers import verl_hydra
from nemorl_compat.peers.tables import table
from nemorl_compat.peers.verl_hydra import flat, scalar
from nemorl_compat.shell import Expanded, expand
from nemorl_compat.shell.expanding import program_of

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "trl": ("grpo", "sft", "dpo", "kto", "orpo", "cpo"),
    "verl": ("grpo",),
    "openrlhf": ("grpo", "sft", "dpo"),
}
"""System -> kinds of runs that are translated."""
PROGRAMS: Mapping[str, re.Pattern[str]] = {
    "trl": re.compile(r"(?:^|/|_|\btrl )(grpo|sft|dpo|kto|orpo|cpo|rloo|reward)(?:_\w+)?(?:\.py)?$"),
    "verl": re.compile(
        r"(?:^|.*[./])(?:verl|recipe)[./](?:\w+[./])*(\w*(?:main|trainer|generation|merge)\w*)(?:\.py)?$|(?:^|/)(main_ppo)\.py$"
    ),
    "openrlhf": re.compile(r"openrlhf\.cli\.train_(ppo_ray|sft|dpo|rm|kto|kd|ppo)"),
}
"""Word of a command line that is a system's program; its group says which."""
KINDS: Mapping[str, Mapping[str, str]] = {
    "trl": {name: name for name in FAMILIES["trl"]},
    "verl": {"main_ppo": "grpo"},
    "openrlhf": {"ppo_ray": "grpo", "sft": "sft", "dpo": "dpo"},
}
"""System, and name of a program of it -> family."""
OF_LAUNCHERS = ("num_processes", "num_machines", "nproc_per_node", "nnodes", "num_gpus")
"""Options before the program that say how many processes there are."""
FEW, WIDTH = 6, 100
"""Programs that a message names, and characters of a command in it."""


@dataclass(frozen=True)
class ScriptRun:
    """How a script is read."""

    variables: Mapping[str, str] = field(default_factory=dict)
    """Set when it starts"""
    arguments: Sequence[str] = ()
    """Its own"""
    command: int | None = None
    """Which of its commands is meant, from 1; unset: there is one"""


def script_run(words: Sequence[str], command: int | None = None) -> ScriptRun:
    """How a script is read that is called with these words: ``NAME=value`` sets a variable, others are arguments."""
    matches = [(re.fullmatch(r"([A-Za-z_]\w*)=(.*)", word, re.DOTALL), word) for word in words]
    variables = {found[1]: found[2] for found, _ in matches if found is not None}
    return ScriptRun(variables, [word for found, word in matches if found is None], command)


@dataclass
class Given:
    """The content of a config of another system."""

    system: str
    """Name of the table"""
    values: dict[str, Any]
    """Key, with its sections where the system has any -> value"""
    family: str | None = None
    """One of ``FAMILIES``, where it is known"""
    folder: Path = field(default_factory=Path)
    decisions: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Thing that a script looked at -> what it was, and what it means"""

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key, default)
        return default if value is None else value

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def number(self, key: str, default: float) -> float:
        """A finite number, where the value is one.

        Raises:
            DataError: it is something else.
        """
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise DataError(f"{key} is {value!r}, not a finite number", fix="write the number out")
        return value

    def whole(self, key: str, default: float, *, least: float = -math.inf) -> int:
        """A whole number of at least so much, where the value is one.

        Raises:
            DataError: it is something else.
        """
        value = self.number(key, default)
        if value != int(value) or value < least:
            wanted = "a whole number" if value >= least else f"{least:g} or more"
            raise DataError(f"{key} is {value!r}, not {wanted}", fix=f"write {wanted}")
        return int(value)

    def word(self, key: str, default: str) -> str:
        """The value as text, so that what is no word is none of those that are known."""
        return str(self.get(key, default))


def read(path: Path, system: str, family: str | None = None, run: ScriptRun | None = None) -> Given:
    """A config file or script of a system.

    Args:
        path: ``.yaml``, ``.yml``, ``.json``, or a shell script.
        system: One of the tables.
        family: Of the run, where the file does not say it.
        run: How a script is to be read.

    Raises:
        DataError: it cannot be read.
        UsageError: it holds no command of the system, or one that is not translated.
    """
    try:
        text = read_text(path)
        if path.suffix == ".json":
            return Given(system, dict(flat(_mapping(parse_json(text), path), system)), family, path.parent)
        if path.suffix in (".yaml", ".yml"):
            if system == "verl":
                return Given(system, verl_hydra.of_file(path), family, path.parent)
            data = _mapping(parse_yaml(text), path)
            aliases = table(system).aliases
            values = {aliases.get(key, key): value for key, value in flat(data, system)}
            return Given(system, values, family, path.parent)
    except UnreadableError as error:
        raise DataError(f"{path}: {error}") from error
    return _of_script(path, system, family, run or ScriptRun())


def _mapping(data: Any, path: Path) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise DataError(f"{path} holds no mapping", fix="give a config file")
    return data


def _of_script(path: Path, system: str, family: str | None, run: ScriptRun) -> Given:
    """The command of the system that a script runs; its options, and what decided them."""
    expanded = expand(path, run.variables, run.arguments)
    found = [(words, *_program(words, system)) for words in expanded.commands]
    programs = list(dict.fromkeys((tuple(words), place, name) for words, place, name in found if name is not None))
    programs = [one for one in programs if KINDS[system].get(one[2], family) is not None] or programs[:1]
    if not programs:
        raise _no_command(path, system, expanded)
    words, place, program = programs[_chosen(path, [words for words, _, _ in programs], run)]
    given = Given(system, {}, folder=path.parent, decisions=_decisions(expanded, words))
    return _of_command(words, place, KINDS[system].get(program, family), given, program)


def _no_command(path: Path, system: str, expanded: Expanded) -> UsageError:
    named = list(dict.fromkeys(program_of(words) for words in expanded.commands))
    what = f"it runs {', '.join(named[:FEW])}" if named else "it runs nothing"
    ended = f"; bash ended it with: {expanded.errors}" if expanded.errors else ""
    fix = "give a YAML or JSON config, or the script that starts it"
    return UsageError(
        f"{path} has no command of {system} ({what}{ended})",
        fix=f"give variables that it needs as NAME=value, or {fix}" if ended else fix,
    )


def _chosen(path: Path, commands: Sequence[Sequence[str]], run: ScriptRun) -> int:
    if run.command is None and len(commands) == 1:
        return 0
    if run.command is not None and 1 <= run.command <= len(commands):
        return run.command - 1
    listed = "\n".join(f"  {n}: {shorten(shlex.join(words), WIDTH)}" for n, words in enumerate(commands, 1))
    raise UsageError(
        f"{path} runs {len(commands)} commands that could be meant:\n{listed}", fix="say which with --command N"
    )


def _decisions(expanded: Expanded, chosen: Sequence[str]) -> dict[str, tuple[Any, str]]:
    """Variables that a script's branches looked at, and what was not run although its output may have counted."""
    made: dict[str, tuple[Any, str]] = {}
    for name, value in expanded.branches.items():
        text = "it was not set" if value is None else "it was empty" if value == "" else "it had this value"
        made[f"${name}"] = (
            value,
            f"a branch of the script looks at it: {text}; {name}=VALUE on the command line sets it",
        )
    for words in expanded.skipped:
        made[f"$({shorten(shlex.join(words), WIDTH)})"] = (None, "it was not run: it counts as failed, without output")
    others = list(dict.fromkeys(program_of(words) for words in expanded.commands if tuple(words) != tuple(chosen)))
    if others:
        made["$(…)"] = (others, "these commands were not run: they count as successful, without output")
    if expanded.errors:
        made["bash"] = (expanded.errors, "the script ended with this error")
    return made


def _program(words: Sequence[str], system: str) -> tuple[int, str | None]:
    """Where the system's program stands, and which it is."""
    for place, word in enumerate(words):
        spoken = f"trl {word}" if place and words[place - 1] == "trl" else word
        found = PROGRAMS[system].search(spoken)
        is_named = system != "trl" or spoken != word or word.endswith(".py")
        if found is not None and is_named and not word.startswith("-"):
            return place, next(filter(None, found.groups()))
    return 0, None


def _of_command(words: Sequence[str], place: int, family: str | None, given: Given, program: str) -> Given:
    if family is None:
        raise UsageError(f"{program} is not translated", fix=f"programs for {', '.join(FAMILIES[given.system])} are")
    given.family = family
    launcher = dict(_options(words[:place]))
    given.values |= {key: launcher[key] for key in OF_LAUNCHERS if key in launcher}
    if given.system == "verl":
        given.values |= verl_hydra.of_command(words[place + 1 :], given.folder)
        return given
    found = _options(words[place + 1 :])
    aliases = table(given.system).aliases
    given.values |= {aliases.get(key, key): value for key, value in found}
    return given


def _options(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """``--key value``, ``--key=value``, ``--flag`` and ``--key several values``."""
    place = 0
    while place < len(words):
        word, place = words[place], place + 1
        if not word.startswith("--") or word == "--":
            continue
        key, equals, value = word[2:].partition("=")
        values = [value] if equals else []
        while not equals and place < len(words) and not words[place].startswith("--"):
            values.append(words[place])
            place += 1
        read = [scalar(value) for value in values]
        yield key.replace("-", "_"), True if not read else read[0] if len(read) == 1 else read
