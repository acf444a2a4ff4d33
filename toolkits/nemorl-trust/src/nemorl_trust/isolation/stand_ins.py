"""Stand-ins for plugins of other virtual environments: config classes with their options, and parts that call over.

A stand-in is built from what the plugin's own interpreter says of it, and checks its options there. Environments,
datasets and loggers run in that process; backends run on Ray workers under that interpreter. None of the plugin's code
is ever imported here.
"""

from __future__ import annotations

import asyncio
import sys
import weakref
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

from nemorl.config.base import RESUMABLE, Config
from nemorl.contracts.environment import Environment
from nemorl.errors import BackendError, ConfigIssue, PluginError
from nemorl.plugins import kinds
from pydantic import Field, create_model

from nemorl_trust.isolation.process import IsolatedProcess, process_of
from nemorl_trust.isolation.venvs import PluginVenv
from nemorl_trust.isolation.wire import Description, WireError, packed

if TYPE_CHECKING:
    from nemorl.contracts import Episode
    from nemorl.types import Prompt, Row, Step


CHECK_S = 120.0
"""Longest time in which a plugin says what it is, or checks options: its config module is imported."""


class _StandIn(Config):
    """A config whose class lives elsewhere. Its options are as given; their meaning is known over there.

    Its own names begin with an underscore, which no option's does.
    """

    _venv: ClassVar[PluginVenv]
    _value: ClassVar[str]
    """``module:class`` of the real config class."""
    _description: ClassVar[Description]

    @property
    def _options(self) -> dict[str, Any]:
        """Options that were set, as the real class is given them."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        own = f"install it here: nemorl plugins install {self._venv.distribution}"
        for name in self._description.not_asked:
            yield ConfigIssue("", f"it has a {name} of its own, which cannot be asked in another environment", own)
        not_plain = [name for name in self._options if not _is_plain(self._options[name])]
        for name in not_plain:
            yield ConfigIssue(name, "only text, numbers, lists and mappings reach a plugin in another environment", own)
        if not not_plain:
            process = process_of(self._venv)
            for path, message, fix in process.call("check", self._value, self._options, within_s=CHECK_S):
                yield ConfigIssue(path, message, fix)

    @classmethod
    def missing_modules(cls) -> list[str]:
        """Modules that are missing over there."""
        return list(cls._description.missing_modules)

    @classmethod
    def describe_options(cls) -> list[dict[str, Any]]:
        return [option.model_dump() for option in cls._description.options]

    @classmethod
    def model_json_schema(cls, *_args: Any, **_kwargs: Any) -> dict[str, Any]:
        return dict(cls._description.schema_)

    def __reduce__(self) -> tuple[Any, ...]:
        cls = type(self)
        return _arrived, (cls._venv, _kind_of(cls), cls._value, cls._description, self._options)


class _TrainingBackend(_StandIn, kinds.TrainingBackendConfig):
    @property
    def interpreter(self) -> Path:
        return self._venv.python

    def build(self, *_: Any, **__: Any) -> Any:
        raise _built_in_the_driver(self)


class _GenerationBackend(_StandIn, kinds.GenerationBackendConfig):
    @property
    def interpreter(self) -> Path:
        return self._venv.python

    @property
    def devices_per_replica(self) -> int:
        return int(process_of(self._venv).call("devices_per_replica", self._value, self._options))

    def build(self, *_: Any, **__: Any) -> Any:
        raise _built_in_the_driver(self)


class _Environment(_StandIn, kinds.EnvironmentConfig):
    def build(self) -> Environment:
        return IsolatedEnvironment(process_of(self._venv), self._value, self._options)


class _Dataset(_StandIn, kinds.DatasetConfig):
    def build(self, split: str) -> Sequence[Row] | None:
        process = process_of(self._venv)
        built = process.call("dataset", self._value, self._options, split)
        if built is None:
            return None
        number, count = built
        rows: list[Row] = []
        while len(rows) < count:
            page = process.call("rows", number, len(rows))
            if not 0 < len(page) <= count - len(rows):
                raise PluginError(
                    f"{self._value} has {count} rows and gave {len(rows) + len(page)}", fix="a defect of it"
                )
            rows += page
        process.forget(number)
        return rows


class _Logger(_StandIn, kinds.LoggerConfig):
    def build(self, run_dir: Path) -> Any:
        return IsolatedLogger(process_of(self._venv), self._value, self._options, run_dir)


_BASES: Mapping[str, type[_StandIn]] = {
    "training_backends": _TrainingBackend,
    "generation_backends": _GenerationBackend,
    "environments": _Environment,
    "datasets": _Dataset,
    "loggers": _Logger,
}


def stand_in(venv: PluginVenv, kind: str, value: str) -> type[Config]:
    """The config class that stands for ``module:class`` of another environment.

    Raises:
        PluginError: its interpreter does not start, has another nemorl, or cannot import the class.
    """
    return _made(venv, kind, value, process_of(venv).call("describe", value, within_s=CHECK_S))


def _made(venv: PluginVenv, kind: str, value: str, description: Description) -> type[Config]:
    return _cached(venv, kind, value, description.model_dump_json(by_alias=True))


@cache
def _cached(venv: PluginVenv, kind: str, value: str, text: str) -> type[Config]:
    description, base = Description.model_validate_json(text), _BASES[kind]
    module, _, name = value.partition(":")
    fields: Any = {}
    for option in description.options:
        if option.name in dir(base) and option.name not in base.model_fields:
            raise PluginError(f"{value}: no option can be called {option.name!r}", fix="rename it")
        default = ... if option.required else option.default
        annotation = Annotated[Any, RESUMABLE] if option.resumable else Any
        fields[option.name] = (annotation, Field(default, description=option.description))
    made: Any = create_model(name, __base__=base, __module__=module, __doc__=description.doc, **fields)
    # With the name of the real class, the registry knows which entry the stand-in belongs to.
    about = {"__qualname__": name, "_venv": venv, "_value": value, "_description": description}
    given = {key: getattr(description.class_data, key) for key in description.class_data.model_fields_set}
    for key, data in {**about, **given}.items():
        setattr(made, key, data)
    return cast("type[Config]", made)


def _is_plain(value: Any) -> bool:
    try:
        packed(value)
    except WireError:
        return False
    return True


def _kind_of(cls: type[_StandIn]) -> str:
    return next(kind for kind, base in _BASES.items() if issubclass(cls, base))


def _arrived(venv: PluginVenv, kind: str, value: str, description: Description, options: dict[str, Any]) -> Config:
    """Unpickled: at home the real config, anywhere else the stand-in again."""
    if Path(sys.prefix).resolve() == venv.folder.resolve():
        real: Config = metadata.EntryPoint("isolated", value, "nemorl").load().model_validate(options)
        return real
    return _made(venv, kind, value, description).model_construct(set(options), **options)


def _built_in_the_driver(config: _StandIn) -> BackendError:
    return BackendError(
        f"{config._value} belongs to {config._venv.folder}, and cannot be built in this process",
        fix="set cluster.launcher: ray, whose workers run under its own interpreter",
    )


class IsolatedEnvironment(Environment):
    """An environment of another process."""

    def __init__(self, process: IsolatedProcess, value: str, options: Mapping[str, Any]) -> None:
        self._process = process
        self._number, self.name, self.batched = process.call("environment", value, options)

    def start(self, prompt: Prompt) -> Episode:
        return _IsolatedEpisode(self._process, self._process.call("start", self._number, prompt))

    def close(self) -> None:
        self._process.call("close", self._number)


class _IsolatedEpisode:
    def __init__(self, process: IsolatedProcess, number: int) -> None:
        self._process, self._number = process, number
        weakref.finalize(self, process.forget, number)

    def step(self, response: str) -> Awaitable[Step]:
        # Sent now, so that a batched environment has all asks before the first is awaited.
        answer = self._process.send("step", self._number, response)

        async def waited() -> Step:
            found: Step = await asyncio.wrap_future(answer)
            return found

        return waited()


class IsolatedLogger:
    """A logger of another process."""

    def __init__(self, process: IsolatedProcess, value: str, options: Mapping[str, Any], run_dir: Path) -> None:
        self._process = process
        self._number = process.call("logger", value, options, str(run_dir.resolve()))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._process.call("log", self._number, {name: float(value) for name, value in metrics.items()}, step)

    def close(self) -> None:
        self._process.call("close", self._number)
