"""Decorators that add parts to the running process: ``@register_environment("shouting")``.

For notebooks, scripts and tests; a package declares entry points instead (docs/plugins.md), with the same result: the
name works in configs, on the command line of that process and in ``nemorl.get_training_backend``. A config class is
registered as it is. Anything else is wrapped in a generated config class:

- a reward function, a dataset function, a logging function: called as it is;
- a class (environment, backend, logger): constructed with those of its parameters that the kernel provides, by name.

All other parameters of a function or constructor become options of the generated class, with their annotations and
defaults. How plugins are found and loaded is in ``plugins``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from nemorl.config.base import Config
from nemorl.data import as_rows
from nemorl.errors import PluginError
from nemorl.plugins.kinds import (
    DatasetConfig,
    EnvironmentConfig,
    GenerationBackendConfig,
    LoggerConfig,
    TrainingBackendConfig,
)
from nemorl.plugins.registry import config_bases, registry
from pydantic import create_model

from nemorl_rl.environments.sources import as_environment

if TYPE_CHECKING:
    from nemorl.config.models import GenerationConfig, PolicyConfig
    from nemorl.resources.worker import WorkerContext
    from nemorl.trainer import BaseTrainer
    from nemorl.types import Row
    from nemorl.weights import WeightHandle

Target = TypeVar("Target")

ABOUT = ("summary", "requires_modules", "install_hint", "supports", "weight_transports")
"""Class attributes that a wrapped class may have and its config takes over."""


def register_algorithm(name: str) -> Callable[[Target], Target]:
    """Add an algorithm: a ``RunConfig`` subclass, or a ``BaseTrainer`` subclass with its ``config_class``."""
    return _registering("algorithms", name)


def register_training_backend(name: str) -> Callable[[Target], Target]:
    """Add a training backend: a config class, or a class with the verbs of ``nemorl.contracts.TrainingBackend``.

    Its constructor may take ``policy`` (also as ``config``), ``worker`` (also as ``cluster``: this rank's place in it)
    and ``reference``; so may a ``setup`` method, which is called right after.
    """
    return _registering("training_backends", name)


def register_generation_backend(name: str) -> Callable[[Target], Target]:
    """Add a generation backend: a config class, or a class with the verbs of ``nemorl.contracts.GenerationBackend``.

    Its constructor may take ``generation`` (also as ``config``), ``policy``, ``worker`` (also as ``cluster``) and
    ``weights``; so may a ``setup`` method, which is called right after.
    """
    return _registering("generation_backends", name)


def register_environment(name: str) -> Callable[[Target], Target]:
    """Add an environment: a config class, an ``Environment`` subclass or a reward function.

    Example:
        >>> @register_environment("shouting")
        ... def shouting(prompt, response):
        ...     return float(response.isupper())
    """
    return _registering("environments", name)


def register_dataset(name: str) -> Callable[[Target], Target]:
    """Add a dataset: a config class, or a function that returns rows.

    The function may take ``split`` (``"train"`` or ``"validation"``; it returns ``None`` where there is no such
    split). One that does not is asked for ``train`` only.

    Example:
        >>> @register_dataset("squares")
        ... def squares(count: int = 10):
        ...     return [{"prompt": f"{n}*{n}=", "answer": str(n * n)} for n in range(count)]
    """
    return _registering("datasets", name)


def register_logger(name: str) -> Callable[[Target], Target]:
    """Add a logger: a config class, a class with ``log(metrics, step)`` and ``close()``, or ``f(metrics, step)``.

    The constructor of a class may take ``run_dir``.
    """
    return _registering("loggers", name)


def get_training_backend(name: str) -> type[TrainingBackendConfig]:
    """The config class of an installed or registered training backend, e.g. ``dtensor``.

    A run builds the backend itself from a config: ``PolicyConfig(backend=get_training_backend("dtensor")())``.

    Raises:
        PluginNotFoundError: nothing has the name; says what is installed and what to install.
    """
    found: type[TrainingBackendConfig] = registry().load("training_backends", name)
    return found


def get_generation_backend(name: str) -> type[GenerationBackendConfig]:
    """The config class of an installed or registered generation backend, e.g. ``vllm``.

    Raises:
        PluginNotFoundError: nothing has the name; says what is installed and what to install.
    """
    found: type[GenerationBackendConfig] = registry().load("generation_backends", name)
    return found


def _registering(kind: str, name: str) -> Callable[[Target], Target]:
    def add(target: Target) -> Target:
        is_config = isinstance(target, type) and issubclass(target, config_bases()[kind])
        registry().register(kind, name, target if is_config else wrap(kind, name, target))
        return target

    return add


# The generated config classes


class _Wrapper(Config):
    """Base of generated config classes. One is pickled as what it wraps and its options, so that a worker process
    makes the same class again: a target in an importable module by name, one in a script or notebook by value (Ray).
    """

    origin: ClassVar[tuple[str, str, Any]]
    """Kind, name, and what is wrapped."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (*self.origin, self._options(), set(self.model_fields_set))

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in type(self).model_fields}

    def _construct(self, provided: Mapping[str, Any]) -> Any:
        """The target, given its options and what it takes of ``provided``."""
        target = self.origin[2]
        made = target(**_taken(target, provided), **self._options())
        if _has_setup(target):
            made.setup(**_taken(made.setup, provided))
        return made


class _TrainingBackend(_Wrapper, TrainingBackendConfig):
    """A class with the verbs of a training backend."""

    PROVIDED: ClassVar = ("config", "policy", "worker", "cluster", "reference", "head")

    def build(
        self,
        policy: PolicyConfig,
        worker: WorkerContext,
        *,
        reference: bool,
        head: Literal["language_model", "value"] = "language_model",
    ) -> Any:
        places = {"worker": worker, "cluster": worker}
        return self._construct({"config": policy, "policy": policy, **places, "reference": reference, "head": head})


class _GenerationBackend(_Wrapper, GenerationBackendConfig):
    """A class with the verbs of a generation backend."""

    PROVIDED: ClassVar = ("config", "generation", "policy", "worker", "cluster", "weights")

    def build(
        self, generation: GenerationConfig, policy: PolicyConfig, worker: WorkerContext, weights: WeightHandle | None
    ) -> Any:
        places = {"worker": worker, "cluster": worker}
        return self._construct(
            {"config": generation, "generation": generation, "policy": policy, **places, "weights": weights}
        )


class _Environment(_Wrapper, EnvironmentConfig):
    """An environment class, or a reward function."""

    PROVIDED: ClassVar = ()

    def build(self) -> Any:
        target = self.origin[2]
        return self._construct({}) if isinstance(target, type) else as_environment(target)


class _Dataset(_Wrapper, DatasetConfig):
    """A function that returns rows."""

    PROVIDED: ClassVar = ("split",)

    def build(self, split: str) -> Sequence[Row] | None:
        if split != "train" and "split" not in inspect.signature(self.origin[2]).parameters:
            return None
        rows = self._construct({"split": split})
        return None if rows is None else as_rows(rows)


class _Logger(_Wrapper, LoggerConfig):
    """A logger class, or a function of metrics."""

    PROVIDED: ClassVar = ("run_dir",)

    def build(self, run_dir: Path) -> Any:
        target = self.origin[2]
        return self._construct({"run_dir": run_dir}) if isinstance(target, type) else _FunctionLogger(target)


class _FunctionLogger:
    """``f(metrics, step)`` as a logger."""

    def __init__(self, function: Callable[[Mapping[str, float], int], object]) -> None:
        self._function = function

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._function(metrics, step)

    def close(self) -> None:
        pass


class _Algorithm(_Wrapper):
    """A trainer class."""

    def build(self) -> BaseTrainer[Any]:
        trainer: BaseTrainer[Any] = self.origin[2](self)
        return trainer


_WRAPPERS: Mapping[str, Any] = {
    "training_backends": _TrainingBackend,
    "generation_backends": _GenerationBackend,
    "environments": _Environment,
    "datasets": _Dataset,
    "loggers": _Logger,
}


@cache
def wrap(kind: str, name: str, target: Any) -> type[Config]:
    """The config class of a class or function that is not one itself; the same one for the same target."""
    what = f"{getattr(target, '__module__', '?')}:{getattr(target, '__qualname__', target)}"
    if not callable(target):
        raise PluginError(f"{what} cannot be registered as {name!r}", fix="decorate a class or a function")
    if kind == "algorithms":
        return _algorithm(name, target, what)
    wrapper = _WRAPPERS[kind]
    is_called_later = kind in ("environments", "loggers") and not isinstance(target, type)
    if kind == "environments" and is_called_later:
        as_environment(target)  # refuses what is no reward function
    _check_setup(target, wrapper.PROVIDED, what)
    fields = {} if is_called_later else _fields(target, wrapper.PROVIDED, what)
    made = _generated(target.__name__, wrapper, target, fields)
    return _finished(made, kind, name, target, target.__qualname__)


def _algorithm(name: str, trainer: Any, what: str) -> type[Config]:
    from nemorl.trainer import BaseTrainer

    if not (isinstance(trainer, type) and issubclass(trainer, BaseTrainer)):
        raise PluginError(
            f"{what} is not an algorithm", fix="decorate a RunConfig subclass, or a BaseTrainer subclass with a config"
        )
    trainer_class: Any = trainer
    base = inspect.getattr_static(trainer, "config_class", None)
    if base is None:
        raise PluginError(f"{what} has no config_class", fix="set `config_class` to its RunConfig subclass")
    stem = trainer.__name__.removesuffix("Trainer")
    fields: Any = {"algorithm": (Literal[name], name)}
    made = _generated(f"{stem}Config", (_Algorithm, base), trainer, fields)
    made.trainer = f"{trainer.__module__}:{trainer.__qualname__}"
    trainer_class.config_class = made
    return _finished(made, "algorithms", name, trainer, f"{trainer.__qualname__.removesuffix('Trainer')}Config")


def _generated(name: str, base: Any, target: Any, fields: Mapping[str, Any]) -> Any:
    documentation = inspect.getdoc(target) or f"Registered in {target.__module__}."
    return create_model(name, __base__=base, __module__=target.__module__, __doc__=documentation, **fields)


def _finished(made: Any, kind: str, name: str, target: Any, qualname: str) -> type[Config]:
    made.origin, made.__qualname__ = (kind, name, target), qualname
    made.summary = made.__doc__.partition("\n")[0]
    for attribute in ABOUT if isinstance(target, type) and kind != "algorithms" else ():
        value = inspect.getattr_static(target, attribute, None)
        if value is not None:
            setattr(made, attribute, value)
    config_class: type[Config] = made
    return config_class


def _unpickled(kind: str, name: str, target: Any, options: dict[str, Any], given: set[str]) -> Config:
    return wrap(kind, name, target).model_construct(given, **options)


def _taken(function: Any, provided: Mapping[str, Any]) -> dict[str, Any]:
    """Of ``provided``, what the function takes."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in provided.items() if name in names}


def _fields(target: Any, provided: Sequence[str], what: str) -> dict[str, Any]:
    """The options of a callable: its parameters that the kernel does not provide, as pydantic fields."""
    try:
        parameters = inspect.signature(target, eval_str=True).parameters.values()
    except NameError as error:
        raise PluginError(
            f"the annotations of {what} cannot be read: {error}", fix="import the name outside TYPE_CHECKING"
        ) from error
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if any(parameter.name == "name" for parameter in parameters):
        raise PluginError(f"{what} has a parameter `name`", fix="call it otherwise: configs use `name` for the plugin")
    return {
        parameter.name: (
            Any if parameter.annotation is parameter.empty else parameter.annotation,
            ... if parameter.default is parameter.empty else parameter.default,
        )
        for parameter in parameters
        if parameter.name not in provided and parameter.kind not in variable
    }


def _has_setup(target: Any) -> bool:
    return isinstance(target, type) and inspect.getattr_static(target, "setup", None) is not None


def _check_setup(target: Any, provided: Sequence[str], what: str) -> None:
    """A ``setup`` method gets what the kernel has for it, and nothing else."""
    if not _has_setup(target):
        return
    unknown = [name for name in list(inspect.signature(target.setup).parameters)[1:] if name not in provided]
    if unknown:
        raise PluginError(
            f"{what}.setup takes {', '.join(unknown)}, which nemorl does not provide here",
            fix=f"take any of {', '.join(provided) or 'nothing'}, or make it an argument of the constructor",
        )
