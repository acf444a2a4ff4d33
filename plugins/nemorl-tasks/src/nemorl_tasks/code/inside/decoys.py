"""Programs that are none: what a row's tests do with them tells which tests check something, without looking at names.

A decoy answers every question in the same way. A test whose assertion does not hold with one of them, or that fails
with all of them, checks what a program does; the others only set something up. What the tests use as an object, and not
as plain data, is noted.
"""

from __future__ import annotations

from typing import Any

import wire

KINDS: tuple[Any, ...] = (False, True, None, 7, "decoy")
"""Answers of a decoy's functions. For a truth value: something that can be used as anything and is always this true;
the others are returned as they are."""
MAX_ASKED = 10_000
"""A test that goes on asking waits for an answer that does not come."""
PLAIN_ATTRIBUTES = frozenset().union(
    *(dir(kind) for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, range))
)


class TestRefusedError(Exception):
    """A test cannot be expressed as calls with plain data, whatever the program."""


class AskedTooOftenError(BaseException):
    """No ``except`` clause of a test catches this."""


class Decoys:
    """The names of a decoy."""

    broken = 0

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self.has_been_asked = self.has_answered = False
        self.objects: set[str] = set()
        """Names that gave something that was used as an object, or passed on as one."""
        self._asked = 0

    def name(self, name: str) -> Any:
        self.has_been_asked = True
        return Decoy(self, name, is_result=False)

    def count(self) -> None:
        self.has_answered = True
        self._asked += 1
        if self._asked > MAX_ASKED:
            raise AskedTooOftenError

    def begin(self) -> None:
        """The next test."""
        self._asked = 0


class Decoy:
    """A name of the program, or what one of them gave."""

    def __init__(self, decoys: Decoys, of: str, *, is_result: bool) -> None:
        vars(self).update(_decoys=decoys, _of=of, _is_result=is_result)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        is_class = self._of[0].isupper()
        if not is_class and not self._is_result:
            raise AttributeError(f"{self._of} is used as a class or a module, and is neither")
        self._decoys.count()
        if name not in PLAIN_ATTRIBUTES or is_class:
            self._decoys.objects.add(self._of)
        return Decoy(self._decoys, name, is_result=True)

    def __setattr__(self, name: str, value: Any) -> None:
        self._decoys.objects.add(self._of)

    def __call__(self, *args: Any, **named: Any) -> Any:
        try:
            for given in (list(args), named):
                wire.encode(given, self._pass_on)
        except (wire.NotPlainError, RecursionError) as error:
            if self._decoys.has_answered:  # the argument may be what was made of an answer
                raise
            raise TestRefusedError(error) from error
        self._decoys.count()
        return self._same() if isinstance(self._decoys.kind, bool) else self._decoys.kind

    def _pass_on(self, value: Any) -> Any:
        if type(value) is not Decoy:
            return wire.encode_argument(value, self._pass_on)
        if value._is_result and value._of[0].isupper():
            self._decoys.objects.add(value._of)
        return None

    def _same(self, *_: Any) -> Any:
        self._decoys.count()
        return Decoy(self._decoys, self._of, is_result=True)

    def _truth(self, *_: Any) -> bool:
        self._decoys.count()
        return bool(self._decoys.kind)

    def __len__(self) -> int:
        return int(self._truth())

    def __float__(self) -> float:
        return float(self._truth())

    def __iter__(self) -> Any:
        return iter([self._same()] * len(self))

    def __str__(self) -> str:
        self._decoys.count()
        return "decoy"

    def __format__(self, form: str) -> str:
        return str(self)

    def __hash__(self) -> int:
        return 0

    def _nothing(self, *_: Any) -> None:
        self._decoys.count()

    __int__ = __index__ = __len__
    __bool__ = __contains__ = _truth
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _truth  # type: ignore[assignment]
    __neg__ = __pos__ = __abs__ = __invert__ = __round__ = __getitem__ = __next__ = __enter__ = _same
    __setitem__ = __delitem__ = __exit__ = _nothing


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "and", "or", "xor"):
    for _side in ("", "r"):
        setattr(Decoy, f"__{_side}{_name}__", Decoy._same)
