"""The config field type for a prompt sampler: ``thompson``, or ``{name: thompson, …options}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from nemorl.base.text.reading import shown
from nemorl.base.text.suggest import did_you_mean
from nemorl.config.base import PROBLEM
from nemorl.plugins.registry import registry
from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from nemorl_rl.curriculum.sampler import PromptSampler
from nemorl_rl.slots import PROMPT_SAMPLER


class _ByName:
    """Reads and writes a sampler by the key of its slot."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(
            _sampler_of, serialization=core_schema.plain_serializer_function_ser_schema(_spelled)
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        names = sampler_names()
        named = {"type": "object", "properties": {"name": {"enum": names}}, "required": ["name"]}
        text = "Name of a prompt sampler, or a mapping with `name` and its options."
        return {"description": text, "anyOf": [{"type": "string", "enum": names}, named]}


AnySampler = Annotated[PromptSampler, _ByName()]
"""One of the installed prompt samplers."""


def sampler_names() -> list[str]:
    """The installed ones."""
    return sorted(registry().index.keys_of(PROMPT_SAMPLER.name))


def _sampler_of(value: Any, info: core_schema.ValidationInfo) -> PromptSampler:
    if isinstance(value, PromptSampler):
        _name_of(value)  # raises where it could not be found again
        return value
    options = {"name": value} if isinstance(value, str) else value
    name = options.get("name") if isinstance(options, Mapping) else None
    known = sampler_names()
    sampler = PROMPT_SAMPLER.of(name).filled() if isinstance(name, str) and name in known else None
    if sampler is None:
        message = f"no prompt sampler {shown(value if name is None else name)} is installed ({', '.join(known)})"
        fix = did_you_mean(str(name), known) or f"write one of {', '.join(known)}, or {{name: thompson, target: 0.4}}"
        raise PydanticCustomError(PROBLEM, "{message}", {"message": message, "fix": fix})
    return sampler.model_validate(
        {key: option for key, option in options.items() if key != "name"}, context=info.context
    )


def _spelled(sampler: PromptSampler) -> dict[str, Any]:
    return {"name": _name_of(sampler), **sampler.model_dump(mode="json")}


def _name_of(sampler: PromptSampler) -> str:
    for name in sampler_names():
        if PROMPT_SAMPLER.of(name).filled() is type(sampler):
            return name
    message = f"{type(sampler).__name__} fills no slot: a continued run could not find it again"
    fix = 'add an entry point "prompt_sampler.NAME" in the group nemorl.slots of an installed package'
    raise PydanticCustomError(PROBLEM, "{message}", {"message": message, "fix": fix})
