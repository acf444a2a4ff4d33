"""Before a run writes its config down: a secret in it would stand in the run's folder and in its report."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nemorl.config.run import RunConfig
from nemorl.errors import ConfigIssue
from nemorl_base.secrets import NAMED, PRIVATE_KEY, SECRET_NAME, URL_PASSWORD, names_secret, redacted, secret_values

SECRET_KEY = re.compile(
    r"(^|[._-])(password|passwd|passphrase|api[_-]?key|access[_-]?token|auth[_-]?token|authorization|private[_-]?key"
    r"|secret[_-]?key|client[_-]?secret|secret[_-]?access[_-]?key)$",
    re.IGNORECASE,
)
"""Keys of a config whose texts are secrets, however they look."""
VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
ASSIGNED = re.compile(r"""(?<![\w$])([A-Z][A-Z0-9_]*)=["']?(?![/$<`*])[^\s"'$;|&,]{8,}""")
"""An environment variable is given a value within a text: ``export NAME=value``, ``--export=NAME=value``."""
ISSUED = re.compile(
    r"\b(hf_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,}"
    r"|glpat-[A-Za-z0-9_-]{20,}|xox[abeprs]-[A-Za-z0-9-]{10,}|(AKIA|ASIA)[A-Z0-9]{16}|AIza[A-Za-z0-9_-]{35}"
    r"|nvapi-[A-Za-z0-9_-]{30,})"
)
"""Keys as Hugging Face, OpenAI, Anthropic, GitHub, GitLab, Slack, AWS, Google and NVIDIA begin them."""
ELSEWHERE = ("/", "$", "<")
"""How the value of a variable begins that is the path of a file, or the name of another variable."""
PLACEHOLDER = 8
"""Shorter texts under such keys are none: ``EMPTY`` is what servers without a key are told."""
FIX = (
    "leave it out, and put it into an environment variable: that is passed on by itself, or named by an option (…_env)"
)


def secret_problems(
    config: RunConfig, run_dir: Path, warn: Callable[[str], None] = lambda _: None
) -> Iterator[ConfigIssue]:
    """A problem for each place of a config that holds a secret: a variable's, or one that shows by name or form.

    Args:
        config: The run.
        run_dir: Where it would write.
        warn: Told which variables hold keys of the run, and are not known for it.
    """
    data = config.model_dump(mode="json")
    for place, name in _texts(data):
        if place.endswith("_env") and name in os.environ and not names_secret(name):
            warn(
                f"{place} takes a key from {name}, whose name does not say so: where a library prints that key, it is "
                f"written down. export {NAMED}={name} keeps it out"
            )
    yield from secrets_in(data, "", "the run's config.yaml and report.html")


def secrets_in(data: Any, path: str, written: str = "files") -> Iterator[ConfigIssue]:
    """A problem for each place of plain data that holds a secret.

    Args:
        data: Of a config.
        path: Of the data in the config.
        written: Where it would stand, for messages.
    """
    values = secret_values()
    for place, text in _texts(data, path):
        if (what := _secret_in(place, text, values)) is not None:
            yield ConfigIssue(redacted(place), f"holds {what}, which would stand in {written}", FIX)


def _secret_in(path: str, text: str, values: Mapping[str, str]) -> str | None:
    """Which secret a text of a config holds, in words that do not repeat it."""
    for name, value in values.items():
        if value in text or value in path:
            return f"the value of {name}"
    if (found := URL_PASSWORD.search(text)) is not None and not found["password"].startswith(("<", "$")):
        return "the password of a URL"
    if PRIVATE_KEY.search(text):
        return "a private key"
    if ISSUED.search(text):
        return "a key of some service"
    if (SECRET_KEY.search(path) or _sets_secret(path, text)) and len(text) >= PLACEHOLDER and not Path(text).exists():
        return "what its name says to be a secret"
    for assigned in ASSIGNED.finditer(text):
        if SECRET_NAME.search(assigned[1]):
            return f"a value for {assigned[1]}"
    return None


def _sets_secret(path: str, text: str) -> bool:
    """A key of a config is an environment variable whose name says that it holds a secret."""
    name = path.rpartition(".")[2]
    return bool(VARIABLE.fullmatch(name) and SECRET_NAME.search(name)) and not text.startswith(ELSEWHERE)


def _texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _texts(item, f"{path}.{number}")
