"""Stand-ins for plugins of other virtual environments: config classes with their options, and parts that call over.

A stand-in is built from what the plugin's own interpreter says of it, and checks its options there. Environments,
datasets and loggers run in that process; backends run on Ray workers under that interpreter. None of the plugin's code
is ever imported here.
"""

from __future__ import annotations

import asyncio
import json
import sys
import weakref
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from pydantic import Field, create_model

from nemorl.config.base import Config
from nemorl.environments.base import Environment
from nemorl.errors import BackendError, Problem
from nemorl.plugins import kinds
from nemorl.plugins.isolated_process import IsolatedProcess, process_of
from nemorl.plugins.venvs import PluginVenv

if TYPE_CHECKING:
    from nemorl.contracts import Episode
    from nemorl.types import Prompt, Row, Step


class _StandIn(Config):
    """A config whose class lives elsewhere. Its options are as given; their meaning is known over there."""

    venv: ClassVar[PluginVenv]
    value: ClassVar[str]
    """``module:class`` of the real config class."""
    description: ClassVar[Mapping[str, Any]]

    @property
    def options(self) -> dict[str, Any]:
        """What was set, as the real class is given it."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        for path, message, fix in process_of(self.venv).call("check", self.value, self.options):
            yield Problem(path, message, fix)

    @classmethod
    def missing_modules(cls) -> list[str]:
        """Modules that are missing over there."""
        return list(cls.description["missing_modules"])

    @classmethod
    def describe_options(cls) -> list[dict[str, Any]]:
        return list(cls.description["options"])

    @classmethod
    def model_json_schema(cls, *_args: Any, **_kwargs: Any) -> dict[str, Any]:
        return dict(cls.description["schema"])

    def __reduce__(self) -> tuple[Any, ...]:
        cls = type(self)
        return _arrived, (cls.venv, _kind_of(cls), cls.value, json.dumps(cls.description, default=list), self.options)


class _TrainingBackend(_StandIn, kinds.TrainingBackendConfig):
    @property
    def interpreter(self) -> Path:
        return self.venv.python

    def build(self, *_: Any, **__: Any) -> Any:
        raise _built_in_the_driver(self)


class _GenerationBackend(_StandIn, kinds.GenerationBackendConfig):
    @property
    def interpreter(self) -> Path:
        return self.venv.python

    @property
    def devices_per_replica(self) -> int:
        return int(process_of(self.venv).call("ask", self.value, self.options, "devices_per_replica"))

    def build(self, *_: Any, **__: Any) -> Any:
        raise _built_in_the_driver(self)


class _Environment(_StandIn, kinds.EnvironmentConfig):
    def build(self) -> Environment:
        return IsolatedEnvironment(process_of(self.venv), self.value, self.options)


class _Dataset(_StandIn, kinds.DatasetConfig):
    def build(self, split: str) -> Sequence[Row] | None:
        rows: Sequence[Row] | None = json.loads(process_of(self.venv).call("rows", self.value, self.options, split))
        return rows


class _Logger(_StandIn, kinds.LoggerConfig):
    def build(self, run_dir: Path) -> Any:
        return IsolatedLogger(process_of(self.venv), self.value, self.options, run_dir)


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
    described = process_of(venv).call("describe", value)
    return _made(venv, kind, value, json.dumps(described, default=list))


@cache
def _made(venv: PluginVenv, kind: str, value: str, description: str) -> type[Config]:
    described = json.loads(description)
    module, _, name = value.partition(":")
    fields: Any = {
        option["name"]: (
            Any,
            Field(... if option["required"] else option["default"], description=option["description"]),
        )
        for option in described["options"]
    }
    made: Any = create_model(name, __base__=_BASES[kind], __module__=module, __doc__=described["doc"], **fields)
    class_data = {key: _as_declared(key, data) for key, data in described["class_data"].items()}
    # With the name of the real class, the registry knows which entry the stand-in belongs to.
    about = {"__qualname__": name, "venv": venv, "value": value, "description": described, **class_data}
    for key, data in about.items():
        setattr(made, key, data)
    return cast("type[Config]", made)


def _as_declared(key: str, data: Any) -> Any:
    """Class data as Python has it: JSON knows lists only."""
    if key == "supports":
        return frozenset(data)
    return tuple(data) if isinstance(data, list) else data


def _kind_of(cls: type[_StandIn]) -> str:
    return next(kind for kind, base in _BASES.items() if issubclass(cls, base))


def _arrived(venv: PluginVenv, kind: str, value: str, description: str, options: dict[str, Any]) -> Config:
    """Unpickled: at home the real config, anywhere else the stand-in again."""
    if Path(sys.prefix).resolve() == venv.folder.resolve():
        real: Config = metadata.EntryPoint("isolated", value, "nemorl").load().model_validate(options)
        return real
    return _made(venv, kind, value, description).model_construct(set(options), **options)


def _built_in_the_driver(config: _StandIn) -> BackendError:
    return BackendError(
        f"{config.value} belongs to {config.venv.folder}, and cannot be built in this process",
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
        weakref.finalize(self, process.tell, "forget", number)

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
        self._process.call("log", self._number, dict(metrics), step)

    def close(self) -> None:
        self._process.call("close", self._number)
