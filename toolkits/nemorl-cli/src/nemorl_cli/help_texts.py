"""Help texts that fill the terminal, however wide it is."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperGroup

_BROKEN_LINE = re.compile(r"(?<=\S)\n(?=[^\s-])")
"""A line break in a paragraph, which is none before an indented line or one of a list."""


PANELS = {
    "Train": ("quickstart", "train", "config", "plan", "datasets"),
    "Look into runs": ("view", "runs"),
    "Compare": ("compare", "eval"),
    "Publish": ("generate", "export", "serve", "report"),
    "Operate": ("launch", "engines", "doctor", "try", "plugins", "audit", "certs", "grafana"),
}
"""Commands by task, as ``nemorl --help`` shows them, whichever package they come from."""
OF_OTHERS = "From other plugins"


def panel_of(command: str) -> str:
    """
    >>> panel_of("compare"), panel_of("acme")
    ('Compare', 'From other plugins')
    """
    return next((panel for panel, names in PANELS.items() if command in names), OF_OTHERS)


def group_with_default(choose: Callable[[list[str]], str]) -> type[TyperGroup]:
    """Commands, of which the one is meant that ``choose(arguments)`` names where the arguments begin with none."""

    class WithDefault(TyperGroup):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            is_named = args[0] in {*self.commands, *ctx.help_option_names} if args else self.no_args_is_help
            if not is_named:
                args = [choose(args), *args]
            return super().parse_args(ctx, args)

    return WithDefault


class App(typer.Typer):
    """A typer app that shows the paragraphs of its commands' docstrings without the line breaks of the source.

    Typer by itself keeps those of all paragraphs but the first.
    """

    def command(self, name: str | None = None, *, help: str | None = None, **options: Any) -> Callable[..., Any]:  # type: ignore[override]
        """As typer's. ``help``: in place of the docstring."""

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            text = help if help is not None else flowing(inspect.getdoc(function) or "")
            return super(App, self).command(name, help=text or None, **options)(function)

        return register


def flowing(text: str) -> str:
    """Each paragraph on one line.

    >>> flowing("One\\ntwo.\\n\\n  kept as\\n  it is\\n\\n- a\\n- b")
    'One two.\\n\\n  kept as\\n  it is\\n\\n- a\\n- b'
    """
    return _BROKEN_LINE.sub(" ", text)
