"""Chat templates of a policy (``policy.tokenizer``): where the text comes from, and what it is given."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemorl.base.text.suggest import did_you_mean
from nemorl.config.models import PASSTHROUGH
from nemorl.config.models import TEMPLATE_SUFFIX as SUFFIX
from nemorl.errors import BackendError

PASSTHROUGH_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The contents of all messages, one after the other, and nothing else."""


def chat_template_text(setting: str) -> str:
    """The template that ``policy.tokenizer.chat_template`` names: itself, the content of a file, or ``passthrough``.

    Raises:
        BackendError: There is no such file, or the text is no template.
    """
    if setting == PASSTHROUGH:
        return PASSTHROUGH_TEMPLATE
    if setting.endswith(SUFFIX) and "{" not in setting:
        try:
            return Path(setting).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BackendError(
                f"policy.tokenizer.chat_template: {setting} cannot be read: {error}",
                fix="give the path of a template, or its text",
            ) from error
    if "{" not in setting:
        raise BackendError(
            f"policy.tokenizer.chat_template: {setting!r} is no template",
            fix=f"give Jinja text, the path of a {SUFFIX} file, or {PASSTHROUGH}; "
            "leave it out for the tokenizer's own template",
        )
    return setting


def require_used(template: str, kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments that a template never reads: Jinja would take them without a word.

    Raises:
        BackendError: Names the first such argument.
    """
    words = set(re.findall(r"[A-Za-z_]\w*", template))
    for name in kwargs:
        if name not in words:
            raise BackendError(
                f"policy.tokenizer.chat_template_kwargs: the chat template reads no {name!r}",
                fix=did_you_mean(name, words) or "remove it, or give a template that reads it",
            )


def with_defaults(template: str, kwargs: Mapping[str, Any]) -> str:
    """The template with arguments of its own: those in ``kwargs``, for whoever renders it without any."""
    lines = (
        f"{{%- if {name} is not defined %}}{{%- set {name} = {_literal(value)} %}}{{%- endif %}}"
        for name, value in kwargs.items()
    )
    return "".join(lines) + template


def _literal(value: Any) -> str:
    """A value of JSON as Jinja writes it."""
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return json.dumps(value)
