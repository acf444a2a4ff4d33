"""Values of environment variables that are secrets by their names: kept out of what is written.

This catches a key that a library puts into an error message, or that somebody gave on a command line. It knows the
values of this process's variables and nothing else, as they are and percent-encoded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from urllib.parse import quote

SECRET_NAME = re.compile(r"(^|_)(TOKEN|KEY|PASSWORD|PASSWD|SECRET|CREDENTIALS?)$", re.IGNORECASE)
SHORTEST = 8
"""Shorter values are found in any text by chance."""


def secret_values(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The secrets among environment variables (unset: this process's), by name."""
    found = os.environ if variables is None else variables
    return {name: value for name, value in found.items() if SECRET_NAME.search(name) and _can_be_secret(value)}


def _can_be_secret(value: str) -> bool:
    return len(value) >= SHORTEST and not value.startswith("/")  # the path of a key is none


def redacted(text: str) -> str:
    """A text in which the name of its variable stands for each secret.

    >>> redacted("no key here")
    'no key here'
    """
    for name, value in secret_values().items():
        for form in {value, quote(value, safe="")}:
            text = text.replace(form, f"<{name}>")
    return text


def redacted_bytes(text: bytes) -> bytes:
    """As :func:`redacted`, of encoded text."""
    for name, value in secret_values().items():
        text = text.replace(value.encode(errors="surrogateescape"), f"<{name}>".encode())
    return text
