"""Errors say what, why and how to fix it, keep their stdlib family, survive pickling and name whose code raised."""

from __future__ import annotations

import asyncio
import json
import pickle
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nemorl import errors
from nemorl.base.packages.distributions import place_of
from nemorl.errors import (
    ConfigError,
    ConfigIssue,
    DataError,
    ForeignError,
    Interrupted,
    NemorlError,
    UsageError,
    boundary,
)
from recorded_messages import Raises

CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, NemorlError)]
SIMPLE = [cls for cls in CLASSES if cls is not ConfigError]


def test_a_message_ends_with_its_fix() -> None:
    assert str(UsageError("no such step", fix="give 1 or 2")) == "no such step\n  fix: give 1 or 2"
    assert str(UsageError("no such step")) == "no such step"


@pytest.mark.parametrize("cls", SIMPLE, ids=lambda cls: cls.__name__)
def test_errors_survive_the_way_from_a_worker(cls: Any) -> None:
    back = pickle.loads(pickle.dumps(cls("what", fix="how")))
    assert (type(back), back.message, back.fix, str(back)) == (cls, "what", "how", "what\n  fix: how")


def test_a_config_error_survives_with_all_its_problems() -> None:
    error = ConfigError(
        [ConfigIssue("policy.init", "is odd", "use random"), ConfigIssue("", "is empty")], source="grpo.yaml"
    )
    back = pickle.loads(pickle.dumps(error))
    assert back.problems == error.problems
    assert str(back) == str(error)
    assert str(error) == "grpo.yaml: 2 problems\n  - policy.init: is odd\n    fix: use random\n  - is empty"


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls is not NemorlError], ids=lambda cls: cls.__name__)
def test_every_error_has_a_stdlib_family(cls: type[NemorlError]) -> None:
    assert issubclass(cls, (ValueError, RuntimeError, LookupError, OSError))


def test_a_boundary_names_whose_code_raised(raises: Raises) -> None:
    with (
        raises(ForeignError, "math", "ZeroDivisionError") as caught,
        boundary("environment 'math'"),
    ):
        raise ZeroDivisionError("no")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_the_innermost_boundary_wins(raises: Raises) -> None:
    with raises(ForeignError, "inner"), boundary("outer"), boundary("inner"):
        raise ValueError("x")


def test_our_own_errors_and_ctrl_c_pass_a_boundary_unchanged() -> None:
    for error in (DataError("row 3"), KeyboardInterrupt(), Interrupted("SIGTERM"), SystemExit(int(signal.SIGTERM))):
        with pytest.raises(type(error)) as caught, boundary("someone"):
            raise error
        assert caught.value is error


class Odd(BaseException):
    """What a library may derive from, to pass every ``except Exception``."""


ODD = [
    SystemExit(0),
    SystemExit(),
    SystemExit("bye"),
    GeneratorExit(),
    StopIteration(7),
    StopAsyncIteration(),
    Odd("!"),
]


@pytest.mark.parametrize("error", ODD, ids=repr)
def test_nothing_that_is_raised_leaves_a_boundary_without_the_name_of_its_owner(
    error: BaseException, raises: Raises
) -> None:
    with raises(ForeignError, "someone", type(error).__name__) as caught, boundary("someone"):
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [*ODD, KeyboardInterrupt(), SystemExit(15)], ids=repr)
def test_no_thread_but_the_main_one_is_told_to_end_by_anybody(error: BaseException) -> None:
    caught: list[BaseException] = []

    def work() -> None:
        try:
            with boundary("someone"):
                raise error
        except BaseException as raised:
            caught.append(raised)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [type(raised) for raised in caught] == [ForeignError]


def test_ctrl_c_that_nobody_pressed_is_the_owners(raises: Raises) -> None:
    before = signal.signal(signal.SIGINT, lambda *_: None)  # as while a run is listening: Ctrl-C raises nothing
    try:
        with raises(ForeignError, "someone", "KeyboardInterrupt"), boundary("someone"):
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_boundary_lets_generators_close_and_coroutines_be_cancelled() -> None:
    ends: list[str] = []

    def numbers() -> Iterator[int]:
        try:
            with boundary("someone"):
                yield 1
        except BaseException as error:
            ends.append(type(error).__name__)
            raise

    async def waits() -> None:
        try:
            with boundary("someone"):
                await asyncio.sleep(60)
        except BaseException as error:
            ends.append(type(error).__name__)
            raise

    async def cancels() -> None:
        task = asyncio.ensure_future(waits())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    opened = numbers()
    next(opened)
    opened.close()  # type: ignore[attr-defined]
    asyncio.run(cancels())
    assert ends == ["GeneratorExit", "CancelledError"]


def test_a_boundary_may_let_named_errors_pass() -> None:
    with pytest.raises(KeyError), boundary("someone", passing=(KeyError,)):
        raise KeyError("a")


def test_a_boundary_says_where_the_code_that_raised_stands() -> None:
    with pytest.raises(ForeignError) as caught, boundary("reward function 'score'"):
        int("seven")  # the line to be named
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "to be named" in text)
    assert f"{Path(__file__).name}, line {line}" in (caught.value.fix or "")


def test_a_place_is_found_also_where_the_current_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ForeignError) as caught, boundary("reward function 'score'"):
        int("seven")
    assert __file__ in (caught.value.fix or "")
    with pytest.raises(ForeignError), boundary("generated code"):
        exec(compile("1 / 0", "x" * 5000, "exec"), {})


def test_what_libraries_raise_without_anybody_elses_code_has_no_place() -> None:
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("no")
    inside = caught.value.with_traceback(caught.value.__traceback__.tb_next)  # type: ignore[union-attr]
    assert place_of(inside) is None
