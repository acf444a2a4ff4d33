"""Field docstrings of a config class: the text below each field.

Read from the source when somebody asks, for a schema, a page or ``nemorl plugins show``. Read as each class is made,
they take a quarter of the time that importing an algorithm's config takes, in each process of a run.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

from pydantic import BaseModel


def field_texts(config_class: type[BaseModel]) -> dict[str, str]:
    """The description of each field that has one.

    That of ``Field(description=…)``, else the docstring below the field, else that of the nearest class above with one.
    Docstrings of a class whose source is not at hand (made in an interpreter's prompt, say) are not known.

    >>> from pydantic import Field, create_model
    >>> field_texts(create_model("Sampler", temperature=(float, Field(1.0, description="Divides the logits."))))
    {'temperature': 'Divides the logits.'}
    """
    texts: dict[str, str] = {}
    for owner in reversed(config_class.__mro__):
        texts.update(_docstrings(owner))
    given = {name: info.description for name, info in config_class.model_fields.items()}
    return {name: found for name, said in given.items() if (found := said or texts.get(name, ""))}


def _docstrings(owner: type) -> dict[str, str]:
    """The docstrings below the fields that a class has of its own."""
    if owner is BaseModel or not issubclass(owner, BaseModel):
        return {}
    try:
        source = inspect.getsource(sys.modules[owner.__module__])
        return _docstrings_in(source).get(owner.__qualname__, {})
    except (KeyError, OSError, TypeError, SyntaxError):  # no file, or one that is being edited
        return {}


@cache
def _docstrings_in(source: str) -> dict[str, dict[str, str]]:
    """The docstrings below fields, by the qualified name of their class."""
    return {path: dict(_below_fields(found)) for path, found in _classes(ast.parse(source), "")}


def _classes(node: ast.AST, path: str) -> Iterator[tuple[str, ast.ClassDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield path + child.name, child
            yield from _classes(child, f"{path}{child.name}.")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _classes(child, f"{path}{child.name}.<locals>.")
        else:
            yield from _classes(child, path)


def _below_fields(found: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, below in pairwise(found.body):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            yield field.target.id, inspect.cleandoc(below.value.value)


def for_editors(schema: dict[str, Any], config_class: type[BaseModel]) -> None:
    """Put the descriptions of fields into a class's JSON schema; of its docstring leave what comes before an example.

    An example in a docstring is for Python; a schema is shown by editors of YAML.
    """
    if "description" in schema:
        schema["description"] = re.split(r"\s+(?:Example:|>>>)", schema["description"])[0]
    for name, text in field_texts(config_class).items():
        if (shown := schema["properties"].get(config_class.model_fields[name].alias or name)) is not None:
            shown["description"] = text
