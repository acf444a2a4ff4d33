"""The program's side of a judgement: loads ``solution.py`` and answers what the judge asks of it.

It runs in the program's process, as text after ``wire.py``, and is at the program's mercy: whatever the program changes
here, it can but answer with other plain data, or not at all. It knows no tests, only the calls that they make.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

from wire import MAX_ITEMS, NotPlainError, ProtocolError, decode, encode, pack, reader, unpack, write

PLAIN_BASES = (bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset)


class Program:
    """The names of a program, and its objects that the judge has asked for."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module
        self._objects: list[Any] = []

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            target = self._resolve(request["of"])
            for attribute in request["path"]:
                target = getattr(target, attribute)
        except (AttributeError, KeyError) as error:
            return {"raised": ["AttributeError", str(error)]} if request["path"] else {"missing": True}
        try:
            if request["do"] == "get":
                return {"callable": True} if callable(target) else self._value(target, request["keep"])
            arguments = decode(request["args"], self._decode_other)
            named = decode(request["named"], self._decode_other)
            return self._value(target(*arguments, **named), request["keep"])
        except NotPlainError as error:
            return {"not_plain": str(error)[:300]}
        except BaseException as error:  # sys.exit() ends a call, not the program
            return {"raised": [type(error).__name__, str(error)[:1000]]}

    def _resolve(self, reference: Any) -> Any:
        kind, content = reference
        return self._objects[content] if kind == "object" else vars(self._module)[content]

    def _decode_other(self, kind: str, content: Any) -> Any:
        if kind == "type":
            return vars(builtins)[content]
        if kind not in ("object", "name"):
            raise ProtocolError(kind)
        return self._resolve((kind, content))

    def _value(self, value: Any, keep: bool) -> dict[str, Any]:
        try:
            return {"value": encode(value, _refuse if keep else _encode_other)}
        except NotPlainError:
            if not keep:
                raise
        self._objects.append(value)
        return {"object": len(self._objects) - 1}


def _refuse(value: Any) -> Any:
    raise NotPlainError(type(value).__name__)


def _encode_other(value: Any) -> Any:
    """Subclasses of plain types as these, numpy's numbers and arrays as Python's, iterators as what they yield."""
    if isinstance(value, dict):
        return encode(dict(value), _encode_other)
    for base in PLAIN_BASES:
        if isinstance(value, base):
            return encode(base(value), _encode_other)  # type: ignore[arg-type]
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.generic, numpy.ndarray)):
        return encode(value.tolist(), _encode_other)
    if isinstance(value, Iterator):
        items = []
        for item in value:
            items.append(encode(item, _encode_other))
            if len(items) > MAX_ITEMS:
                raise NotPlainError(f"an iterator of more than {MAX_ITEMS} items")
        return ["iterator", items]
    raise NotPlainError(f"an object of type {type(value).__name__}, which is no plain data")


def _load() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("solution", "solution.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["solution"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def main(requests: int, replies: int) -> None:
    for fd in (requests, replies):
        os.set_inheritable(fd, False)
    program = Program(_load())
    read = reader(requests)
    while True:
        try:
            request = unpack(read)
        except EOFError:
            return
        try:
            reply = pack({**program.answer(request), "nonce": request["nonce"]})
        except NotPlainError as error:
            reply = pack({"not_plain": str(error), "nonce": request["nonce"]})
        write(replies, reply)


main(int(sys.argv[1]), int(sys.argv[2]))
