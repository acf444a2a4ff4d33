"""Before a run writes its config down: a secret in it would stand in the run's folder and in its report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nemorl.config.run import RunConfig
from nemorl.errors import ConfigIssue
from nemorl_base.secrets import secret_values


def secret_problems(config: RunConfig, run_dir: Path, warn: Callable[[str], None]) -> Iterator[ConfigIssue]:
    """A problem for each place of a config that holds the value of a variable that is a secret by its name.

    Args:
        config: The run.
        run_dir: Where it would write.
        warn: Told of nothing.
    """
    secrets = secret_values()
    for path, text in _texts(config.model_dump(mode="json")) if secrets else ():
        for name, value in secrets.items():
            if value in text:
                what = f"holds the value of {name}, which would stand in the run's config.yaml and report.html"
                yield ConfigIssue(
                    path, what, "leave it out: the variable is passed on by itself, or name it by an option"
                )


def _texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _texts(item, f"{path}.{number}")
