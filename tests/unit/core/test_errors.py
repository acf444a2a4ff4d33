"""Errors say what, why and how to fix it, keep their stdlib family, survive pickling and name whose code raised."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from nemorl import errors
from nemorl.errors import ConfigError, DataError, ForeignError, NemorlError, Problem, UsageError, boundary

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
    error = ConfigError([Problem("policy.init", "is odd", "use random"), Problem("", "is empty")], source="grpo.yaml")
    back = pickle.loads(pickle.dumps(error))
    assert back.problems == error.problems
    assert str(back) == str(error)
    assert str(error) == "grpo.yaml: 2 problems\n  - policy.init: is odd\n    fix: use random\n  - is empty"


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls is not NemorlError], ids=lambda cls: cls.__name__)
def test_every_error_has_a_stdlib_family(cls: type[NemorlError]) -> None:
    assert issubclass(cls, (ValueError, RuntimeError, LookupError, TimeoutError))


def test_a_boundary_names_whose_code_raised() -> None:
    with (
        pytest.raises(ForeignError, match="environment 'math' raised ZeroDivisionError: no") as caught,
        boundary("environment 'math'"),
    ):
        raise ZeroDivisionError("no")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_the_innermost_boundary_wins() -> None:
    with pytest.raises(ForeignError, match=r"^inner raised"), boundary("outer"), boundary("inner"):
        raise ValueError("x")


def test_our_own_errors_and_interrupts_pass_a_boundary_unchanged() -> None:
    for error in (DataError("row 3"), KeyboardInterrupt(), SystemExit(3)):
        with pytest.raises(type(error)) as caught, boundary("someone"):
            raise error
        assert caught.value is error
