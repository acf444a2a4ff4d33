"""Before a run writes its config down: a secret in it would stand in the run's folder and in its report."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from nemorl.base.text.secret_forms import SECRET_OPTION, SHORTEST, is_harmless, is_placeholder, secrets_by_form
from nemorl.base.text.secrets import NAMED, SECRET_NAME, names_secret, redacted, secret_values
from nemorl.config.run import RunConfig
from nemorl.errors import ConfigIssue

VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
SECRET_KEY = re.compile(rf"(^|[._-])({SECRET_OPTION}|token|auth|authorization|cookie|bearer)$", re.IGNORECASE)
"""Keys of a config whose texts are secrets."""
NAME_OF_ONE = re.compile(r"[a-z0-9]{1,16}([-._/][a-z0-9]{1,16})+|[a-z]+")
"""Under such a key this is the name of a secret, e.g. of one that Kubernetes keeps: ``nemorl-ca``."""
ELSEWHERE = ("/", "$", "<")
"""How the value of a variable begins that is the path of a file, or the name of another variable."""
GUESSING = {
    "Base64 High Entropy String", "Hex High Entropy String", "Public IP (ipv4)", "Secret Keyword",
    "Basic Auth Credentials",
}  # fmt: skip
"""Rules of detect-secrets that see secrets in digests and sentences."""
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
    for named in config.named_values():
        if named.kind == "secret" and named.value in os.environ and not names_secret(named.value):
            warn(
                f"{named.path} takes a key from {named.value}, whose name does not say so: where a library prints that "
                f"key, it is written down. export {NAMED}={named.value} keeps it out"
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
    for _, _, what in secrets_by_form(text):
        return f"a {what}"
    if (is_secret_under(path, text) or _sets_secret(path, text)) and not os.path.exists(text):
        return "what its name says to be a secret"
    if (rule := _ruled(text)) is not None:
        return f"what looks like: {rule}"
    return None


def is_secret_under(key: str, text: str) -> bool:
    """The text under a key of a config is a secret, by the key's name.

    >>> is_secret_under("wandb.api_key", "hunter2hunter"), is_secret_under("tls_secret", "nemorl-ca")
    (True, False)
    """
    if not SECRET_KEY.search(key) or len(text) < SHORTEST:
        return False
    names_one = key.lower().endswith("secret") and NAME_OF_ONE.fullmatch(text)
    return not is_placeholder(text) and not names_one and not is_harmless(key, text)


def _ruled(text: str) -> str | None:
    """The rule of detect-secrets that a text fits."""
    rule: Any
    for rule in _rules():
        if any(not is_placeholder(found) for found in rule.analyze_string(text)):
            return str(rule.secret_type)
    return None


@cache
def _rules() -> tuple[Any, ...]:
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class

    rules: dict[str, Any] = get_mapping_from_secret_type_to_class()
    return tuple(rule() for kind, rule in rules.items() if kind not in GUESSING)


def _sets_secret(path: str, text: str) -> bool:
    """A key of a config is an environment variable whose name says that it holds a secret."""
    name = path.rpartition(".")[2]
    is_named = bool(VARIABLE.fullmatch(name) and SECRET_NAME.search(name)) and not text.startswith(ELSEWHERE)
    return is_named and len(text) >= SHORTEST and not is_placeholder(text)


def _texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _texts(item, f"{path}.{number}")
