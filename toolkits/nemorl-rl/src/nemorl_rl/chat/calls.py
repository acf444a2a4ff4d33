"""Tool calls as models write them, read from text: the body of one block, whatever encloses it.

JSON (``{"name": …, "arguments": …}``, also under ``parameters``, in lists and several in a row), the tags of
Qwen3-Coder and of GLM, a name before JSON (Mistral, DeepSeek), and Python's call syntax (LFM2).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from nemorl_rl.chat.codec import ToolCall, Tools

NAME = re.compile(r"[\w.:/-]{1,128}")
_DECODER = json.JSONDecoder()
_FUNCTION = re.compile(r"<function=([^<>\n]+)>(.*?)(?:</function>|$)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|$)", re.DOTALL)
_NAMED = re.compile(
    r"(?:function\s*<｜tool▁sep｜>)?\s*([\w.:/-]+)\s*(?:\[CALL_ID\]\w+)?(?:\[ARGS\]|<｜tool▁sep｜>|```json)?\s*"
)


def calls_in(body: str, tools: Tools) -> list[ToolCall]:
    """The calls of one block.

    Args:
        body: Without what encloses it.
        tools: Their schemas tell how values that are written without quotes are meant.

    Raises:
        ValueError: It is no call.

    Example:
        >>> calls_in('{"name": "add", "arguments": {"a": 1,  "b": 2}}', [])
        [ToolCall(name='add', arguments='{"a": 1,  "b": 2}')]
    """
    try:
        calls = _read(body.strip(), tools)
        for call in calls:
            require_json(call.arguments)
    except (RecursionError, SyntaxError, MemoryError, TypeError) as error:
        # What a model writes may be nested without end, or hold what only Python has: sets, bytes, complex numbers.
        raise ValueError(f"cannot be read: {error}") from None
    for call in calls:
        if not NAME.fullmatch(call.name):
            raise ValueError(f"{call.name!r} is no name")
    if not calls:
        raise ValueError("no call")
    return calls


def require_json(arguments: str) -> None:
    """Refuse what clients of another language could not read, or no answer could hold: Python's parser takes more.

    Args:
        arguments: As a model wrote them.

    Raises:
        ValueError: They hold NaN, an infinite number or half of a surrogate pair, or are no JSON.

    Example:
        >>> require_json('{"a": 1e9}')
    """
    json.dumps(json.loads(arguments), allow_nan=False, ensure_ascii=False).encode()


def _read(body: str, tools: Tools) -> list[ToolCall]:
    if body.startswith("{"):
        return _objects(body)
    if body.startswith("["):
        return _list(body)
    if body.startswith("<function="):
        return [
            ToolCall(name.strip(), _from_text(name.strip(), _PARAMETER.findall(inner), tools))
            for name, inner in _FUNCTION.findall(body)
        ]
    if "<arg_key>" in body or body in map(_name_of, tools):  # GLM, which writes nothing after the name of such a call
        name, *pairs = body.split("<arg_key>")
        return [ToolCall(name.strip(), _from_text(name.strip(), map(_pair, pairs), tools))]
    return _named(body)


def _objects(text: str) -> list[ToolCall]:
    """JSON objects, one after another."""
    found, at = [], 0
    while at < len(text):
        members, at = _members(text, at)
        found.append(_from_members(members))
        at = _after(text, at, ";,")
    return found


def _list(text: str) -> list[ToolCall]:
    """A JSON list of objects, or a list of Python calls."""
    if not re.match(r"\[\s*\{", text):
        return _python_calls(text)
    found, at = [], _after(text, 1)
    while text[at : at + 1] == "{":
        members, at = _members(text, at)
        found.append(_from_members(members))
        at = _after(text, at, ",")
    if text[at:] != "]":
        raise ValueError("the list does not end")
    return found


def _members(text: str, at: int) -> tuple[dict[str, str], int]:
    """The members of a JSON object as they are written, and where it ends."""
    _, end = _DECODER.raw_decode(text, at)
    if text[at] != "{":
        raise ValueError("no object")
    found: dict[str, str] = {}
    at = _after(text, at + 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        begin = _after(text, at, ":")
        _, at = _DECODER.raw_decode(text, begin)
        found[str(key)] = text[begin:at]
        at = _after(text, at, ",")
    return found, end


def _from_members(members: Mapping[str, str]) -> ToolCall:
    if "function" in members and "name" not in members:
        members = {**members, **_members(members["function"], 0)[0]}
    name = json.loads(members.get("name", "null"))
    if not isinstance(name, str):
        raise ValueError("no name")
    arguments = members.get("arguments", members.get("parameters", "{}"))
    value = json.loads(arguments)
    if isinstance(value, str):  # an object as text, as the API has it
        arguments, value = value, json.loads(value)
    if value is None:
        arguments, value = "{}", {}
    if not isinstance(value, dict):
        raise ValueError("the arguments are no object")
    return ToolCall(name, arguments)


def _named(body: str) -> list[ToolCall]:
    """Names, each before its arguments."""
    found, at = [], 0
    while at < len(body):
        match = _NAMED.match(body, at)
        if match is None:
            raise ValueError("no name")
        value, end = _DECODER.raw_decode(body, match.end())
        if not isinstance(value, dict):
            raise ValueError("the arguments are no object")
        found.append(ToolCall(match[1], body[match.end() : end]))
        at = _after(body, end, "`")
    return found


def _python_calls(text: str) -> list[ToolCall]:
    """``[add(a=1, b="x")]``"""
    tree = ast.parse(text, mode="eval").body
    found = []
    for call in tree.elts if isinstance(tree, ast.List) else [tree]:
        if not isinstance(call, ast.Call) or call.args or any(one.arg is None for one in call.keywords):
            raise ValueError("no call with named arguments")
        arguments = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
        found.append(ToolCall(ast.unparse(call.func), json.dumps(arguments, ensure_ascii=False)))
    return found


def _pair(text: str) -> tuple[str, str]:
    """``key</arg_key><arg_value>value</arg_value>``"""
    key, _, rest = text.partition("</arg_key>")
    value, mark, after = rest.strip().removeprefix("<arg_value>").partition("</arg_value>")
    if not mark or after.strip():
        raise ValueError("an argument does not end")
    return key, value


def _from_text(name: str, pairs: Iterable[tuple[str, str]], tools: Tools) -> str:
    """Arguments that are written without quotes: text where the schema says so, else JSON where they are that."""
    schema = _properties(name, tools)
    found: dict[str, Any] = {}
    for written, raw in pairs:
        key, value = written.strip(), raw.removeprefix("\n").removesuffix("\n")
        declared = schema.get(key)
        found[key] = value
        if not (isinstance(declared, Mapping) and declared.get("type") == "string"):
            with suppress(ValueError):  # text that no schema declares
                found[key] = json.loads(value)
    return json.dumps(found, ensure_ascii=False)


def _properties(name: str, tools: Tools) -> Mapping[str, Any]:
    schemas = [tool["function"].get("parameters") for tool in tools if _name_of(tool) == name]
    properties = schemas[0].get("properties") if schemas and isinstance(schemas[0], Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _name_of(tool: Mapping[str, Any]) -> str | None:
    function = tool.get("function")
    return function.get("name") if isinstance(function, Mapping) else None


def _after(text: str, at: int, marks: str = "") -> int:
    """Where the next thing begins, beyond space and these characters."""
    while at < len(text) and (text[at].isspace() or text[at] in marks):
        at += 1
    return at
