"""Secrets are kept out of what is written: those of environment variables, by their names, and those that show by form.

This catches a key that a library puts into an error message, or that somebody gave on a command line. It knows the
values of this process's variables, as they are, percent-encoded and escaped as JSON and Python do: of those whose names
say so, and of those that ``NEMORL_SECRETS`` names. And wherever they stand, passwords of URLs, tokens of HTTP headers
and private keys (:mod:`nemorl.base.text.secret_forms`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

from nemorl.base.text.secret_forms import SHORTEST, URL_PASSWORD, secrets_by_form

SECRET_NAME = re.compile(r"(^|_)(TOKEN|KEY|PASSWORD|PASSWD|PASSPHRASE|SECRET|CREDENTIALS?|APIKEY|PAT)$", re.IGNORECASE)
NAMED = "NEMORL_SECRETS"
"""Names of further variables that hold secrets, whatever they are called, with commas between."""


def secret_values(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The secrets among environment variables (unset: this process's), by name. Of a URL it is the password."""
    found = os.environ if variables is None else variables
    values = {name: value for name, value in found.items() if names_secret(name, found) and _can_be_secret(value)}
    for name, value in found.items():
        in_url = URL_PASSWORD.search(value)
        if in_url is not None and name not in values and len(password := unquote(in_url["value"])) >= SHORTEST:
            values[name] = password
    return values


def names_secret(name: str, variables: Mapping[str, str] | None = None) -> bool:
    """A variable holds a secret: its name says so, or ``NEMORL_SECRETS`` does (unset: of this process).

    >>> names_secret("HF_TOKEN"), names_secret("JUDGE", {}), names_secret("JUDGE", {"NEMORL_SECRETS": "JUDGE"})
    (True, False, True)
    """
    named = (os.environ if variables is None else variables).get(NAMED, "")
    return bool(SECRET_NAME.search(name)) or name in map(str.strip, named.split(","))


def _can_be_secret(value: str) -> bool:
    if len(value) < SHORTEST:
        return False
    return not (value.startswith("/") and os.path.lexists(value))  # the path of a key is none


class Redactor:
    """Takes secrets out of texts: those of the variables that were set when it was made."""

    def __init__(self) -> None:
        forms = [(form, f"<{name}>") for name, value in secret_values().items() for form in _forms(value)]
        self._forms = sorted(forms, key=lambda pair: len(pair[0]), reverse=True)

    def __call__(self, text: str) -> str:
        """A text in which the name of its variable stands for each secret."""
        for form, name in self._forms:
            text = text.replace(form, name)
        parts, end = [], 0
        for begin, stop, what in sorted(secrets_by_form(text)):
            if begin >= end:
                parts += [text[end:begin], f"<{what}>"]
            end = max(end, stop)
        return "".join([*parts, text[end:]]) if parts else text

    def data(self, value: Any) -> Any:
        """Data of JSON, with what its texts are without secrets; numbers stay what they are."""
        if isinstance(value, str):
            return self(value)
        if isinstance(value, list):
            return [self.data(item) for item in value]
        if isinstance(value, dict):
            return {self(key): self.data(item) for key, item in value.items()}
        return value


def redacted(text: str) -> str:
    """A text in which the name of its variable stands for each secret.

    >>> redacted("no key here, and none at https://me:hunter2@example.org")
    'no key here, and none at https://me:<password>@example.org'
    """
    return Redactor()(text)


def redacted_json(text: bytes) -> bytes:
    """As :func:`redacted`, of a JSON text."""
    redactor, decoded = Redactor(), text.decode()
    if redactor(decoded) == decoded:  # nearly always
        return text
    clean = json.dumps(redactor.data(json.loads(text)), ensure_ascii=False, separators=(",", ":"))
    return clean.encode(errors="backslashreplace")  # as the text was: halves of surrogate pairs are escapes of JSON


def _forms(value: str) -> Iterator[str]:
    """How a value stands in texts of programs."""
    quoted = [quote(value, safe=safe, errors="surrogateescape") for safe in ("", "/")]  # a value may be no UTF-8
    escaped = [json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1]]
    yield from {value, *quoted, *escaped}
