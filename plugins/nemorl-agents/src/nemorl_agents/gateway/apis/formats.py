"""Formats of an answer: JSON, or JSON of a schema, as each API asks for it, to the schema that sampling is held to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nemorl_rl.agents.contract import ToolChoice

from nemorl_agents.gateway.apis.tools import Tool, check_schema
from nemorl_agents.gateway.body import object_at, shown
from nemorl_agents.gateway.errors import bad_field, unsupported

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def schema_of(value: Any, place: str, *, inner: str | None = None) -> str | None:
    """The schema that a format stands for, as JSON; ``None`` where any text will do.

    Args:
        value: ``{"type": "text" | "json_object" | "json_schema", ...}``.
        place: Where it is in the body.
        inner: The field that holds ``schema``. Unset: the format itself does.

    Raises:
        RequestError: It is no format, or no schema.
    """
    if not value:
        return None
    form = object_at(value, place)
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return json.dumps(ANY_OBJECT)
    if kind != "json_schema":
        raise unsupported(
            f"{place}.type", f"{shown(kind)} cannot be served", fix="use text, json_object or json_schema"
        )
    where = place if inner is None else f"{place}.{inner}"
    holder = form if inner is None else object_at(form.get(inner), where)
    if holder.get("schema") is None:
        raise bad_field(f"{where}.schema", "is missing", fix="give a JSON schema", code="missing")
    check_schema(holder["schema"], f"{where}.schema")
    return json.dumps(holder["schema"])


def require_no_calls(schema: str | None, tools: tuple[Tool, ...], choice: ToolChoice, place: str) -> None:
    """Refuse a format for an answer that might call tools: within it no call could be written.

    Raises:
        RequestError: There are tools.
    """
    if schema is not None and tools and choice != "none":
        fix = "leave out the tools of this call, set tool_choice to none, or leave out the format"
        raise unsupported(place, "cannot be served together with tools", fix=fix)
