"""Config classes of functions and plain classes, which makes these plugins like any other.

A reward function, a dataset function and a logging function are called as they are. A class is constructed with those
arguments of its kind's ``build`` that its constructor names; so is its ``setup`` method, where it has one, called right
after. All other parameters are options: fields of the config class, with their annotations and defaults.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from nemorl.config.base import Config
from nemorl.errors import PluginError
from nemorl.plugins.registry import config_bases
from nemorl.types import Row
from pydantic import create_model

from nemorl_rl.data.rows import as_rows
from nemorl_rl.environments.sources import as_environment

ALIASES: Mapping[str, Mapping[str, str]] = {
    "training_backends": {"config": "policy", "cluster": "worker"},
    "generation_backends": {"config": "generation", "cluster": "worker"},
}
"""Other names of what backends are given, as in the architecture guide."""
ABOUT = ("summary", "requires_modules", "install_hint", "supports", "weight_transports")
"""Class attributes that a wrapped class may have and its config takes over."""


class Wrapped(Config):
    """Base of generated config classes. One is pickled as what it wraps and its options, so that a worker process
    makes the same class again: a target in an importable module by name, one in a script or notebook by value (Ray).
    """

    origin: ClassVar[tuple[str, str, Any]]
    """Kind, name, and what is wrapped."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (*self.origin, self._options(), set(self.model_fields_set))

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in type(self).model_fields}

    def build(self, *values: Any, **named: Any) -> Any:
        kind, _, target = self.origin
        given = inspect.signature(config_bases()[kind].build).bind(self, *values, **named)  # type: ignore[attr-defined]
        given.apply_defaults()
        provided = {**given.arguments, **{name: given.arguments[of] for name, of in ALIASES.get(kind, {}).items()}}
        made = target(**_taken(target, provided), **self._options())
        if isinstance(target, type) and inspect.getattr_static(target, "setup", None) is not None:
            made.setup(**_taken(made.setup, provided))
        return made


class _RewardFunction(Wrapped):
    """A reward function as an environment."""

    def build(self) -> Any:  # type: ignore[override]
        return as_environment(self.origin[2])


class _Dataset(Wrapped):
    """A function that returns rows."""

    def build(self, split: str) -> Sequence[Row] | None:  # type: ignore[override]
        if split != "train" and "split" not in inspect.signature(self.origin[2]).parameters:
            return None
        rows = super().build(split)
        return None if rows is None else as_rows(rows)


class _LogFunction(Wrapped):
    """A function of metrics as a logger."""

    def build(self, run_dir: Path) -> Any:  # type: ignore[override]
        return _FunctionLogger(self.origin[2])


class _FunctionLogger:
    """``f(metrics, step)`` as a logger."""

    def __init__(self, function: Callable[[Mapping[str, float], int], object]) -> None:
        self.log = function

    def close(self) -> None: ...


class _Algorithm(Wrapped):
    """A trainer class as an algorithm."""

    def build(self) -> Any:  # type: ignore[override]
        return self.origin[2](self)


@cache
def wrap(kind: str, name: str, target: Any) -> type[Config]:
    """The config class of a class or function that is not one itself; the same one for the same target."""
    what = f"{getattr(target, '__module__', '?')}:{getattr(target, '__qualname__', target)}"
    if not callable(target):
        raise PluginError(f"{what} cannot be registered as {name!r}", fix="decorate a class or a function")
    if kind == "algorithms":
        return _algorithm(name, target, what)
    base, is_class = config_bases()[kind], isinstance(target, type)
    if kind == "environments" and not is_class:
        as_environment(target)  # refuses what is no reward function
        return _generated((kind, name, target), (_RewardFunction, base), {})
    if kind == "loggers" and not is_class:
        return _generated((kind, name, target), (_LogFunction, base), {})
    provided = {*inspect.signature(base.build).parameters, *ALIASES.get(kind, ())}  # type: ignore[attr-defined]
    wrapper = _Dataset if kind == "datasets" else Wrapped
    made = _generated((kind, name, target), (wrapper, base), _fields(target, provided, what))
    for attribute in ABOUT if is_class else ():
        if (value := inspect.getattr_static(target, attribute, None)) is not None:
            setattr(made, attribute, value)
    return made


def _algorithm(name: str, trainer: Any, what: str) -> type[Config]:
    from nemorl.trainer import BaseTrainer

    if not (isinstance(trainer, type) and issubclass(trainer, BaseTrainer)):
        fix = "decorate a RunConfig subclass, or a BaseTrainer subclass with a config"
        raise PluginError(f"{what} is not an algorithm", fix=fix)
    base = inspect.getattr_static(trainer, "config_class", None)
    if base is None:
        raise PluginError(f"{what} has no config_class", fix="set `config_class` to its RunConfig subclass")
    made: Any = _generated(("algorithms", name, trainer), (_Algorithm, base), {"algorithm": (Literal[name], name)})
    made.trainer = f"{trainer.__module__}:{trainer.__qualname__}"
    made.__name__, made.__qualname__ = (
        f"{text.removesuffix('Trainer')}Config" for text in (trainer.__name__, trainer.__qualname__)
    )
    trainer.config_class = made
    return cast(type[Config], made)


def _generated(origin: tuple[str, str, Any], bases: tuple[type, ...], fields: Mapping[str, Any]) -> type[Config]:
    target = origin[2]
    documentation = inspect.getdoc(target) or f"Registered in {target.__module__}."
    module, create = target.__module__, cast(Any, create_model)
    made = create(target.__name__, __base__=bases, __module__=module, __doc__=documentation, **fields)
    made.origin, made.__qualname__, made.summary = origin, target.__qualname__, documentation.partition("\n")[0]
    return cast(type[Config], made)


def _fields(target: Any, provided: set[str], what: str) -> dict[str, Any]:
    """The options of a callable: its parameters that the kernel does not provide, as pydantic fields."""
    try:
        parameters = inspect.signature(target, eval_str=True).parameters.values()
    except NameError as error:
        raise PluginError(
            f"the annotations of {what} cannot be read: {error}", fix="import the name outside TYPE_CHECKING"
        ) from error
    if any(parameter.name == "name" for parameter in parameters):
        raise PluginError(f"{what} has a parameter `name`", fix="call it otherwise: configs use `name` for the plugin")
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {
        parameter.name: (
            Any if parameter.annotation is parameter.empty else parameter.annotation,
            ... if parameter.default is parameter.empty else parameter.default,
        )
        for parameter in parameters
        if parameter.name not in provided and parameter.kind not in variable
    }


def _taken(function: Any, provided: Mapping[str, Any]) -> dict[str, Any]:
    """Of ``provided``, what the function takes."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in provided.items() if name in names}


def _unpickled(kind: str, name: str, target: Any, options: dict[str, Any], given: set[str]) -> Config:
    return wrap(kind, name, target).model_construct(given, **options)
