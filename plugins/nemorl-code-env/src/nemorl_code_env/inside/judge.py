"""The judge: runs a row's tests in a process of its own, and asks the program's process for what its functions return.

The tests are the only code here. The program's names are proxies that send a call and get plain data back, of exactly
the built-in types, so that comparisons, assertions and built-in functions are the judge's own. A program that says
something else, too much, or without being asked is not asked again, and no test passes from then on.
"""

from __future__ import annotations

import builtins
import json
import os
import secrets
import select
from typing import Any

import wire

PEER_IS_GONE = 3
"""Exit code: the program ended, or broke the protocol, before the tests did."""
TAMPERED = 4
"""Exit code: the program broke the protocol."""
NOT_PASSED_ON = (StopIteration, StopAsyncIteration, GeneratorExit)
"""Exceptions that mean something else in the judge: ``all(map(f, xs))`` holds if ``f`` raises the first."""
TYPES = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
"""Those that may be arguments."""
METHODS = ("__len__", "__getitem__", "__contains__", "__str__")
"""Special methods of the program's objects that can be asked for. Comparison and truth cannot: they are the judge's."""


class ProgramIsGone(BaseException):
    """No ``except`` clause of a test catches this."""


class ProgramError(Exception):
    """The program raised an exception that is not a built-in one."""


class TestRefusedError(Exception):
    """A test cannot be expressed as calls with plain data, whatever the program."""


class _Raised:
    """An answer that is an exception."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Channel:
    """Asks the program, one question at a time."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._replies, self._read = requests, replies, wire.reader(replies)
        self.broken = 0
        """The exit code that says why, or 0."""
        self.has_heard = False
        """What a test does may depend on the program from now on."""
        self.links: frozenset[str] = frozenset()
        """Of the test that runs."""

    def get(self, of: list[Any], path: tuple[str, ...] = (), *, keep: bool = False) -> Any:
        """A name of the program, or an attribute of one of its objects."""
        return self._ask({"do": "get", "of": of, "path": path, "keep": keep})

    def call(self, of: list[Any], path: tuple[str, ...], keep: bool, args: Any, named: Any) -> Any:
        """What a function of the program returns. Its exceptions are raised.

        Raises:
            TestRefusedError: an argument is no plain data.
        """
        try:
            data, named_data = (wire.encode(part, _encode_other) for part in (list(args), named))
            request = {"do": "call", "of": of, "path": path, "keep": keep, "args": data, "named": named_data}
            wire.pack({**request, "nonce": ""})  # the length
        except (wire.NotPlainError, RecursionError) as error:
            if self.has_heard:  # the argument may be what the program made of it
                raise
            raise TestRefusedError(f"an argument is {error}") from error
        return self._ask(request)

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
        self.has_heard |= what != "callable" or path != ()  # an attribute that is a function cannot be passed on
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
        return self._channel.get(self._of, (*self._path, name), keep=name in self._channel.links)

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
    if type(value) is type(iter([])):
        return wire.encode(list(value), _encode_other)
    if isinstance(value, type) and value in TYPES:
        return ["type", value.__name__]
    raise wire.NotPlainError(f"an object of type {type(value).__name__}, which is no plain data")


def _exception(name: Any, message: Any) -> Exception:
    kind = getattr(builtins, name, None) if type(name) is str else None
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, NOT_PASSED_ON):
        try:
            return kind(str(message))
        except TypeError:  # UnicodeDecodeError wants five arguments
            pass
    return ProgramError(f"{name}: {message}")


def _run(test: dict[str, Any], names: dict[str, Any], channel: Channel) -> str:
    """One test, and its verdict."""
    try:
        channel.links = frozenset(test["links"])
        channel.has_heard = channel.has_heard and test["uses_results"]
        for name in test["names"]:
            names[name] = channel.get(["name", name], keep=name in test["classes"])
        exec(compile(test["source"], "<test>", "exec"), names)
    except TestRefusedError as error:
        return f"refused {error}"
    except BaseException as error:
        if not test["names"] and not test["uses_results"]:
            return f"refused set-up fails with {type(error).__name__}: {error}"
        return "failed"
    return "failed" if channel.broken else "passed"


def main(tests: list[dict[str, Any]], requests: int, replies: int) -> int:
    """Run the tests in order; one line per test on standard output. The exit code says what became of the program."""
    verdicts = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    channel = Channel(requests, replies)
    names: dict[str, Any] = {"__name__": "tests"}
    try:
        channel.get(["name", "__name__"])  # it has been loaded
    except BaseException:
        return channel.broken or PEER_IS_GONE
    for test in tests:
        verdict = _run(test, names, channel)
        wire.write(verdicts, json.dumps(verdict[:500]).encode() + b"\n")
    return channel.broken
