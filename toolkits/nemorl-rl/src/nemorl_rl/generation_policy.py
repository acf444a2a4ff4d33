"""The driver's handle of the generator: it spreads requests over replicas, and has lost ones replaced."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from nemorl.contracts import WorkerGroup
from nemorl.errors import WeightsLostError, WorkerLostError
from nemorl.types import Completion, GenerationRequest
from nemorl.weights import WeightHandle

from nemorl_rl.tenants import ROLLOUT, SYNC

T = TypeVar("T")


class GenerationPolicy:
    """A generation backend over a worker group, seen as one object."""

    def __init__(
        self,
        workers: WorkerGroup,
        revive: Callable[[WorkerLostError], None] | None = None,
        turn: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
        on_update: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            workers: Independent replicas of one engine.
            revive: Replaces lost replicas with ones that hold the newest weights, or raises the error it is given.
            turn: Gives it the devices for a phase (``nemorl_rl.tenants``), where it shares them.
            on_update: Told when all replicas have new weights.
        """
        self.workers, self._turn, self._on_update = workers, turn, on_update
        self._revive = revive
        self._lives = 0
        self._reviving = threading.Lock()

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """One list of completions per request, in order.

        When a replica is lost it is replaced and all requests are made again: their seeds give the same tokens.
        """
        return self._with_replacements(lambda: self._generate(requests))

    def _generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        replicas = self.workers.data_parallel_size
        shards = [list(requests[rank::replicas]) for rank in range(replicas)]
        with self._turn(ROLLOUT):
            parts = self.workers.scatter("generate", [(shard,) for shard in shards])
        ordered: list[list[Completion]] = [[] for _ in requests]
        for rank, part in enumerate(parts):
            ordered[rank::replicas] = part
        return ordered

    def update_weights(self, handle: WeightHandle) -> int | None:
        """Every replica generates from these weights from now on. Returns the bytes that each read, if they count."""
        return self._with_replacements(lambda: self._update_weights(handle))

    def _update_weights(self, handle: WeightHandle) -> int | None:
        with self._turn(SYNC):
            read: list[int | None] = self.workers.call("update_weights", handle, handle.version)
        self._on_update()
        return read[0]

    def _with_replacements(self, call: Callable[[], T]) -> T:
        """The result of ``call``, made again whenever a replica was lost and replaced."""
        while True:
            life = self._lives
            try:
                return call()
            except WeightsLostError:
                raise  # it is the trainer who died
            except WorkerLostError as error:
                self._replace_lost(error, life)

    def _replace_lost(self, error: WorkerLostError, life: int) -> None:
        """Once per loss, however many threads notice it; ``life`` is when the caller last saw the replicas."""
        if self._revive is None:
            raise error
        with self._reviving:
            if self._lives == life:
                self._revive(error)
                self._lives += 1

    def shutdown(self) -> None:
        self.workers.shutdown()
