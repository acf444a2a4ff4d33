"""The judge: runs a row's tests in a process of its own, and asks the program's process for what its functions return.

The tests are the only code here. Names that neither they nor Python define are the program's: proxies that send a call
and get plain data back, of exactly the built-in types, so that comparisons, assertions and built-in functions are the
judge's own. A program that says something else, too much, or without being asked is not asked again, and no test passes
from then on. A row is tried first, with decoys in the place of a program (``decoys.py``).
"""

from __future__ import annotations

import ast
import builtins
import dis
import importlib
import json
import os
import secrets
import select
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import wire
from decoys import KINDS, Decoys, TestRefusedError

PEER_IS_GONE = 3
"""Exit code: the program ended, or broke the protocol, before the tests did."""
TAMPERED = 4
"""Exit code: the program broke the protocol."""
NOT_PASSED_ON = (StopIteration, StopAsyncIteration, GeneratorExit)
"""Exceptions that mean something else in the judge: ``all(map(f, xs))`` holds if ``f`` raises the first."""
MODULE = "solution"
"""The program, where a test imports from it."""
TEST = "<test>"
SHOWN = 500
"""Characters of why a test fails."""
METHODS = ("__len__", "__getitem__", "__contains__", "__str__")
"""Special methods of the program's objects that can be asked for. Comparison and truth cannot: they are the judge's."""


class ProgramIsGone(BaseException):
    """No ``except`` clause of a test catches this."""


class ProgramError(Exception):
    """The program raised an exception that is not a built-in one."""


class _Raised:
    """An answer that is an exception."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Channel:
    """Asks the program, one question at a time."""

    has_been_asked = True
    """A failure may be its fault."""

    def __init__(self, requests: int, replies: int, objects: frozenset[str]) -> None:
        """
        Args:
            requests: Descriptor to the program.
            replies: Descriptor from it.
            objects: Names that may give objects, to be used or passed on.
        """
        self._requests, self._replies, self._read = requests, replies, wire.reader(replies)
        self._objects = objects
        self.broken = 0
        """The exit code that says why, or 0."""

    def name(self, name: str) -> Any:
        """The program's object of this name."""
        return self.get(["name", name])

    def get(self, of: list[Any], path: tuple[str, ...] = ()) -> Any:
        """A name of the program, or an attribute of one of its objects."""
        return self._ask({"do": "get", "of": of, "path": path, "keep": (*of, *path)[-1] in self._objects})

    def call(self, of: list[Any], path: tuple[str, ...], keep: bool, args: Any, named: Any) -> Any:
        """The result of a function of the program. Its exceptions are raised.

        Raises:
            NotPlainError: an argument is no plain data.
        """
        data, named_data = (wire.encode(part, _encode_other) for part in (list(args), named))
        return self._ask({"do": "call", "of": of, "path": path, "keep": keep, "args": data, "named": named_data})

    def _ask(self, request: dict[str, Any]) -> Any:
        nonce = secrets.token_hex(8)
        reply = self._exchange(wire.pack({**request, "nonce": nonce}), nonce)
        of, path, keep = request["of"], request["path"], request["keep"]
        try:
            answer = self._read_reply(reply, of, path, keep)
        except (wire.ProtocolError, RecursionError, MemoryError):
            raise self._breaks(TAMPERED) from None
        if isinstance(answer, _Raised):
            raise answer.error
        return answer

    def _exchange(self, request: bytes, nonce: str) -> dict[str, Any]:
        if self.broken:
            raise ProgramIsGone
        if select.select([self._replies], [], [], 0)[0]:
            # It spoke before it was asked, or closed its end.
            raise self._breaks(TAMPERED if os.read(self._replies, 1) else PEER_IS_GONE)
        try:
            wire.write(self._requests, request)
            reply = wire.unpack(self._read)
        except (EOFError, BrokenPipeError):
            raise self._breaks(PEER_IS_GONE) from None
        except wire.ProtocolError:
            raise self._breaks(TAMPERED) from None
        if reply.pop("nonce", None) != nonce or len(reply) != 1:
            raise self._breaks(TAMPERED)
        return dict(reply)

    def _read_reply(self, reply: dict[str, Any], of: list[Any], path: tuple[str, ...], keep: bool) -> Any:
        ((what, content),) = reply.items()
        if what == "value":
            return wire.decode(content, _no_other)
        if what == "object" and keep and type(content) is int:
            return Object(self, ["object", content])
        if what == "callable":
            return (Class if keep else Function)(self, of, path)
        if what == "missing":
            return _Raised(NameError(f"the program defines no {of[1]!r}"))
        if what == "not_plain":
            return _Raised(ProgramError(f"returned {content!s:.300}"))
        if what == "raised" and type(content) is list and len(content) == 2:
            return _Raised(_exception(*content))
        raise wire.ProtocolError(what)

    def _breaks(self, code: int) -> ProgramIsGone:
        self.broken = code
        return ProgramIsGone()


class Function:
    """A function of the program, or a method of one of its objects."""

    def __init__(self, channel: Channel, of: list[Any], path: tuple[str, ...] = ()) -> None:
        self._channel, self._of, self._path = channel, of, path

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._channel.call(self._of, self._path, False, args, named)


class Object:
    """An object of the program. Its attributes are plain data or, where a test goes on from them, objects."""

    def __init__(self, channel: Channel, of: list[Any], path: tuple[str, ...] = ()) -> None:
        vars(self).update(_channel=channel, _of=of, _path=path)

    def __getattr__(self, name: str) -> Any:
        return self._channel.get(self._of, (*self._path, name))

    def __eq__(self, other: object) -> Any:
        raise TypeError("objects of the program cannot be compared, only plain data")

    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise TypeError("an object of the program is neither true nor false here, only plain data is")

    def __setattr__(self, name: str, value: Any) -> None:
        self._channel.call(self._of, (*self._path, "__setattr__"), False, (name, value), {})


class Class(Object):
    """A class of the program: calling it makes an object that stays there."""

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._channel.call(self._of, self._path, True, args, named)


def _special(name: str) -> Any:
    def method(self: Object, *args: Any) -> Any:
        return self._channel.call(self._of, (*self._path, name), False, args, {})

    return method


for _name in METHODS:
    setattr(Object, _name, _special(_name))


def _no_other(kind: str, content: Any) -> Any:
    raise wire.ProtocolError(kind)


def _encode_other(value: Any) -> Any:
    if isinstance(value, Object | Function) and not value._path:
        return value._of
    return wire.encode_argument(value, _encode_other)


def _exception(name: Any, message: Any) -> Exception:
    kind = getattr(builtins, name, None) if type(name) is str else None
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, NOT_PASSED_ON):
        try:
            return kind(str(message))
        except TypeError:  # UnicodeDecodeError wants five arguments
            pass
    return ProgramError(f"{name}: {message}")


@dataclass(frozen=True)
class _Test:
    """One statement, or several, ready to be run."""

    code: types.CodeType | None
    problem: str = ""
    """Why there is no code."""
    modules: frozenset[str] = frozenset()
    """Of the standard library, that it uses without importing them."""
    built_ins: frozenset[str] = frozenset()
    """Functions of these names have their results asserted right away."""


class _Names(dict[str, Any]):
    """Built-in names, and for all others those of the program, asked for once per test."""

    def __init__(self, ask: Callable[[str], Any], without: frozenset[str]) -> None:
        super().__init__({name: value for name, value in vars(builtins).items() if name not in without})
        self._ask = ask
        self._known: dict[str, Any] = {}
        self._modules: frozenset[str] = frozenset()

    def begin(self, test: _Test) -> None:
        self._known, self._modules = {}, test.modules

    def __missing__(self, name: str) -> Any:
        if name.startswith("__"):
            raise KeyError(name)
        if name in self._modules:
            return importlib.import_module(name)
        if name not in self._known:
            self._known[name] = self._ask(name)
        return self._known[name]


class _Program(types.ModuleType):
    """``from solution import …``"""

    __all__ = ()

    def __init__(self, ask: Callable[[str], Any]) -> None:
        super().__init__(MODULE)
        self.__dict__["_ask"] = ask

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask(name)


def _read(source: str) -> _Test:
    try:
        tree = ast.parse(source)
        code = compile(tree, TEST, "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return _Test(None, f"it is no Python ({error})")
    with_attributes = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    bases = {node.id for node in with_attributes if isinstance(node, ast.Name)}
    return _Test(
        code,
        modules=frozenset(bases & sys.stdlib_module_names),
        built_ins=frozenset(name for name in _asserted_calls(tree) if hasattr(builtins, name)),
    )


def _asserted_calls(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            subject = node.test.left if isinstance(node.test, ast.Compare) else node.test
            if isinstance(subject, ast.Call) and isinstance(subject.func, ast.Name):
                yield subject.func.id


def _verdicts(tests: list[_Test], program: Any, without: frozenset[str]) -> Iterator[str]:
    """``passed``, or how it fails and why, of each test in order.

    ``checked``: an assertion does not hold, or the test itself raises. ``failed``: something else raises. ``refused``:
    no program is to blame.
    """
    built_ins = _Names(program.name, without)
    names: dict[str, Any] = {"__name__": "tests", "__builtins__": built_ins}
    sys.modules[MODULE] = _Program(program.name)
    for test in tests:
        built_ins.begin(test)
        yield _verdict(test, names, program)


def _verdict(test: _Test, names: dict[str, Any], program: Any) -> str:
    if test.code is None:
        return f"refused {test.problem}"
    try:
        exec(test.code, names)
    except TestRefusedError as error:
        return f"refused {error}"
    except BaseException as error:
        problem = f"{type(error).__name__}: {error}"
        if not program.has_been_asked:
            return f"refused it fails before it asks anything: {problem}"
        return f"checked {problem}" if _is_check(error) else f"failed {problem}"
    return "failed" if program.broken else "passed"


def _is_check(error: BaseException) -> bool:
    """An assertion, or a ``raise`` of the tests."""
    trace = error.__traceback__
    assert trace is not None  # it was raised
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return isinstance(error, AssertionError) or (
        code.co_filename == TEST and dis.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
    )


def main(tests: dict[str, Any], requests: int, replies: int) -> int:
    """Run the tests in order; one line per test on standard output. The exit code says what became of the program."""
    output = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def say(word: Any) -> None:
        wire.write(output, json.dumps(word).encode() + b"\n")

    read, without = [_read(source) for source in tests["sources"]], frozenset(tests["without"])
    if tests["is_trial"]:
        _try(read, say)
        return 0
    channel = Channel(requests, replies, frozenset(tests["objects"]))
    try:
        channel.name("__name__")  # it has been loaded
    except BaseException:
        return channel.broken or PEER_IS_GONE
    for verdict in _verdicts(read, channel, without):
        say(verdict[:SHOWN])
    return channel.broken


def _try(tests: list[_Test], say: Callable[[Any], None]) -> None:
    """The tests with each decoy; one line per test and decoy."""
    # `assert sum(10, 15) == 6`: a row that asks for nothing may mean functions that are named like built-in ones.
    first = Decoys(KINDS[0])
    for _ in _verdicts(tests, first, frozenset()):
        first.begin()
    without = frozenset[str]()
    if not first.has_been_asked:
        without = without.union(*(test.built_ins for test in tests))
    for kind in KINDS:
        decoys = Decoys(kind)
        for number, verdict in enumerate(_verdicts(tests, decoys, without)):
            decoys.begin()
            say([number, verdict[:SHOWN], sorted(decoys.objects), sorted(without)])
