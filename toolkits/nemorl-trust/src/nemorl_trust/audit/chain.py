"""An entry of an audit log: one line of JSON that names the line before it by its hash, and may carry a seal.

The hash is SHA-256 of the line without ``hash`` and ``seal``, keys sorted, no spaces. So a changed, dropped or added
line shows, unless everything after it is written anew. A seal ends that: HMAC-SHA256 of the hash under a key that is
replaced by its own hash after each entry. Who gets at the machine later finds only the newest key, and cannot make
seals of entries before (Schneier and Kelsey, "Secure audit logs to support computer forensics", 1999).
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

GENESIS = "0" * 64
"""Hash that the first entry names in the place of an earlier one."""
KEY_BYTES = 32
END_OF_TIME = 1e11
"""Epoch seconds of the year 5138: calendars can show what is dated before."""
_KEY_WORD = "nemorl-audit-key"


@dataclass(frozen=True)
class Entry:
    """One line."""

    n: int
    """Its number, from 0."""
    time: float
    """Epoch seconds."""
    host: str
    user: str
    """By the operating system's user id, not by an environment variable."""
    uid: int
    pid: int
    event: str
    facts: Mapping[str, Any]
    previous: str
    """Hash of the entry before it."""
    debris: Mapping[str, Any] | None = None
    """``bytes`` and ``sha256`` of what a crashed writer left before this line."""
    hash: str = ""
    seal: str | None = None

    def chained(self) -> Self:
        """With its hash."""
        return replace(self, hash=hashlib.sha256(_rendered(self._content())).hexdigest())

    def sealed(self, key: bytes) -> Self:
        """With its seal."""
        return replace(self, seal=seal_of(self.hash, key))

    def line(self) -> bytes:
        """As it is written, without a newline."""
        seal = {} if self.seal is None else {"seal": self.seal}
        return _rendered({**self._content(), "hash": self.hash, **seal})

    def _content(self) -> dict[str, Any]:
        left_out = ("hash", "seal") if self.debris is not None else ("hash", "seal", "debris")
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in left_out}

    @classmethod
    def read(cls, line: bytes) -> Self | None:
        """The entry of a line whose hash is right; ``None`` for any other text, also where only its layout differs."""
        try:
            entry = cls(**json.loads(line))
            is_own = entry._is_sound() and entry.line() == line and entry.chained().hash == entry.hash
        except (ValueError, TypeError, RecursionError):
            return None
        return entry if is_own else None

    def _is_sound(self) -> bool:
        """Each field is of its kind: who makes lines by hand may write anything."""
        texts = (self.host, self.user, self.event, self.previous, self.hash, self.seal or "")
        return (
            all(type(number) is int for number in (self.n, self.uid, self.pid))
            and type(self.time) in (int, float)
            and 0 <= self.time < END_OF_TIME
            and all(isinstance(text, str) for text in texts)
            and isinstance(self.facts, dict)
            and isinstance(self.debris, dict | None)
        )


@dataclass(frozen=True)
class SealingKey:
    """The key of one entry's seal."""

    n: int
    """Of the entry."""
    secret: bytes

    def at(self, n: int) -> SealingKey:
        """The key of a later entry."""
        secret = self.secret
        for _ in range(n - self.n):
            secret = hashlib.sha256(b"nemorl audit key" + secret).digest()
        return SealingKey(n, secret)

    def text(self) -> str:
        """One line, which :meth:`parse` reads."""
        return f"{_KEY_WORD} {self.n} {self.secret.hex()}"

    @classmethod
    def parse(cls, text: str) -> SealingKey | None:
        """The key that a text holds; ``None`` where it holds none."""
        match text.split():
            case [word, n, secret] if word == _KEY_WORD and n.isdecimal() and len(secret) == 2 * KEY_BYTES:
                try:
                    return cls(int(n), bytes.fromhex(secret))
                except ValueError:
                    return None
        return None


def seal_of(digest: str, key: bytes) -> str:
    return hmac.new(key, digest.encode(), hashlib.sha256).hexdigest()


def debris_of(text: bytes) -> dict[str, Any]:
    """Record of an entry about the bytes before it that are no entry."""
    return {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}


def _rendered(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
