"""A config field that holds one of several classes, told apart by the ``name`` in what is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

Kinds = tuple[type[BaseModel], ...]


class Variants:
    """Marks such a field; each class has a ``name`` with its own word as default. The first is meant without one.

    >>> class Training(Config):
    ...     optimizer: Annotated[OptimizerConfig | MuonConfig, Variants(OptimizerConfig, MuonConfig)]
    """

    def __init__(self, *kinds: type[BaseModel]) -> None:
        self.kinds: Kinds = kinds

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_before_validator_function(self._choose, handler(source))

    def _choose(self, value: Any, info: core_schema.ValidationInfo) -> Any:
        """What is written, as the class that it names: a union would report the mistakes of all classes."""
        if isinstance(value, BaseModel):
            kind = variant(self.kinds, dict(value))
            return value if isinstance(value, kind) else kind.model_validate(value.model_dump(exclude_unset=True))
        if isinstance(value, str):
            value = {"name": value}
        return variant(self.kinds, value).model_validate(value, context=info.context)


def variant(kinds: Kinds, value: Any) -> type[BaseModel]:
    """The class that a mapping names; the first one where it names none."""
    named = value.get("name") if isinstance(value, Mapping) else None
    return next((kind for kind in kinds if "name" in kind.model_fields and names(kind) == named), kinds[0])


def names(kind: type[BaseModel]) -> Any:
    """The ``name`` of a class of variants."""
    return kind.model_fields["name"].default
