"""The published schemas of KubeRay's objects, read strictly: an unknown key is a mistake, as for ``kubectl apply``.

``schemas/kuberay.json`` says where it is from. Rules in CEL (``x-kubernetes-validations``) are no part of JSON schema:
``rules_that_apply`` finds those that an object comes under.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

FILE = Path(__file__).parent / "schemas" / "kuberay.json"


@cache
def schemas() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return {name: _strict(part) for name, part in found.items() if name != "$comment"}


def mistakes(manifest: dict[str, Any]) -> list[str]:
    """What an API server would refuse of a RayJob or RayCluster."""
    known = schemas()
    schema = {**known[manifest["kind"]], "$defs": known["$defs"]}
    validator = jsonschema.Draft202012Validator(schema)
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in validator.iter_errors(manifest)]


def rules_that_apply(manifest: dict[str, Any]) -> list[str]:
    """The CEL rules on the parts that a manifest has."""
    known = schemas()
    return list(_rules(manifest, known[manifest["kind"]], known["$defs"]))


def _rules(value: Any, schema: Any, shared: dict[str, Any]) -> Iterator[str]:
    schema = shared[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    yield from (rule["rule"] for rule in schema.get("x-kubernetes-validations", ()))
    if isinstance(value, dict):
        for key, below in value.items():
            inner = schema.get("properties", {}).get(key) or schema.get("additionalProperties")
            if isinstance(inner, dict):
                yield from _rules(below, inner, shared)
    elif isinstance(value, list):
        for below in value:
            yield from _rules(below, schema["items"], shared)


def _strict(schema: Any, *, is_properties: bool = False) -> Any:
    """Objects with known keys have no others, but for metadata, which is the API server's own."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        key: _strict(each, is_properties=key == "properties" and not is_properties) for key, each in schema.items()
    }
    closed = not is_properties and "properties" in found and "additionalProperties" not in found
    return {**found, "additionalProperties": False} if closed else found
