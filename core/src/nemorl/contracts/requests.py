"""Generation backends that take requests one at a time, while others run."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol, runtime_checkable

from nemorl.contracts import GenerationBackend
from nemorl.types import Completion, GenerationRequest


@runtime_checkable
class RequestBackend(GenerationBackend, Protocol):
    """An engine that takes requests while others run (capability ``submit``); ``generate`` submits and waits.

    ``update_weights`` does not wait for running requests: each goes on, and every token after the update is drawn from
    the new weights alone, of which the completion says the first (``version_starts``). ``sleep`` is refused meanwhile.

    >>> future = engine.submit(GenerationRequest((5, 6), SamplingParams()))  # doctest: +SKIP
    >>> [one] = future.result()  # doctest: +SKIP
    """

    def submit(self, request: GenerationRequest) -> Future[list[Completion]]:
        """Begin a request and return at once, from any thread. It joins those that run and changes none of them.

        The future is given one completion per seed, or the error of this request alone. ``future.cancel()`` succeeds
        until then, and frees what the request holds before the engine's next step.
        """
        ...
