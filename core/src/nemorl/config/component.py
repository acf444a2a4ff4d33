"""The config field type for "one plugin of a kind": ``backend: dtensor`` or ``backend: {name: dtensor, …options}``.

The value becomes an instance of the plugin's own config class, validated by it, found through the registry. It
dumps as ``{name: …, …options}``, so a resolved config loads again to the same thing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, PydanticUserError, ValidationError
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from nemorl.base.text.pydantic_words import inlined
from nemorl.base.text.reading import shown
from nemorl.config.base import ELSEWHERE, PLUGINS, PROBLEM, Config
from nemorl.errors import ConfigIssue, NemorlError, boundary
from nemorl.plugins import Registry, registry
from nemorl.plugins.index import a_kind, singular
from nemorl.plugins.slots import OTHER_SPELLINGS

if TYPE_CHECKING:
    from nemorl.plugins.kinds import PluginConfig


@dataclass(frozen=True)
class Component:
    """``Annotated[TrainingBackendConfig, Component("training_backends")]``."""

    kind: str
    default: str | None = None
    """The plugin that a mapping without ``name`` means, so that one option of the default plugin is one line."""
    built_here: bool = True
    """Whether this process builds the component, so that its modules must be installed here."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(
            self._resolve, serialization=core_schema.plain_serializer_function_ser_schema(self.dump)
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        names, options = [], []
        for entry in registry().index.of_kind(self.kind):
            try:
                loaded = registry().load(self.kind, entry.name)
            except NemorlError:
                continue  # a broken plugin must not take the editor's schema down; `plugins list` names it
            names.append(entry.name)
            shape = loaded.model_json_schema()
            shape = inlined(shape, shape.pop("$defs", {}))
            shape["properties"] = {"name": {"const": entry.name}, **shape.get("properties", {})}
            if entry.name != self.default:
                shape["required"] = ["name", *shape.get("required", [])]
            options.append(shape)
        other = OTHER_SPELLINGS.of(self.kind).filled()
        options += [] if other is None else other.schemas(names)
        text = f"Name of {a_kind(self.kind)}, or a mapping with `name` and its options."
        return {"description": text, "anyOf": [{"type": "string", "enum": names}, *options]}

    def _resolve(self, value: Any, info: core_schema.ValidationInfo) -> Config:
        context = info.context or {}
        return self.resolve(value, context.get(PLUGINS), context)

    def resolve(self, value: Any, plugins: Registry | None = None, context: Mapping[str, Any] | None = None) -> Config:
        """A name, a mapping with ``name``, or a ready config object -> the plugin's config object.

        Args:
            value: What was written.
            plugins: Those that may be used. Unset: those of this process.
            context: That its options are validated in.
        """
        plugins = plugins or registry()
        if isinstance(value, Config):
            registry().name_of(self.kind, type(value))  # raises where workers could not find it again
            return value
        try:
            value = self.spelled(value, plugins)
            if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
                raise _problem(
                    f"expected the name of {a_kind(self.kind)} or a mapping with a 'name', got {shown(value)}",
                    self._with_these_options(value, plugins)
                    or f"write e.g. {self._example()!r}, or {{name: {self._example()}, …options}}",
                )
            plugin = plugins.load(self.kind, value["name"])
        except NemorlError as error:
            raise _problem(error.message, error.fix or "") from error
        is_needed = self.built_here and not (context or {}).get(ELSEWHERE)
        problem = missing_modules(self.kind, value["name"], plugin) if is_needed else None
        if problem is not None:
            raise _problem(problem.message, problem.fix or "")
        with boundary(f"{singular(self.kind)} {value['name']!r}", passing=(ValidationError, PydanticUserError)):
            options = {key: option for key, option in value.items() if key != "name"}
            loaded: Config = plugin.model_validate(options, context=context)
        return loaded

    def spelled(self, value: Any, plugins: Registry) -> Any:
        """The section as a mapping; a name that no plugin here has as ``OTHER_SPELLINGS`` spells it out."""
        value = {"name": value} if isinstance(value, str) else value
        if not isinstance(value, Mapping):
            return value
        value = value if self.default is None else {"name": self.default, **value}
        entries = plugins.index.of_kind(self.kind)
        if any(value.get("name") in (entry.name, entry.id) for entry in entries):
            return value
        other = OTHER_SPELLINGS.of(self.kind).filled()
        return value if other is None else other.expand(value, [entry.name for entry in entries]) or value

    def dump(self, value: Config) -> dict[str, Any]:
        return {"name": registry().name_of(self.kind, type(value)), **value.model_dump(mode="json")}

    def _with_these_options(self, value: Any, plugins: Registry) -> str | None:
        """The fix for a mapping without ``name``: the plugins that have all of its options."""
        if not isinstance(value, Mapping) or not value or "name" in value:
            return None
        names = []
        for entry in plugins.index.of_kind(self.kind):
            try:
                has_all = set(plugins.load(self.kind, entry.name).model_fields) >= set(value)
            except NemorlError:
                continue  # one that is broken is shown by `nemorl plugins list`
            names += [entry.name] if has_all else []
        return f"add `name:`; these have {', '.join(map(str, value))}: {', '.join(names)}" if names else None

    def _example(self) -> str:
        entries = registry().index.of_kind(self.kind)
        return entries[0].name if entries else "name"


def missing_modules(kind: str, name: str, plugin: type[PluginConfig]) -> ConfigIssue | None:
    """The problem of a plugin whose modules are not installed here; ``None``: there is none."""
    missing = plugin.missing_modules()
    if not missing:
        return None
    return ConfigIssue(
        "",
        f"{singular(kind)} {name!r} needs {', '.join(missing)}, which cannot be found",
        plugin.install_hint or f"pip install {' '.join(missing)}",
        here=True,
    )


def _problem(message: str, fix: str) -> PydanticCustomError:
    return PydanticCustomError(PROBLEM, "{message}", {"message": message, "fix": fix})
