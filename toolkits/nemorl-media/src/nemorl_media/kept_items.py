"""What a process keeps of items: processed ones, those used last, and of each item one copy. Any thread may ask."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

from nemorl.media import Media

_HELD: WeakValueDictionary[str, Media] = WeakValueDictionary()
_HOLDING = Lock()


def one_copy(media: Media) -> Media:
    """The item, or the one of the same digest that somebody holds already: of an image that a conversation shows again
    with every turn, memory holds one.

    Example:
        >>> held = one_copy(Media("image", b"..."))
        >>> one_copy(Media("image", b"...")) is held
        True
    """
    with _HOLDING:
        return _HELD.setdefault(media.digest, media)


class Sized(Protocol):
    """Something that takes up memory."""

    @property
    def nbytes(self) -> int: ...


Kept = TypeVar("Kept", bound=Sized)


class KeptItems(Generic[Kept]):
    """A cache by digest. A copy in another process begins empty."""

    def __init__(self, max_bytes: int) -> None:
        """
        Args:
            max_bytes: Of all that is kept, but that what was kept last always is.
        """
        self._max_bytes, self._held = max_bytes, 0
        self._items: OrderedDict[str, Kept] = OrderedDict()
        self._lock, self._making = Lock(), Lock()

    def made(self, digest: str, make: Callable[[], Kept]) -> Kept:
        """What is kept under this digest, made now if there is none.

        One is made at a time: who asks for the same one meanwhile gets it, and a decoded image may take 200 MB.
        """
        found = self.get(digest)
        if found is not None:
            return found
        with self._making:
            found = self.get(digest)
            if found is None:
                found = make()
                self.keep(digest, found)
            return found

    def get(self, digest: str) -> Kept | None:
        """What was kept under this digest, if it still is."""
        with self._lock:
            found = self._items.get(digest)
            if found is not None:
                self._items.move_to_end(digest)
            return found

    def keep(self, digest: str, item: Kept) -> None:
        """Keep it, in place of what was used longest ago."""
        with self._lock:
            old = self._items.pop(digest, None)
            self._items[digest] = item
            self._held += item.nbytes - (0 if old is None else old.nbytes)
            while self._held > self._max_bytes and len(self._items) > 1:
                self._held -= self._items.popitem(last=False)[1].nbytes

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._max_bytes,)
