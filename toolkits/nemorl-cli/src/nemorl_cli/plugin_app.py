"""The base of plugins' commands."""

from __future__ import annotations

from typing import Any

import typer

from nemorl_cli.help_texts import App


def plugin_app(**options: Any) -> typer.Typer:
    """An app whose commands behave as nemorl's own: ``-h``, and errors as ``nemorl`` reports them.

    Args:
        options: More for ``typer.Typer``, e.g. ``help``.

    Example:
        >>> app = plugin_app(help="Summarise runs.")
        >>> @app.command()
        ... def summarise(run: str) -> None: ...
    """
    return App(
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        **options,
    )
