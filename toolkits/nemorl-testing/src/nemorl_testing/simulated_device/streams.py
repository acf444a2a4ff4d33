"""Streams of the simulated device. Work is done at once; what would run side by side is followed by vector clocks.

Each stream counts its operations. It knows of another's as far as an event, or the host, has made it wait. Memory
remembers who wrote and read it last: an operation that reads what another stream wrote, without knowing of it, is the
race that shows on CUDA now and then, and here always. (Lamport, 1978; Mattern, 1988.)

Copies to page-locked memory that the host does not wait for are done when it waits for their stream, and not before:
until then the host reads nonsense there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from nemorl_testing.simulated_device import waits

_numbers = count()
_local = threading.local()
_streams: list[Stream] = []


class StreamError(RuntimeError):
    """Work of one stream used what another had not finished."""


@dataclass(eq=False)
class Stream:
    """What ``torch.cuda.Stream`` is on CUDA."""

    device: Any = None
    priority: int = 0
    number: int = field(default_factory=lambda: next(_numbers))
    done: int = 0
    """Operations so far."""
    knows: dict[int, int] = field(default_factory=dict)
    """Of other streams' operations: those that come before all that this one does from now on."""
    late: list[tuple[int, Callable[[], object]]] = field(default_factory=list)
    """Copies to the host that are under way: after which operation, and what does them."""

    def __post_init__(self) -> None:
        _streams.append(self)

    def __enter__(self) -> Stream:
        _entered().append(self)
        return self

    def __exit__(self, *_error: Any) -> None:
        _entered().pop()

    def record_event(self, event: Event | None = None) -> Event:
        """An event after all that was asked of it so far."""
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """What is asked of it from now on comes after the event."""
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        """What is asked of it from now on comes after what was asked of the other so far."""
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        """The host waits for all that was asked of it."""
        waits.wait()
        self.reached(self.done)

    def reached(self, position: int) -> None:
        """The host knows that it has come so far: copies to the host are done."""
        while self.late and self.late[0][0] <= position:
            self.late.pop(0)[1]()

    def query(self) -> bool:
        """Whether all is done."""
        return not self.late

    def follows(self, stream: Stream, position: int) -> bool:
        """Whether what is asked of it now comes after that operation."""
        return stream is self or self.knows.get(stream.number, 0) >= position


class Event:
    """What ``torch.cuda.Event`` is on CUDA."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._stream: Stream | None = None
        self._position = 0
        self._known: dict[int, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        """It stands after all that was asked of the stream so far."""
        self._stream = stream or current()
        self._position, self._known = self._stream.done, dict(self._stream.knows)

    def wait(self, stream: Stream | None = None) -> None:
        """The stream waits for it; the host does not."""
        stream = stream or current()
        if self._stream is None:
            return
        for number, position in {**self._known, self._stream.number: self._position}.items():
            stream.knows[number] = max(stream.knows.get(number, 0), position)

    def synchronize(self) -> None:
        """The host waits for it."""
        waits.wait()
        if self._stream is not None:
            self._stream.reached(self._position)

    def query(self) -> bool:
        """Whether it has been reached."""
        return self._stream is None or all(position > self._position for position, _ in self._stream.late)

    def elapsed_time(self, _other: Event) -> float:
        """0: nothing takes time here."""
        return 0.0


@dataclass(eq=False)
class Uses:
    """Of a piece of memory, on the device or page-locked: who wrote it, and who has read that."""

    written: tuple[Stream, int] | None = None
    read: dict[Stream, int] = field(default_factory=dict)

    def reads(self, stream: Stream, what: str) -> None:
        """The stream's next operation reads it."""
        self._require(stream, self.written, f"{what} reads what another stream writes")
        self.read[stream] = stream.done + 1

    def writes(self, stream: Stream, what: str) -> None:
        """The stream's next operation writes it."""
        self._require(stream, self.written, f"{what} writes what another stream writes")
        for reader, position in self.read.items():
            self._require(stream, (reader, position), f"{what} writes what another stream reads")
        self.written, self.read = (stream, stream.done + 1), {}

    def is_done(self, stream: Stream, others: Collection[Stream] = ()) -> bool:
        """Whether all uses, but those of the others, come before what is asked of the stream now."""
        uses = [*self.read.items(), *([self.written] if self.written else [])]
        return all(stream.follows(*use) for use in uses if use[0] not in others)

    def _require(self, stream: Stream, use: tuple[Stream, int] | None, what: str) -> None:
        if use is not None and not stream.follows(*use):
            raise StreamError(f"{what}: stream {stream.number} has not waited for stream {use[0].number}")


DEFAULT = Stream()


def current(_device: Any = None) -> Stream:
    """That of this thread."""
    entered = _entered()
    return entered[-1] if entered else DEFAULT


def _entered() -> list[Stream]:
    """Those that this thread is within, the innermost last."""
    if not hasattr(_local, "entered"):
        _local.entered = []
    entered: list[Stream] = _local.entered
    return entered


@contextmanager
def on(stream: Stream | None) -> Iterator[None]:
    """Within it, this thread's work is the stream's."""
    if stream is None:
        yield
        return
    with stream:
        yield


def synchronize(_device: Any = None) -> None:
    """The host waits for all that was asked of the device."""
    waits.wait()
    for stream in _streams:
        stream.reached(stream.done)
        for other in _streams:
            other.knows[stream.number] = stream.done
