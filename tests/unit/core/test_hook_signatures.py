"""What a hook method may look like, and what registering it says where it may not; docs/hooks.md against the specs."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from nemorl import hookimpl
from nemorl.errors import PluginError
from nemorl.plugins.hooks import ARGUMENTS, CONTROL, EVENTS, Hooks, HookSpecs
from recorded_messages import Raises

DOCS = (Path(__file__).parents[3] / "docs/hooks.md").read_text()
GIVEN = {"trainer": "the trainer", "step": 3, "metrics": {"loss": 0.5}}


@pytest.fixture
def hooks() -> Hooks:
    def fail(text: str) -> None:
        raise AssertionError(text)

    return Hooks(fail)


class UnknownArgument:
    def on_step_end(self, trainer: Any, loss: float) -> None: ...


class UnknownKeyword:
    def on_step_end(self, *, loss: float) -> None: ...


class ManyArguments:
    def on_step_end(self, *args: Any) -> None: ...


class ManyKeywords:
    def on_step_end(self, **kwargs: Any) -> None: ...


class PositionalOnly:
    def on_step_end(self, step: int, /) -> None: ...


class Async:
    async def on_step_end(self, step: int) -> None: ...


class AsyncGenerator:
    async def on_step_end(self, step: int) -> AsyncIterator[None]:
        yield


class AsyncObject:
    async def __call__(self, step: int) -> None: ...


class HoldsAsyncObject:
    on_step_end = AsyncObject()


class Generator:
    def on_step_end(self, step: int) -> Iterator[None]:
        yield


class StaticGenerator:
    @staticmethod
    def on_step_end(step: int) -> Iterator[None]:
        yield


class Wrapper:
    @hookimpl(wrapper=True)
    def on_step_end(self, step: int) -> Iterator[None]:
        yield


class OldWrapper:
    @hookimpl(hookwrapper=True)
    def on_step_end(self, step: int) -> Iterator[None]:
        yield


class AnotherName:
    @hookimpl(specname="on_step_begin")
    def on_step_end(self, step: int) -> None: ...


class NotCallable:
    on_step_end = 3


WRONG = [
    UnknownArgument,
    UnknownKeyword,
    ManyArguments,
    ManyKeywords,
    PositionalOnly,
    Async,
    AsyncGenerator,
    HoldsAsyncObject,
    Generator,
    StaticGenerator,
    Wrapper,
    OldWrapper,
    AnotherName,
    NotCallable,
]


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_method_is_refused_with_the_right_signature(hooks: Hooks, kind: type, raises: Raises) -> None:
    with raises(PluginError, "acme-hooks:odd", "on_step_end(trainer,"):
        hooks.register(kind(), "acme-hooks:odd")


class MarkedButUnnamed:
    @hookimpl
    def step_ended(self) -> None: ...


class Unknown:
    def on_step_ended(self) -> None: ...


@pytest.mark.parametrize(("kind", "name"), [(Unknown, "on_step_ended"), (MarkedButUnnamed, "step_ended")])
def test_an_unknown_event_is_refused_with_those_that_exist(hooks: Hooks, kind: type, name: str, raises: Raises) -> None:
    with raises(PluginError, name) as caught:
        hooks.register(kind(), "acme-hooks:odd")
    assert all(event in str(caught.value.fix) for event in EVENTS)


def test_a_class_in_place_of_an_object_is_refused(hooks: Hooks, raises: Raises) -> None:
    class Late:
        def on_step_end(self, step: int) -> None: ...

    with raises(PluginError, "Late"):
        hooks.register(Late, "callback 0 (Late)")


def test_one_plugin_twice_is_refused(hooks: Hooks, raises: Raises) -> None:
    hooks.register(Unmarked(), "acme-hooks:one")
    with raises(PluginError, "acme-hooks:one", "plugins.hooks"):
        hooks.register(Unmarked(), "acme-hooks:one")


class Unmarked:
    def on_step_end(self, step: int) -> int:
        return got.append(step) or step  # type: ignore[func-returns-value]


class Static:
    @staticmethod
    def on_step_end(step: int) -> None:
        got.append(step)


class Class:
    @classmethod
    def on_step_end(cls, step: int) -> None:
        got.append(step)


class KeywordOnly:
    def on_step_end(self, *, step: int) -> None:
        got.append(step)


class AnyOrder:
    def on_step_end(self, metrics: Any, step: int, trainer: Any) -> None:
        got.append(step if (trainer, metrics) == ("the trainer", {"loss": 0.5}) else (trainer, metrics))


class WithDefault:
    def on_step_end(self, step: int = 0, verbose: bool = False) -> None:
        got.append(step)


class Partial:
    def __init__(self) -> None:
        self.on_step_end = functools.partial(self._take, "bound")

    def _take(self, bound: str, step: int) -> None:
        got.append(step)


class Decorated:
    def _take(self, step: int) -> None:
        got.append(step)

    @functools.wraps(_take)
    def on_step_end(self, **anything: Any) -> None:
        self._take(**anything)


class OfALaterVersion(Unmarked):
    @hookimpl(optionalhook=True)
    def on_the_moon(self, rocket: str) -> None: ...


class ReadsNoProperties(Unmarked):
    @property
    def status(self) -> str:
        raise RuntimeError("not connected")


RIGHT = [Unmarked, Static, Class, KeywordOnly, AnyOrder, WithDefault, Partial, Decorated]
got: list[Any] = []


@pytest.mark.parametrize("kind", [*RIGHT, OfALaterVersion, ReadsNoProperties], ids=lambda kind: kind.__name__)
def test_every_way_to_write_a_method_gets_the_real_arguments(hooks: Hooks, kind: type) -> None:
    got.clear()
    hooks.register(kind(), "acme-hooks:fine")
    hooks.fire("on_step_end", **GIVEN)
    assert got == [3]


@pytest.mark.parametrize("order", ["mark outside", "mark inside"])
def test_marks_of_static_methods_count(hooks: Hooks, order: str) -> None:
    def late(step: int) -> None:
        got.append("late")

    mark = hookimpl(trylast=True)
    method = mark(staticmethod(late)) if order == "mark outside" else staticmethod(mark(late))
    got.clear()
    hooks.register(Unmarked(), "acme-hooks:ordinary")
    hooks.register(type("Late", (), {"on_step_end": method})(), "acme-hooks:late")
    hooks.fire("on_step_end", **GIVEN)
    assert got == [3, "late"]


# docs/hooks.md and HookSpecs, both ways


def test_the_table_of_events_is_the_specification() -> None:
    rows = re.findall(r"^\| `(on_\w+)\(([\w, ]*)\)` \| (.*) \|$", DOCS, re.MULTILINE)
    assert {event: tuple(arguments.split(", ")) for event, arguments, _ in rows} == dict(ARGUMENTS)
    assert [event for event, *_ in rows] == list(EVENTS)
    assert {event for event, _, when in rows if "*control*" in when} == set(CONTROL)


def test_the_signatures_on_the_page_are_the_specification() -> None:
    written = re.findall(r"^def (on_\w+)(\(self.*\) -> None): \.\.\.$", DOCS, re.MULTILINE)
    real = [(event, _as_written(inspect.signature(getattr(HookSpecs, event)))) for event in EVENTS]
    assert written == real


def _as_written(signature: inspect.Signature) -> str:
    parameters = [
        p.name if p.annotation is p.empty else f"{p.name}: {p.annotation}" for p in signature.parameters.values()
    ]
    return f"({', '.join(parameters)}) -> {signature.return_annotation}"


def test_control_events_say_so_in_their_docstring() -> None:
    said = {event for event in EVENTS if "*Control.*" in (inspect.getdoc(getattr(HookSpecs, event)) or "")}
    assert said == set(CONTROL)
