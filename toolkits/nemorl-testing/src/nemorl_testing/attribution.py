"""Whose fault an exception is that ended a check: the plugin's code, or the kernel's when it used what that gave it."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from nemorl.errors import ForeignError, NemorlError


def describe(error: BaseException, module: str) -> str:
    """The exception, and its place in the plugin.

    Args:
        error: What ended the check.
        module: Of the entry point: everything in its top-level package is the plugin's.
    """
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, NemorlError):
        is_told = error.fix and not isinstance(error, ForeignError)  # whose fix is to look at the place that follows
        said = f"{error.message} (fix: {error.fix})" if is_told else error.message
    package = module.partition(".")[0]
    frames = [frame for cause in _causes(error) for frame in traceback.walk_tb(cause.__traceback__)]
    own = [place for place in frames if _package(place[0]) == package]
    if own:
        return f"the plugin raised {said}\n          at {_place(*own[-1])}"
    last = list(traceback.walk_tb(error.__traceback__))[-1:]
    place = f"\n          at {_place(*last[0])}" if last else ""
    return f"what the plugin gave cannot be used: {said}{place}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and what it was raised from: the last is the original."""
    while error is not None:
        yield error
        error = error.__cause__


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _place(frame: FrameType, line: int) -> str:
    """``acme_env/env.py:12, in score``"""
    depth = str(frame.f_globals.get("__name__", "")).count(".") + (Path(frame.f_code.co_filename).stem == "__init__")
    path = Path(*Path(frame.f_code.co_filename).parts[-1 - depth :])
    return f"{path}:{line}, in {frame.f_code.co_name}"
