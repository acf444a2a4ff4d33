"""Fingerprints of the code that a user wrote for a run's rewards, so that a continued run can say that it changed.

Of a function or class: its source, that of the functions and classes of the same module that it names, and the
constants that it reads. Of a file that a config names (``rewards.py:correct``, an agent's program): its bytes. What
these import is not looked at; plugins have their versions and hashes in ``plugins.lock.json``.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from nemorl.config import RESUMABLE
from nemorl.contracts.environment import Environment
from nemorl.errors import StorageError
from pydantic import BaseModel

from nemorl_rl.data.fingerprints import DIGITS, file_digest
from nemorl_rl.environments.composition import ChainEnvironment, Part, WeightedEnvironment
from nemorl_rl.environments.functions import RewardFunction

CONSTANTS = (str, bytes, int, float, bool, tuple, frozenset, type(None))


def code_fingerprints(source: Any) -> dict[str, str]:
    """Name or file -> digest, of whatever ``fit`` takes as a reward; what has no source is left out.

    Example:
        >>> code_fingerprints(["math", print])
        {}
    """
    if isinstance(source, Mapping):
        return _all(source.values())
    if isinstance(source, list | tuple):
        return _all(source)
    if isinstance(source, Part):
        return code_fingerprints(source.environment)
    if isinstance(source, BaseModel):
        fields = type(source).model_fields  # what may differ in a continuation is no code: a judge's cache grows
        return _all(getattr(source, name) for name, field in fields.items() if RESUMABLE not in field.metadata)
    if isinstance(source, str | Path):
        return _of_file(str(source))
    if isinstance(source, WeightedEnvironment | ChainEnvironment):
        return _all(source.parts.values())
    if isinstance(source, RewardFunction):
        return _of_code(source.function)
    return _of_code(source) if callable(source) or isinstance(source, Environment) else {}


def _all(sources: Any) -> dict[str, str]:
    return {name: digest for source in sources for name, digest in code_fingerprints(source).items()}


def _of_file(text: str) -> dict[str, str]:
    """Of ``file`` or ``file.py:function``, where there is such a file."""
    for name in (text, text.rpartition(":")[0]):
        path = Path(name)
        with suppress(OSError, ValueError, StorageError):  # any text may be no path at all
            if (path.suffix or path.name != name) and path.is_file():  # a lone word is more often none
                return {name: file_digest(path)}
    return {}


def _of_code(thing: Any) -> dict[str, str]:
    while isinstance(thing, partial):
        thing = thing.func
    thing = inspect.unwrap(getattr(thing, "__func__", thing))
    if not (inspect.isfunction(thing) or inspect.isclass(thing)):
        thing = type(thing)
    own = vars(thing).values() if inspect.isclass(thing) else (thing,)
    if not any(inspect.isfunction(getattr(each, "__func__", each)) for each in own):
        return {}  # compiled
    digest = hashlib.sha256()
    try:
        for part in _reached(thing, thing.__module__, set()):
            digest.update(part.encode(errors="surrogatepass"))
    except (OSError, TypeError):  # typed into an interpreter that keeps no lines
        return {}
    return {f"{thing.__module__}.{thing.__qualname__}": digest.hexdigest()[:DIGITS]}


def _reached(thing: Any, module: str, seen: set[int]) -> Iterator[str]:
    """The source of a function or class of ``module``, and of all there that it names; constants as text."""
    if isinstance(thing, CONSTANTS):
        yield repr(thing)
    if id(thing) in seen or not (inspect.isfunction(thing) or inspect.isclass(thing)) or thing.__module__ != module:
        return
    seen.add(id(thing))
    if inspect.isclass(thing):
        for name, value in vars(thing).items():
            if not name.startswith("__") or callable(value):
                yield name
                yield from _reached(getattr(value, "__func__", value), module, seen)
    else:
        yield inspect.getsource(thing)
        yield from _read_by(thing, module, seen)


def _read_by(function: FunctionType, module: str, seen: set[int]) -> Iterator[str]:
    """The globals of ``module`` and the variables around it that a function reads."""
    read = {name: function.__globals__.get(name) for name in sorted(_names(function.__code__))}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it is not filled yet
            read[name] = cell.cell_contents
    for name, value in read.items():
        yield name
        yield from _reached(value, module, seen)


def _names(code: CodeType) -> set[str]:
    """Global names of a function and of those inside it."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names}.union(*map(_names, inner))
