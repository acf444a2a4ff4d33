"""Which fields of a request's body are honoured, ignored or refused: one table per API, which the documentation shows.

A field that is not in the table is refused like one that cannot be served. ``null`` is the same as nothing everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nemorl.base.text.suggest import did_you_mean

from nemorl_agents.gateway.errors import bad_field, unsupported


@dataclass(frozen=True, slots=True)
class Field:
    """The treatment of one field."""

    treatment: Literal["honoured", "ignored", "refused"]
    note: str
    """Its effect here; for a refused one, what to do instead."""
    neutral: tuple[Any, ...] = ()
    """Of a refused one: values that ask for nothing, and pass."""

    def lets_pass(self, value: Any) -> bool:
        is_neutral = any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.neutral)
        return self.treatment != "refused" or is_neutral


def honoured(note: str) -> Field:
    return Field("honoured", note)


def ignored(note: str) -> Field:
    return Field("ignored", note)


def refused(note: str, *neutral: Any) -> Field:
    return Field("refused", note, neutral)


def checked(body: Mapping[str, Any], fields: Mapping[str, Field], left_out: Sequence[str]) -> dict[str, Any]:
    """The fields of a body that are honoured, without those that are ``null``.

    Args:
        body: As it came.
        fields: The table of its API.
        left_out: Names to be ignored, whatever they ask for.

    Raises:
        RequestError: A field is refused or unknown.
    """
    kept = {}
    for name, value in body.items():
        if value is None or name in left_out:
            continue
        field = fields.get(name)
        if field is None:
            way = did_you_mean(name, fields) or "leave it out, or name it in the gateway's ignored_fields"
            raise bad_field(name, "unknown field", fix=way, code="unknown_parameter")
        if not field.lets_pass(value):
            raise unsupported(name, "cannot be served", fix=field.note)
        if field.treatment == "honoured":
            kept[name] = value
    return kept
