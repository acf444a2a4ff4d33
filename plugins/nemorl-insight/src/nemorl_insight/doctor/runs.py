"""``nemorl runs verify`` checks every file that a run left behind. It only reads, and needs no plugin of the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from nemorl.base.files.checkpoints import Checkpoint
from nemorl.base.text.yaml_text import parse_yaml
from nemorl.errors import NemorlError, UsageError
from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.console import Console
from nemorl_cli.plugin_app import plugin_app
from nemorl_cli.report.records.reading import FOLDER, RecordFile, read_table, record_files
from nemorl_cli.terminal import print_table, styled
from nemorl_trust.lock import FILE as PLUGINS_FILE
from nemorl_trust.lock import read_lock

app = plugin_app()


@dataclass(frozen=True)
class Verdict:
    """One part of a run: whole, or what is wrong with it."""

    run: str
    part: str
    """Its path in the run's directory."""
    problem: str | None
    newest_whole: bool = False
    """The checkpoint that the run continues from."""


@app.command()
def verify(
    run: Annotated[Path, typer.Argument(help="A run's directory, or a folder of them.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Compare every checkpoint of a run with its checksums, and see that its other files can be read.

    Exit 1 if something is damaged. A run with a damaged checkpoint continues from the newest one that is sound.

    Examples:

      nemorl runs verify

      nemorl runs verify runs/grpo-1a2b3c4d --json
    """
    with Console(quiet=as_json) as console:
        verdicts: list[Verdict] = []
        for place in runs_in(run):
            console.announce(f"checking {place}")
            verdicts += verdicts_on(place)
    if as_json:
        echo_json([asdict(verdict) for verdict in verdicts], indent=2)
    else:
        sound = {True: "ok, the newest whole checkpoint", False: "ok"}
        states = [
            styled(sound[v.newest_whole], "green") if v.problem is None else styled(v.problem, "red") for v in verdicts
        ]
        rows = [(v.run, v.part, state) for v, state in zip(verdicts, states, strict=True)]
        print_table(("RUN", "PART", "STATE"), rows, whole=("RUN", "PART"))
    if any(verdict.problem is not None for verdict in verdicts):
        raise typer.Exit(1)


def runs_in(folder: Path) -> list[Path]:
    """The run that a folder is, or the runs in it.

    Raises:
        UsageError: It is none and holds none.
    """
    found = [folder] if _is_run(folder) else sorted(path for path in folder.glob("*") if _is_run(path))
    if not found:
        raise UsageError(f"no run in {str(folder)!r}", fix="give a run's directory, or the folder that holds them")
    return found


def verdicts_on(run: Path) -> Iterator[Verdict]:
    """On every part of a run that there is, and on its config if there is none."""
    checks: dict[str, Callable[[Path], Any]] = {
        "config.yaml": _config,
        "environment.json": lambda path: json.loads(path.read_text(encoding="utf-8")),
        PLUGINS_FILE: read_lock,
        **dict.fromkeys(("metrics.jsonl", "events.jsonl"), _lines),
    }
    for name, check in checks.items():
        if (run / name).exists() or name == "config.yaml":
            yield Verdict(run.name, name, _problem(check, run / name))
    for file in record_files(run / FOLDER):
        if (problem := _problem(partial(_table, file), file.path)) is not None:
            yield Verdict(run.name, str(file.path.relative_to(run)), problem)
    paths = sorted((run / "checkpoints").glob("step_*"), key=lambda path: (len(path.name), path.name))
    problems = {path: _problem(lambda path: Checkpoint.read(path).verify(), path) for path in paths}
    newest = next((path for path in reversed(paths) if problems[path] is None), None)
    for path, problem in problems.items():
        yield Verdict(run.name, f"checkpoints/{path.name}", problem, path == newest)


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").exists() or (path / "checkpoints").is_dir()


def _problem(check: Callable[[Path], Any], path: Path) -> str | None:
    try:
        check(path)
    except NemorlError as error:
        return error.message
    except (OSError, ValueError, RecursionError) as error:
        return f"cannot be read: {' '.join(str(error).split())}"
    return None


def _table(file: RecordFile, _path: Path) -> None:
    read_table(file)


def _config(path: Path) -> None:
    if not isinstance(parse_yaml(path.read_text(encoding="utf-8")), dict):
        raise ValueError("it is not a mapping")


def _lines(path: Path) -> None:
    *whole, _last = path.read_bytes().split(b"\n")  # what follows the last newline is being written, or was cut
    for number, line in enumerate(whole, 1):
        if not isinstance(json.loads(line), dict):
            raise ValueError(f"line {number} is not an object")
