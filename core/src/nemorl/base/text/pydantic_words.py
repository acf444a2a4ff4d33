"""pydantic's errors, types and schemas as a reader of YAML wants them."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from nemorl.base.text.reading import shown
from nemorl.base.text.suggest import did_you_mean

_BOUNDS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "dict": "a mapping",
    "model": "a mapping",
    "tuple": "a list",
    "list": "a list",
    "path": "a path",
}


def in_words(error: Mapping[str, Any], key: str) -> tuple[str, str | None]:
    """Message and fix for one of pydantic's error items.

    Args:
        error: One of ``ValidationError.errors()``.
        key: The last part of its path.

    >>> in_words({"type": "greater_than", "input": 0, "ctx": {"gt": 0}}, "lr")
    ('0 is out of range', 'give a value greater than 0')
    """
    kind, value, context = error["type"], error.get("input"), error.get("ctx", {})
    if kind == "missing":
        return "is required", "add another value" if key.isdigit() else f"add `{key}:`"
    if kind == "literal_error":
        return f"{shown(value)} is not one of {context['expected']}", _closest(value, context["expected"])
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        return f"{shown(value)} is out of range", f"give a value {words} {context[bound]}"
    if kind == "string_pattern_mismatch":
        return f"{shown(value)} has another form", f"give text that matches {context['pattern']}"
    if kind in ("string_too_short", "string_too_long"):
        bound = f"at least {context['min_length']}" if "min_length" in context else f"at most {context['max_length']}"
        return f"{shown(value)} has {len(str(value)):,} characters", f"give {bound}"
    if kind == "too_short":
        return f"has {context['actual_length']} values", f"give at least {context['min_length']}"
    expected = _TYPES.get(kind.split("_")[0])
    if expected is not None:
        return f"expected {expected}, got {shown(value)}", f"give {expected}"
    if kind == "frozen_instance":
        return "configs are frozen", "make a changed copy with model_copy(update=…)"
    return str(error["msg"]), None


def _closest(value: Any, expected: str) -> str:
    choices = [choice.strip(" '") for choice in expected.replace(" or ", ",").split(",")]
    return did_you_mean(str(value), choices) or f"use one of {', '.join(choices)}"


def shown_type(annotation: Any) -> str:
    """A field's type for a reader: ``int``, ``str | None``, the choices themselves."""
    if get_origin(annotation) is Literal:
        return " | ".join(map(repr, get_args(annotation)))
    if get_origin(annotation) in (Union, UnionType):
        return " | ".join(map(shown_type, get_args(annotation)))
    if annotation is NoneType:
        return "None"
    return str(getattr(annotation, "__name__", annotation)).replace("typing.", "")


def shown_default(field: FieldInfo) -> Any:
    """A field's default as plain data."""
    if field.is_required():
        return None
    if field.default_factory_takes_validated_data:
        return "set by other options"
    return to_jsonable_python(field.get_default(call_default_factory=True), fallback=repr)


def inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """The schema with its references written out: they point to the top of a document, which it will not be."""
    if isinstance(schema, Mapping):
        if isinstance(schema.get("$ref"), str):
            name = schema["$ref"].removeprefix("#/$defs/")
            beside = {key: value for key, value in schema.items() if key != "$ref"}
            return {**inlined(definitions[name], definitions), **beside}
        return {key: inlined(value, definitions) for key, value in schema.items()}
    if isinstance(schema, list):
        return [inlined(item, definitions) for item in schema]
    return schema
