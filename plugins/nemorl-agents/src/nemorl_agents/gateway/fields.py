"""Which fields of a request's body are honoured, ignored or refused: one table per API, which the documentation shows.

A field that is not in the table is refused like one that cannot be served. In both a value that asks for nothing
passes: ``null``, what is empty, 0, and the values by which widespread servers turn an extension of theirs off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nemorl.base.text.suggest import SURE, closest, did_you_mean

from nemorl_agents.gateway.errors import bad_field, unsupported


@dataclass(frozen=True, slots=True)
class Field:
    """The treatment of one field."""

    treatment: Literal["honoured", "ignored", "refused"]
    note: str
    """Its effect here; for a refused one, what to do instead."""
    neutral: tuple[Any, ...] = ()
    """Values that ask for nothing. Those that are empty ask for nothing in any refused field."""

    def asks_for_nothing(self, value: Any) -> bool:
        return _is_among(value, self.neutral) or (self.treatment == "refused" and _is_among(value, EMPTY))


EMPTY: tuple[Any, ...] = (False, 0, "", [], {})
WORDS = ("auto", "none")
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "include_reasoning": (True,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "n": (1,),
    "num_beams": (1,),
    "parallel_tool_calls": (True,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "top_k": (-1,),
    "top_p": (1,),
    "truncation": ("disabled",),
    "typical_p": (1,),
}
"""Values of fields that an API does not have, by which other servers of it do nothing."""


def _is_among(value: Any, values: Sequence[Any]) -> bool:
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)


def unknown_asks_for_nothing(name: str, value: Any, fields: Mapping[str, Field]) -> bool:
    """A field that no table has changes nothing by this value. 0 and words do where the name is a slip of another's.

    Example:
        >>> table = {"temperature": honoured("yes")}
        >>> [unknown_asks_for_nothing(name, 0, table) for name in ("min_p", "temprature")]
        [True, False]
    """
    if _is_among(value, NEUTRAL.get(name, ())):
        return True
    if _is_among(value, (0, *WORDS)):
        return closest(name, fields, likeness=SURE) is None
    return _is_among(value, EMPTY)


def honoured(note: str, *neutral: Any) -> Field:
    return Field("honoured", note, neutral)


def ignored(note: str) -> Field:
    return Field("ignored", note)


def refused(note: str, *neutral: Any) -> Field:
    return Field("refused", note, neutral)


def checked(
    body: Mapping[str, Any],
    fields: Mapping[str, Field],
    left_out: Sequence[str] = (),
    note: Callable[[str], object] = lambda _: None,
) -> dict[str, Any]:
    """The fields of a body that are honoured, without those that ask for nothing.

    Args:
        body: As it came.
        fields: The table of its API.
        left_out: Names to be ignored, whatever they ask for.
        note: Told of each name that is ignored so.

    Raises:
        RequestError: A field is refused or unknown.
    """
    kept = {}
    for name, value in body.items():
        if value is None:
            continue
        if name in left_out:
            note(name)
            continue
        field = fields.get(name)
        if field is None:
            if unknown_asks_for_nothing(name, value, fields):
                continue
            way = (
                did_you_mean(name, fields, likeness=SURE)
                or "leave it out, or name it in environment.gateway.ignored_fields"
            )
            raise bad_field(name, "unknown field", fix=way, code="unknown_parameter")
        if field.asks_for_nothing(value):
            continue
        if field.treatment == "refused":
            raise unsupported(name, "cannot be served", fix=field.note)
        if field.treatment == "honoured":
            kept[name] = value
    return kept
