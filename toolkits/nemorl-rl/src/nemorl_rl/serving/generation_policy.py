"""The driver's handle of the generator: it spreads requests over replicas, and has lost ones replaced."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from nemorl.contracts import GenerationBackend, ProvingBackend, ReportingSampler, WorkerGroup
from nemorl.errors import BackendError, WeightsLostError, WorkerLostError
from nemorl.metrics import Metrics, merge
from nemorl.types import Completion, GenerationRequest
from nemorl.weights import Digest, WeightHandle

from nemorl_rl.placement.tenants import ROLLOUT, SYNC, Phase
from nemorl_rl.serving.request_desk import RequestDesk
from nemorl_rl.serving.routing import beginnings_of

T = TypeVar("T")

REPORTS = "generation_metrics"
"""The capability of backends with metrics of their own."""


@dataclass(frozen=True)
class RequestLimits:
    """The limits of single requests."""

    per_replica: int
    """Most that run on one replica; the others wait."""
    deadline_s: float
    """Longest time to an answer, unless a request is given another one."""


class GenerationPolicy:
    """A generation backend over a worker group, seen as one object."""

    def __init__(
        self,
        workers: WorkerGroup,
        revive: Callable[[WorkerLostError], None] | None = None,
        turn: Callable[[Phase], AbstractContextManager[None]] = lambda _: nullcontext(),
        on_update: Callable[[], None] = lambda: None,
        single_requests: RequestLimits | None = None,
        reports: bool = False,
        takes_versions: bool = False,
        constrains: bool = False,
        ranks: Callable[[], Sequence[int]] | None = None,
        joined: Callable[[], int] = lambda: 0,
    ) -> None:
        """
        Args:
            workers: Independent replicas of one engine.
            revive: Replaces lost replicas with ones that hold the newest weights, or raises the error it is given.
            turn: Gives it the devices for a phase (``nemorl_rl.placement.tenants``), where it shares them.
            on_update: Told when all replicas have new weights.
            single_requests: ``None``: the engine does not take them.
            reports: Its backend has metrics of its own (capability ``generation_metrics``, ``ReportingSampler``).
            takes_versions: Requests may name weights (``nemorl_rl.serving.snapshots``).
            constrains: Requests may bring a schema for their responses (capability ``constrained``).
            ranks: Numbers of the replicas that take requests now, where they come and go. Unset: all, always.
            joined: Counts the replicas that came after the first ones.
        """
        self.constrains = constrains
        self.version = 0
        """Of the newest weights that the replicas were given."""
        self.answers: Sequence[Mapping[str, Digest | str]] = ()
        """What each replica said that it held after the last update whose weights came with digests."""
        self.answered_s = 0.0
        """Seconds until they had said so."""
        self._of_transport: Metrics = {}
        """Metrics of the transport that brought the newest weights."""
        self._reports, self._takes_versions = reports, takes_versions
        self.workers, self._turn, self._on_update = workers, turn, on_update
        self._revive = revive
        self._lives = 0
        self._ranks, self._joined = ranks, joined
        self._reviving = threading.Lock()
        self._single_requests = single_requests
        self._desk: RequestDesk | None = None
        self._opening = threading.Lock()

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """One list of completions per request, in order.

        When a replica is lost it is replaced and all requests are made again: their seeds give the same tokens.

        Raises:
            BackendError: A request names a version of the weights, and the engine has the newest alone.
            VersionNotHeldError: The engine does not have it, or no more; a replacement has the newest alone.
        """
        self._require_versions(requests)
        return self._with_replacements(lambda: self._generate(requests))

    @property
    def replicas(self) -> int:
        """Those that share requests. Where none is left, one: whoever asks it finds that it is lost, and waits."""
        return max(1, self.workers.data_parallel_size)

    def _generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        replicas = self.replicas
        shards = [list(requests[rank::replicas]) for rank in range(replicas)]
        with self._turn(ROLLOUT):
            parts = self.workers.scatter(GenerationBackend.generate, shards)
        ordered: list[list[Completion]] = [[] for _ in requests]
        for rank, part in enumerate(parts):
            ordered[rank::replicas] = part
        return ordered

    def submit(
        self,
        request: GenerationRequest,
        *,
        owner: str,
        conversation: Hashable = None,
        deadline_s: float | None = None,
    ) -> Future[list[Completion]]:
        """Begin one request and return at once, from any thread. It runs beside whatever else the replicas do.

        It goes to the least loaded replica, but stays with the one that has its conversation, or a prompt that begins
        alike, unless that is much busier. ``future.cancel()`` frees what it holds. Running requests go on with new
        weights (``Completion.version_starts``); where engine and trainer take turns in memory, the turn is theirs until
        all have ended. A lost replica's requests are made again, with the same seeds.

        Args:
            request: Prompt, sampling and seeds.
            owner: Who waits, for the error when it is late, e.g. ``"episode 17"``.
            conversation: Equal for requests whose prompts go on from each other; ``None``: whose prompts begin alike.
            deadline_s: Seconds until the future gets a ``DeadlineError``. Unset: the policy's own limit.

        Raises:
            BackendError: The engine answers whole batches only, or has the newest weights alone and the request names
                others.
        """
        self._require_versions([request])
        limits = self._single_requests
        if limits is None:
            raise BackendError(
                "this generation backend takes no single requests: it does not support `submit`, or lives in the "
                "trainer's processes, which must all make the same calls",
                fix="set generation.backend: hf or vllm, or cluster.colocated: false, or call generate",
            )
        return self._opened(limits).submit(
            request,
            owner=owner,
            beginnings=beginnings_of(request.token_ids) if conversation is None else [conversation],
            limit_s=limits.deadline_s if deadline_s is None else deadline_s,
        )

    def _require_versions(self, requests: Sequence[GenerationRequest]) -> None:
        named = [request.version for request in requests if request.version is not None]
        if named and not self._takes_versions:
            raise BackendError(
                f"a request names version {named[0]} of the weights, and this generation backend has the newest alone: "
                "it holds no snapshots of them",
                fix="leave GenerationRequest.version unset, or set generation.backend: {name: hf, snapshots: 2}",
            )

    def _opened(self, limits: RequestLimits) -> RequestDesk:
        with self._opening:
            if self._desk is None:
                self._desk = RequestDesk(
                    self.workers,
                    limit=limits.per_replica,
                    turn=partial(self._turn, ROLLOUT),
                    replace=self._replace_lost,
                    life=lambda: self._lives,
                    ranks=self._ranks,
                )
            return self._desk

    def update_weights(self, handle: WeightHandle) -> int | None:
        """Every replica generates from these weights from now on. Returns the bytes that each read, if they count."""
        return self._with_replacements(lambda: self._update_weights(handle))

    def _update_weights(self, handle: WeightHandle) -> int | None:
        with self._turn(SYNC):
            read: list[int | None] = self.workers.call(GenerationBackend.update_weights, handle, handle.version)
            start_s = time.monotonic()
            names = [] if handle.digests is None else list(handle.digests)
            self.answers = self.workers.call(ProvingBackend.held_digests, names) if names else ()
            self.answered_s = time.monotonic() - start_s
        self.version = handle.version
        self._of_transport = _told_by(handle)
        self._on_update()
        return read[0]

    @property
    def lives(self) -> int:
        """How many times replicas were replaced, or joined."""
        return self._lives + self._joined()

    def take_metrics(self) -> Metrics:
        """The replicas' metrics of their own work since they were last asked, and those of what carries weights."""
        own: Metrics = {}
        if self._reports:
            own = merge(self._with_replacements(lambda: self.workers.call(ReportingSampler.take_metrics)))
        return {**own, **self._of_transport}

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

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """The block ends replicas and replaces them: whoever finds one lost waits for its end, and calls again."""
        with self._reviving:
            yield
            self._lives += 1

    def shutdown(self) -> None:
        if self._desk is not None:
            self._desk.close()
        self.workers.shutdown()


def _told_by(handle: WeightHandle) -> Metrics:
    """Metrics of the transport, if it has any."""
    from nemorl_rl.transports.delta.counts import CountedPayload

    return handle.payload.metrics() if isinstance(handle.payload, CountedPayload) else {}
