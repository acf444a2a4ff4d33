"""The command ``nemorl`` in the tests' own process: starting another one takes far longer than most commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest


class Done(NamedTuple):
    """The exit code of a command, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Done]


def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """A function that runs ``nemorl …`` with its arguments."""
    from nemorl_cli import main

    def run(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["nemorl", *map(str, arguments)])
        capfd.readouterr()
        try:
            main()
            code: Any = 0
        except SystemExit as exit_:
            code = exit_.code or 0
        return Done(code, *capfd.readouterr())

    return run
