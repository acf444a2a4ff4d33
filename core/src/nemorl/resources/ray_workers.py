"""RayWorkerGroup: the ranks of one backend as Ray actors.

Every wait here has a deadline. A rank that dies or does not answer is reported by group, rank, node and process, with
the last lines of its log; the group can then be restarted in the same places.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError

from nemorl.base.packages.interpreters import require_interpreter
from nemorl.base.process.logs import carried
from nemorl.config.cluster import ClusterConfig
from nemorl.contracts.workers import Composed, P, R, References, S, ShardVerb, Verb
from nemorl.errors import BackendError, ForeignError, NemorlError, ResourceError, WorkerHungError, WorkerLostError
from nemorl.resources.failure_texts import Failure, failure_in
from nemorl.resources.heartbeat import Hang
from nemorl.resources.ray_actor import WorkerFacts, start_worker
from nemorl.resources.ray_cluster import Place, Places
from nemorl.resources.ray_errors import FIXES, fate_of, in_words
from nemorl.resources.ray_pulses import Pulses
from nemorl.resources.ray_ranks import GroupSettings, Rank, log_size
from nemorl.resources.worker import AttachedFactory, HostGroup, Role, WorkerContext, WorkerFactory
from nemorl.weights import Digested, Form, WeightHandle

FAILURE_S = 1.0
"""A rank that failed ends the wait for the others at most this late. Waiting for one answer at a time would ask Ray
about all ranks as often as there are ranks."""
UNWATCHED = frozenset({"start", "build", "attach_engine"})
"""Calls in which ranks may read for long, each for itself, and do not answer meanwhile."""
BLAME_S = 5.0
"""Time to look for a dead rank when another one fails: peers of a dead rank report a broken connection first."""
SHUTDOWN_S = 20.0
"""Longest wait for an orderly shutdown; then the processes are ended."""
_MISSING_MODULE = re.compile(r"No module named '([^'.]+)'")


class RayWorkerGroup(HostGroup):
    """One object of ``worker_class`` per place of a cluster, called together.

    Example:
        >>> class Adder:
        ...     def __init__(self, context): self.rank = context.rank
        ...     def add(self, number): return self.rank + number
        ...     def shutdown(self): pass
        >>> group = RayWorkerGroup(RayVirtualCluster([2]), Adder)  # doctest: +SKIP
        >>> group.call(Adder.add, 10)  # doctest: +SKIP
        [10, 11]
    """

    def __init__(
        self,
        cluster: Places,
        worker_class: WorkerFactory,
        context: WorkerContext | None = None,
        settings: GroupSettings | None = None,
    ) -> None:
        """
        Args:
            cluster: Places; each gets one worker.
            worker_class: Called in each process with its ``WorkerContext``.
            context: Device, seed and folders for all ranks; rank and addresses are filled in.
            settings: How the processes are made.

        Raises:
            WorkerLostError: a process ended, or was not ready in time.
            BackendError: the interpreter cannot run workers.
        """
        self.settings = settings or GroupSettings()
        self.cluster, self._factory = cluster, worker_class
        self._context = replace(context or WorkerContext(device=cluster.config.device))
        self._timeout_s, self._hang_timeout_s = cluster.config.worker_timeout_s, cluster.config.hang_timeout_s
        self._size = self.settings.workers or cluster.world_size
        self._ranks: list[Rank] = []
        """Workers that are built; replaced as a whole, so that no call reaches one that is not."""
        self._engine: AttachedFactory | None = None
        # All ranks of an SPMD group must enter the same collectives in the same order, whichever thread calls.
        self._order = threading.Lock()
        if self.settings.python is not None:
            require_interpreter(self.settings.python, self.settings.modules)
        self._start(range(self._size))

    @property
    def data_parallel_size(self) -> int:
        return len(self._shards)

    @property
    def facts(self) -> list[WorkerFacts]:
        """Host, address and process of each rank."""
        return [rank.facts for rank in self._ranks]

    def call_as(self, role: Role, verb: Verb[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        shared = [ray.put(value) if _is_large(value) else value for value in args]
        with self._order:
            calls = {rank: self._invoke(rank, role, verb.__name__, kwargs, shared) for rank in self._ranks}
        return list(self._gather(verb.__name__, calls).values())

    def scatter_as(
        self, role: Role, verb: ShardVerb[S, P, R], shards: Sequence[S], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        results = self._gather(verb.__name__, self._scattered(role, verb.__name__, kwargs, shards, args))
        return [results[numbers[0]] for numbers in self._shards]

    def scatter_kept(
        self, verb: ShardVerb[S, P, R], shards: Sequence[S], *args: P.args, **kwargs: P.kwargs
    ) -> References:
        calls = self._scattered("backend", verb.__name__, kwargs, shards, args, keeps=True)
        results = {rank.number: result for rank, (_, result) in calls.items()}
        try:
            self._gather(verb.__name__, {rank: done for rank, (done, _) in calls.items()})
        except NemorlError:  # Ray prints the errors that nobody asked for
            for result in results.values():
                with suppress(RayError):
                    ray.get(result, timeout=0)
            raise
        return [results[numbers[0]] for numbers in self._shards]

    def put(self, values: Sequence[Any]) -> References:
        return [ray.put(value) for value in values]

    def read(self, references: References) -> list[Any]:
        try:
            return list(ray.get(list(references), timeout=self._timeout_s))
        except RayError as error:
            raise WorkerLostError(
                f"{self.settings.name}: results that lay with a rank cannot be read ({in_words(error)})",
                fix="the run makes the step again, up to cluster.max_restarts times; see whether a node was lost",
            ) from error

    def _scattered(
        self, role: Role, method: str, kwargs: Any, shards: Sequence[Any], args: Sequence[Any], *, keeps: bool = False
    ) -> dict[Rank, Any]:
        """Ray's references to the answers of all ranks."""
        members = self._shards
        assert len(shards) == len(members), f"{len(shards)} shards for {len(members)} data-parallel ranks"
        shared, calls = [ray.put(value) if _is_large(value) else value for value in args], dict[Rank, Any]()
        make, parts = ([ray.put(shards.make)], shards.parts) if isinstance(shards, Composed) else ([], ())
        with self._order:
            workers = self._ranks
            for place, numbers in enumerate(members):
                # Ranks that share a shard read one copy of it, and the first of them answers for all.
                own = [*make, *(part[place] for part in parts)] or [_shared(shards[place], len(numbers))]
                for n in numbers:
                    options = {"answers": n == numbers[0], "parts": len(parts), "keeps": keeps}
                    calls[workers[n]] = self._invoke(workers[n], role, method, kwargs, [*own, *shared], **options)
        return calls

    def submit(self, rank: int, verb: Verb[P, Future[R]], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        worker, method = self._ranks[rank], verb.__name__
        answer: Future[R] = Future()

        def settle(done: Future[Any]) -> None:
            with suppress(InvalidStateError):  # nobody waits any more
                try:
                    answer.set_result(self._read(method, worker, done.result, {}))
                except Exception as error:  # whatever it is, somebody waits
                    answer.set_exception(error)

        self._invoke(worker, "backend", method, kwargs, args).future().add_done_callback(settle)
        return answer

    def _invoke(
        self, rank: Rank, role: Role, method: str, kwargs: dict[str, Any], args: Sequence[Any], **options: Any
    ) -> Any:
        logs = carried(worker=self.settings.name, rank=self.settings.first + rank.number)
        invoke = rank.actor.invoke.options(num_returns=2) if options.get("keeps") else rank.actor.invoke
        return invoke.remote(role, method, kwargs, logs, *args, **options)

    @cached_property
    def _shards(self) -> list[list[int]]:
        """The ranks of each data-parallel shard."""
        shards = self.settings.shards or range(self._size)
        found: list[list[int]] = [[] for _ in range(max(shards) + 1)]
        for rank in range(self._size):
            found[shards[rank]].append(rank)
        return found

    def publish(
        self, transport: str, version: int, form: Form = "model", digested: Digested | None = None
    ) -> WeightHandle:
        """Rank 0's handle to the weights that all ranks hold together."""
        with self._order:
            calls = {rank: rank.actor.publish.remote(transport, version, form, digested) for rank in self._ranks}
        handle: WeightHandle = self._gather("publish", calls)[0]
        return handle

    def attach_engine(self, factory: AttachedFactory) -> None:
        """Build an engine beside each worker. Restarted workers get theirs again."""
        self._engine = factory
        self._gather("attach_engine", {rank: rank.actor.attach_engine.remote(factory) for rank in self._ranks})

    def restart(self, worker_class: WorkerFactory | None = None) -> None:
        """Replace the workers that were lost; in an SPMD group, all of them.

        Calls that are made meanwhile reach the workers of before: a lost one still answers with ``WorkerLostError``.

        Args:
            worker_class: What to build from now on. Unset: the same again.
        """
        self._factory = worker_class or self._factory
        lost = [rank for rank in self._ranks if self.settings.is_spmd or rank.is_lost or rank.is_dead(BLAME_S)]
        for rank in lost:
            ray.kill(rank.actor)
            rank.is_lost = True
        self._start([rank.number for rank in lost])

    @property
    def is_displaced(self) -> bool:
        """Some worker is not where its rank has its places now."""
        return any(rank.places != self._places_of(rank.number) for rank in self._ranks)

    def retire(self) -> None:
        """End the workers that are not where their ranks have their places now. ``restart`` replaces them."""
        for rank in self._ranks:
            if rank.places != self._places_of(rank.number):
                rank.is_lost = True
                ray.kill(rank.actor)

    def shutdown(self) -> None:
        """Ask every worker to shut down, then end the processes. Never raises, never hangs."""
        with suppress(RayError):  # the cluster itself is lost
            asked = [rank.actor.shutdown.remote() for rank in self._ranks if ray.is_initialized() and not rank.is_lost]
            if asked:
                ray.wait(asked, num_returns=len(asked), timeout=SHUTDOWN_S)
        self.kill()

    def kill(self) -> None:
        """End the processes at once."""
        for rank in self._ranks if ray.is_initialized() else ():
            with suppress(RayError):
                ray.kill(rank.actor)
        self._ranks = []

    # Starting

    def _start(self, numbers: Sequence[int]) -> None:
        """Start processes for these ranks and build the workers in them, all at the same time; then let calls in."""
        unknown = WorkerFacts("a node yet to be chosen", "", 0)
        sizes = {n: log_size(self.settings.log(n)) for n in numbers}
        started = [
            Rank(n, self.settings, self._actor(n, self._places_of(n)[0]), unknown, self._places_of(n), sizes[n])
            for n in numbers
        ]
        others = [rank for rank in self._ranks if rank.number not in numbers]
        ranks = sorted([*others, *started], key=attrgetter("number"))
        try:
            facts = self._gather("start", {rank: rank.actor.facts.remote() for rank in started})
            for rank in started:
                rank.facts = facts[rank.number]
            contexts = self._contexts(ranks, started)
            build = {rank: rank.actor.build.remote(self._factory, contexts[rank.number]) for rank in started}
            self._gather("build", build)
            if self._engine is not None:
                self._gather("attach_engine", {rank: rank.actor.attach_engine.remote(self._engine) for rank in started})
        except BaseException:
            for rank in started:
                ray.kill(rank.actor)
            raise
        self._ranks = ranks

    def _places_of(self, number: int) -> list[Place]:
        width = self.settings.places_per_worker
        return self.cluster.places[number * width : (number + 1) * width]

    def _actor(self, number: int, place: Place) -> Any:
        return self._starter(self.settings.log(number), place)()

    def _starter(self, log: Path | None, place: Place) -> Callable[[], Any]:
        settings, bundle = self.settings, self.cluster.bundle
        cluster = self.cluster.config
        cores = cluster.cpus_per_worker
        threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, int(cores)))
        options = {
            "num_cpus": bundle["CPU"] * settings.share,
            "num_gpus": bundle.get("GPU", 0.0) * settings.share,
            "scheduling_strategy": place.strategy,
            "max_concurrency": settings.concurrent_calls,
            "runtime_env": _runtime_env(cluster, settings.python),
        }
        return partial(start_worker, options, log and log.resolve(), Path.cwd(), threads, pulses=self._has_pulses)

    def _pulses(self, what: str) -> Pulses | None:
        """The heartbeats of a call whose ranks may wait for each other; ``None``: they do not, or nobody is to look."""
        is_watched = self._has_pulses and what not in UNWATCHED
        return Pulses(self._hang_timeout_s) if is_watched and self._hang_timeout_s is not None else None

    @property
    def _has_pulses(self) -> bool:
        return self.settings.is_spmd and self._size > 1 and self._hang_timeout_s is not None

    def _contexts(self, ranks: Sequence[Rank], started: Sequence[Rank]) -> list[WorkerContext]:
        count, width = len(ranks), self.settings.places_per_worker
        if width > 1:
            asked = {rank.number for rank in started}
            return [self._wide_context(rank) if rank.number in asked else self._context for rank in ranks]
        if not self.settings.is_spmd or count == 1:
            return [self._context] * count
        first = ranks[0]
        port = self._gather("free_port", {first: first.actor.free_port.remote()})[first.number]
        shared = replace(self._context, world_size=count, master_address=first.facts.address, master_port=port)
        return [replace(shared, rank=n) for n in range(count)]

    def _wide_context(self, rank: Rank) -> WorkerContext:
        """Of a worker that spreads over several places, perhaps of several nodes."""
        share = self.settings.share
        own, *further = [list(places) for _, places in groupby(self._places_of(rank.number), attrgetter("node"))]
        gpus = (*rank.facts.gpus, *self.cluster.gpus_of(own[1:], share))
        log = self.settings.log(rank.number)
        logs = [log and log.with_stem(f"{log.stem}-node-{n}") for n in range(1, 1 + len(further))]
        starters = tuple(self._starter(file, places[0]) for file, places in zip(logs, further, strict=True))
        further_gpus = tuple(self.cluster.gpus_of(places, share) for places in further)
        return replace(self._context, gpus=gpus, further_nodes=starters, further_gpus=further_gpus)

    # Waiting

    def _gather(self, what: str, calls: Mapping[Rank, Any]) -> dict[int, Any]:
        """Results by rank number, in the order of ``calls``; the first failure ends the wait."""
        deadline = time.monotonic() + self._timeout_s
        pending = {reference: rank for rank, reference in calls.items()}
        results: dict[int, Any] = {}
        pulses = self._pulses(what)
        while pending:
            if pulses and (hang := pulses.hang({rank.number: rank.actor for rank in pending.values()})):
                raise self._stuck(what, [*pending.values()], hang)
            left_s = max(0.0, deadline - time.monotonic())
            ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=min(FAILURE_S, left_s))
            if not ready and left_s == 0:
                raise self._hung(what, sorted(pending.values(), key=attrgetter("number")))
            ranks = [pending.pop(reference) for reference in ready]
            others = {**dict(zip(ready, ranks, strict=True)), **pending}
            results |= zip((rank.number for rank in ranks), self._values(what, others, ready), strict=True)
        return {rank.number: results[rank.number] for rank in calls}

    def _values(self, what: str, ranks: dict[Any, Rank], ready: Sequence[Any]) -> list[Any]:
        """The results behind references that are ready, all at once; one by one only to find the rank that failed."""
        try:
            found: list[Any] = ray.get(list(ready))
            return found
        except RayError:
            return [self._read(what, ranks.pop(one), partial(ray.get, one), ranks) for one in ready]

    def _read(self, what: str, rank: Rank, get: Callable[[], Any], others: Mapping[Any, Rank]) -> Any:
        """The result of a call by ``get``, or its error with the rank's name."""
        try:
            return get()
        except RayError as error:
            if fate_of(error) == "worker":
                raise self._lost(what, rank, error) from error
            if not isinstance(error, RayTaskError):
                raise ResourceError(f"{rank.who}, {what}: {in_words(error)}", fix=FIXES[fate_of(error)]) from error
            cause = error.cause if isinstance(error.cause, Exception) else error
            is_told = isinstance(cause, WorkerLostError)  # whose loss it is
            failure = None if is_told else failure_in(str(cause), str(error))
            if failure is not None:  # perhaps of a peer that has died: then that is what to tell
                self._raise_if_lost(what, others)
                raise self._failed(what, rank, failure) from error
            if isinstance(cause, NemorlError):
                raise cause from None
            if isinstance(cause, ObjectLostError):  # an argument, which a node held that is gone
                raise self._lost(what, rank, cause) from error
            missing = _MISSING_MODULE.search(str(cause))
            if missing and find_spec(missing[1]) is not None:
                raise BackendError(
                    f"{rank.who} cannot import {missing[1]!r}, which this process can",
                    fix="install it as a package on every node, or put it beside the script that starts the run",
                ) from error
            # A rank whose peer has died fails with whatever its communication library says: find the peer.
            self._raise_if_lost(what, others)
            raise ForeignError(
                f"{rank.who} raised {type(cause).__name__} in {what}: {cause}",
                fix=f"the original traceback is below (--debug){rank.where_log}",
            ) from error

    def _raise_if_lost(self, what: str, others: Mapping[Any, Rank]) -> None:
        deadline = time.monotonic() + BLAME_S
        waiting = list(others)
        while waiting:
            ready, waiting = ray.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                return
            try:
                ray.get(ready[0])
            except RayError as error:
                if fate_of(error) == "worker":
                    raise self._lost(what, others[ready[0]], error) from error

    # Errors

    def _lost(self, what: str, rank: Rank, error: RayError) -> WorkerLostError:
        rank.is_lost = True
        why = "" if isinstance(error, RayActorError) else f" ({in_words(error)})"
        failure = failure_in(rank.log_end)
        if failure is not None:  # torch ends the process of a rank whose collective timed out
            return self._failed(f"{what}, which ended it", rank, failure)
        return WorkerLostError(
            f"{rank.who} died during {what}{why}{rank.log_tail}",
            fix="if it was killed for memory, lower policy.microbatch_tokens or generation limits; "
            f"the run replaces lost workers up to cluster.max_restarts times{rank.where_log}",
        )

    def _failed(self, what: str, rank: Rank, failure: Failure) -> WorkerLostError:
        """``rank`` is lost for a failure that is not its code's."""
        rank.is_lost = True
        return failure.error(rank.who, what, rank.where_log)

    def _hung(self, what: str, ranks: Sequence[Rank]) -> WorkerHungError:
        for rank in ranks:
            rank.is_lost = True
        who = ", ".join(rank.who for rank in ranks)
        return WorkerHungError(
            f"the driver waited {self._timeout_s:.0f} s for {what} on {who}{ranks[0].log_tail}",
            fix="raise cluster.worker_timeout_s if the work takes that long; else look at the log for what it waits "
            f"for{ranks[0].where_log}",
        )

    def _stuck(self, what: str, ranks: Sequence[Rank], hang: Hang) -> WorkerHungError:
        for rank in ranks:
            rank.is_lost = True
        names = {rank.number: rank.who for rank in ranks}
        logs = {rank.number: rank.where_log for rank in ranks}
        return hang.error(what, names, logs[hang.missing[0]])


def _runtime_env(cluster: ClusterConfig, python: Path | None) -> dict[str, Any] | None:
    """Ray's description of a worker process; ``None`` where it is like any other."""
    found = dict(cluster.runtime_env)
    if cluster.env_vars:
        found["env_vars"] = cluster.env_vars
    if python is not None:
        found["py_executable"] = str(python)
    return found or None


def _shared(shard: Any, ranks: int) -> Any:
    """The shard, or a reference to one copy of it where several ranks read it."""
    return ray.put(shard) if ranks > 1 and _is_large(shard) else shard


def _is_large(value: Any) -> bool:
    """Worth sending as one shared copy. Plain numbers, names and paths are cheaper to send as they are."""
    return not isinstance(value, (str, int, float, bool, Path, type(None)))
