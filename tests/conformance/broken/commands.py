"""Commands with a mistake each."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

good = typer.Typer()
undescribed = typer.Typer()
tolerant = typer.Typer(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
_inner = typer.Typer()
_nameless = typer.Typer()


@good.command()
def _good(count: Annotated[int, typer.Option(help="How many.")] = 1) -> None:
    """Count."""


twin = good


@undescribed.command()
def _undescribed() -> None:
    print("done")


@tolerant.command()
def _tolerant() -> None:
    """Count, whatever is asked."""


@_inner.command()
def _named(count: int = 1) -> None:
    """Count under the name that nemorl gives."""


def by_hand(args: Sequence[str], prog_name: str) -> None:
    """A function that parses its arguments."""
    parser = argparse.ArgumentParser(prog_name)
    parser.parse_args(args)
    sys.exit(0)


class HelpFails(typer.Typer):
    """Treats a question for help as a failure."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "--help" in kwargs["args"]:
            raise SystemExit(1)
        return super().__call__(*args, **kwargs)


help_fails = HelpFails()
help_fails.command()(_named)
