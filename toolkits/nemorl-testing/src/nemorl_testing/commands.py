"""Checks of commands: light to find, callable the way nemorl calls them, and able to explain themselves."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from nemorl.plugins import registry

from nemorl_testing.kit import NotApplicable, Subject, expect


def check_it_is_a_command(subject: Subject) -> None:
    """The entry names a Typer app or a Click command. (DESIGN 4)"""
    expect(_is_command(_loaded(subject)), f"{subject.entry.value} is {_loaded(subject)!r}")


def check_help_is_shown(subject: Subject) -> None:
    """``--help`` prints how the command is used, under the name it has in nemorl, and exits with 0. (DESIGN 8)"""
    words = f"nemorl {subject.entry.name.replace('.', ' ')}"
    shown, code = _called(_loaded(subject), ["--help"], words)
    expect(code == 0, f"--help exits with {code!r} and prints: {shown[-500:]}")
    expect(words in " ".join(shown.split()), f"--help does not show that this is {words!r}: {shown[:500]}")


def check_it_describes_itself(subject: Subject) -> None:
    """The command, or its app, has a docstring or a help text. (DESIGN 8)"""
    if not _is_command(_loaded(subject)):
        raise NotApplicable("only Typer apps and Click commands carry a help text")
    command = _click_command(_loaded(subject))
    expect((getattr(command, "help", None) or "").strip(), f"{subject.entry.value} has no docstring and no help=")


def check_wrong_option_is_refused(subject: Subject) -> None:
    """An option that does not exist is refused with exit code 2, and named. (DESIGN 8)"""
    shown, code = _called(_loaded(subject), ["--no-such-option"], subject.entry.name)
    expect(code == 2, f"--no-such-option exits with {code!r} and prints: {shown[-500:]}")
    expect("no-such-option" in shown, f"the message does not name the option: {shown[-500:]}")


def check_import_is_silent(subject: Subject) -> None:
    """Importing the command's module prints nothing. (DESIGN 4)"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", f"import {subject.module}"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    expect(done.returncode == 0, f"import {subject.module} fails in a fresh interpreter: {done.stderr[-500:]}")
    expect(not done.stdout + done.stderr, f"import {subject.module} prints {(done.stdout + done.stderr)[:300]!r}")


def _loaded(subject: Subject) -> Any:
    return registry().load("commands", subject.name)


def _is_command(loaded: Any) -> bool:
    import typer

    # Typer brings a Click of its own, and plugins may use the other one: both are told by what they can do.
    return isinstance(loaded, typer.Typer) or (callable(loaded) and callable(getattr(loaded, "make_context", None)))


def _click_command(loaded: Any) -> Any:
    import typer.main

    return typer.main.get_command(loaded) if isinstance(loaded, typer.Typer) else loaded


def _called(command: Callable[..., Any], arguments: list[str], name: str) -> tuple[str, object]:
    """Output of a call like nemorl's, and its exit code."""
    shown = io.StringIO()
    with redirect_stdout(shown), redirect_stderr(shown):
        try:
            command(args=arguments, prog_name=name)
        except SystemExit as done:
            return shown.getvalue(), done.code or 0
    return shown.getvalue(), "no SystemExit"
