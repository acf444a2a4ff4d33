"""``Config``: the base of every config class, in the kernel and in plugins.

Frozen, unknown keys forbidden, a docstring per field. Mistakes that involve several fields, or the disk, are
yielded from :meth:`Config.problems`; they are reported together with the field errors, each with its own path.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from nemorl.base.text.field_texts import field_texts, for_editors
from nemorl.base.text.naming import Named, Naming, declared_kind, kind_by_name, takes_text, texts_of
from nemorl.base.text.pydantic_words import shown_default, shown_type
from nemorl.base.text.reading import shown
from nemorl.base.text.scalars import WrongValueError, read_field
from nemorl.errors import ConfigIssue, NemorlError, boundary


class _Resumable:
    """The type of ``RESUMABLE``."""

    def __repr__(self) -> str:
        return "RESUMABLE"


RESUMABLE = _Resumable()
"""Marks a field that may differ between a run and its continuation: ``workers: Annotated[int, RESUMABLE] = 4``.

For what changes no result of a step beyond rounding (layout, parallel sizes, memory, waiting) and for what a run keeps
or how long it is. Such a field is no part of the run's identity and so of its default name.

>>> class Loading(Config):
...     workers: Annotated[int, RESUMABLE] = 4
"""

PLUGINS = "plugins"
"""Key of the validation context: the ``Registry`` that a config is read with. Unset: that of this process."""
DEFERRED = "deferred"
"""Key of the validation context: ``problems()`` are asked for later, of the whole config at once."""
ELSEWHERE = "elsewhere"
"""Key of the validation context: the run is for another machine, with other packages than this one."""
PROBLEM = "nemorl_problem"
"""pydantic error type under which our own findings travel; ``config.load`` unpacks message and fix."""


class Config(Naming, BaseModel):
    """A frozen, strict piece of configuration.

    Example:
        >>> class Sampler(Config):
        ...     temperature: float = 1.0
        ...     '''Divides the logits. Raise it for more variety.'''
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=False,
        protected_namespaces=(),
        allow_inf_nan=False,
        json_schema_extra=for_editors,
    )

    other_paths: ClassVar[Mapping[str, str]] = {}
    """Fields that a file may also write elsewhere: path of the field -> the other path, which errors name."""

    @classmethod
    def describe_options(cls) -> list[dict[str, Any]]:
        """Each option as plain data: its name, type, default, description, and whether it is required or resumable."""
        texts = field_texts(cls)
        return [
            {
                "name": name,
                "type": shown_type(field.annotation),
                "required": field.is_required(),
                "default": shown_default(field),
                "description": " ".join(texts.get(name, "").split()),
                "resumable": RESUMABLE in field.metadata,
            }
            for name, field in cls.model_fields.items()
        ]

    def problems(self) -> Iterator[ConfigIssue]:
        """Mistakes that no single field can see. Override, and start with ``yield from super().problems()``."""
        return iter(())

    def named_values(self, path: str = "") -> Iterator[Named]:
        """The models, datasets, files, servers, commands and secrets that this config and all configs in it name.

        Override where a text stands for something else, and add that: a dataset by a name of your own is also the
        repository that it is read from.

        Args:
            path: Of this config, in the one that it is part of.
        """
        for name, field in type(self).model_fields.items():
            if not field.exclude:  # another field says the same
                kind = declared_kind(field.annotation, field.metadata)
                guess = kind_by_name(name) if kind is None and takes_text(field.annotation) else None
                place = f"{path}.{name}" if path else name
                yield from texts_of(getattr(self, name), place, kind or guess, is_guess=kind is None)

    @field_validator("*", mode="before")
    @classmethod
    def _read_field(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None, "it validates fields"
        try:
            return read_field(info.field_name, cls.model_fields[info.field_name], value)
        except WrongValueError as error:
            context = {"message": str(error), "fix": error.fix}
            raise PydanticCustomError(PROBLEM, "{message}", context) from error

    @model_validator(mode="after")
    def _report_problems(self, info: ValidationInfo) -> Self:
        found = [] if (info.context or {}).get(DEFERRED) else self.own_problems()
        if found:
            raise validation_error(type(self).__name__, found)
        return self

    def own_problems(self) -> list[ConfigIssue]:
        """``problems()``, asked in a way that a failure in it is one as well."""
        found: list[ConfigIssue] = []
        try:
            with boundary(f"problems() of {type(self).__name__} ({type(self).__module__})", passing=(OSError,)):
                for problem in self.problems():
                    found.append(problem)
        except NemorlError as error:
            found.append(ConfigIssue("", error.message, error.fix))
        except OSError as error:
            message = f"{shown(str(error.filename))} cannot be looked at ({error.strerror or error})"
            found.append(ConfigIssue("", message, "check the path, and the permissions of its folders"))
        return found


def all_problems(value: Any, path: str = "") -> Iterator[ConfigIssue]:
    """The ``problems()`` of a config and of all configs in it, inner ones first, with full paths."""
    below: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Config):
        below = ((name, getattr(value, name)) for name in type(value).model_fields)
    elif isinstance(value, Mapping):
        below = value.items()
    elif isinstance(value, list | tuple):
        below = enumerate(value)
    for key, item in below:
        yield from all_problems(item, f"{path}.{key}" if path else str(key))
    for problem in value.own_problems() if isinstance(value, Config) else ():
        yield replace(problem, path=".".join(filter(None, (path, problem.path))))


def identity(config: Any, data: Any) -> Any:
    """The identity of a run within ``data``: all but the fields that are marked ``RESUMABLE``.

    Args:
        config: A config, or a sequence or mapping of them.
        data: What a config of this shape dumps to; what ``config`` does not have is kept.
    """
    if isinstance(data, dict) and isinstance(config, Config):
        fields = type(config).model_fields
        kept = [key for key in data if key not in fields or RESUMABLE not in fields[key].metadata]
        return {key: identity(getattr(config, key) if key in fields else None, data[key]) for key in kept}
    if isinstance(data, dict) and isinstance(config, Mapping):
        return {key: identity(config.get(key), item) for key, item in data.items()}
    if isinstance(data, list) and isinstance(config, (list, tuple)) and len(data) == len(config):
        return [identity(*pair) for pair in zip(config, data, strict=True)]
    return data


def validation_error(title: str, problems: list[ConfigIssue]) -> ValidationError:
    """Our findings as pydantic's own error, so that they merge into the caller's with the right path prefix."""
    details: list[InitErrorDetails] = []
    for problem in problems:
        location: tuple[Any, ...] = tuple(problem.path.split(".")) if problem.path else ()
        context = {"message": problem.message, "fix": problem.fix or ""}
        details.append({"type": PydanticCustomError(PROBLEM, "{message}", context), "loc": location, "input": None})
    return ValidationError.from_exception_data(title, details)


# A field that holds one of several classes, told apart by the `name` in what is written


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
        """The value as the class that it names: a union would report the mistakes of all classes."""
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
