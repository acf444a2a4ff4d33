"""Definitions of tools, and which of them are to be called: checked here, since templates would write anything."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nemorl_rl.agents.contract import ToolChoice

from nemorl_agents.gateway.body import kind, list_at, object_at, shown, text_at
from nemorl_agents.gateway.errors import bad_field, unsupported

NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
LISTS_OF_SCHEMAS = ("anyOf", "allOf", "oneOf", "prefixItems")
SCHEMAS = ("items", "additionalProperties", "not")

Tool = Mapping[str, Any]


def function_tool(definition: Mapping[str, Any], place: str, *, schema: str) -> Tool:
    """A tool as chat completions write it.

    Args:
        definition: ``name``, ``description`` and a JSON schema of its arguments.
        place: Where it is in the body.
        schema: The name that this API has for the JSON schema.
    """
    name = text_at(definition.get("name"), f"{place}.name")
    if not NAME.fullmatch(name):
        raise bad_field(f"{place}.name", f"{shown(name)} is no name", fix="use letters, digits, '_', '-' and '.'")
    function: dict[str, Any] = {"name": name}
    if definition.get("description") is not None:
        function["description"] = text_at(definition["description"], f"{place}.description")
    if definition.get(schema) is not None:
        check_schema(definition[schema], f"{place}.{schema}")
        function["parameters"] = definition[schema]
    return {"type": "function", "function": function}


def require_distinct(tools: Sequence[Tool], place: str) -> tuple[Tool, ...]:
    """The tools, no two of which have one name."""
    counts = Counter[str](tool["function"]["name"] for tool in tools)
    twice = next((name for name, count in counts.items() if count > 1), None)
    if twice is not None:
        raise bad_field(place, f"two tools are called {twice!r}", fix="give each a name of its own")
    return tuple(tools)


def check_schema(value: Any, place: str) -> None:
    """Refuse what is no JSON schema of arguments: an object whose parts are schemas themselves."""
    root = object_at(value, place)
    if root.get("type", "object") != "object":
        raise bad_field(f"{place}.type", f"is {shown(root['type'])}", fix="arguments are an object: use 'object'")
    waiting: list[tuple[Any, str]] = [(root, place)]
    while waiting:
        schema, where = waiting.pop()
        if isinstance(schema, bool):
            continue
        waiting += _parts(object_at(schema, where), where)


def _parts(schema: Mapping[str, Any], place: str) -> list[tuple[Any, str]]:
    """The schemas within a schema, whose own words are checked."""
    types = schema.get("type", [])
    unknown = [one for one in (types if isinstance(types, list) else [types]) if one not in TYPES]
    if unknown:
        raise bad_field(f"{place}.type", f"{shown(unknown[0])} is no type", fix=f"types are {', '.join(TYPES)}")
    if "required" in schema:
        for number, name in enumerate(list_at(schema["required"], f"{place}.required")):
            text_at(name, f"{place}.required[{number}]")
    if "enum" in schema:
        list_at(schema["enum"], f"{place}.enum")
    found = [(schema[name], f"{place}.{name}") for name in SCHEMAS if name in schema]
    for group in SCHEMAS_BY_NAME:
        named = object_at(schema.get(group, {}), f"{place}.{group}")
        found += [(one, f"{place}.{group}.{name}") for name, one in named.items()]
    for group in LISTS_OF_SCHEMAS:
        listed = list_at(schema.get(group, []), f"{place}.{group}")
        found += [(one, f"{place}.{group}[{number}]") for number, one in enumerate(listed)]
    return found


def choice_of(word: str, tools: Sequence[Tool], place: str) -> ToolChoice:
    """``auto``, ``none`` or ``required``, as all APIs have them under some name."""
    if word not in ("auto", "none", "required"):
        raise bad_field(place, f"{shown(word)} is no choice", fix="use 'auto', 'none', 'required', or name a tool")
    if word == "required" and not tools:
        raise bad_field(place, "a tool is required and there are no tools", fix="send tools, or leave it out")
    return word


def named_choice(name: Any, tools: Sequence[Tool], place: str) -> ToolChoice:
    """The one tool that is to be called."""
    known = [tool["function"]["name"] for tool in tools]
    if name not in known:
        raise bad_field(place, f"there is no tool {shown(name)}", fix=f"tools are {', '.join(known) or 'none'}")
    return str(name)


def only_functions(tool: Mapping[str, Any], place: str) -> None:
    """Refuse tools that the API's owner would run."""
    if tool.get("type") != "function":
        what = shown(tool.get("type")) if isinstance(tool.get("type"), str) else kind(tool.get("type"))
        raise unsupported(f"{place}.type", f"{what} is not served", fix="the agent runs its tools: use 'function'")


Found = tuple[Mapping[str, Any], str]
"""A function's definition, and its place in the body"""


def within_function(tool: Mapping[str, Any], place: str) -> Found:
    """Where chat completions have it."""
    return object_at(tool.get("function"), f"{place}.function"), f"{place}.function"


def in_itself(tool: Mapping[str, Any], place: str) -> Found:
    """Where responses have it."""
    return tool, place


def tools_of(value: Any, find: Callable[[Mapping[str, Any], str], Found]) -> tuple[Tool, ...]:
    """The field ``tools``."""
    found = []
    for i, one in enumerate(list_at(value, "tools")):
        tool = object_at(one, f"tools[{i}]")
        only_functions(tool, f"tools[{i}]")
        found.append(function_tool(*find(tool, f"tools[{i}]"), schema="parameters"))
    return require_distinct(found, "tools")


def tool_choice_of(value: Any, tools: Sequence[Tool], find: Callable[[Mapping[str, Any], str], Found]) -> ToolChoice:
    """The field ``tool_choice``: a word, or a function's name."""
    if isinstance(value, str):
        return choice_of(value, tools, "tool_choice")
    choice = object_at(value, "tool_choice")
    only_functions(choice, "tool_choice")
    function, place = find(choice, "tool_choice")
    return named_choice(function.get("name"), tools, f"{place}.name")
