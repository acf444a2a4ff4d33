"""RayWorkerGroup: the ranks of one backend as Ray actors.

Every wait has a deadline (:mod:`nemorl.resources.ray_answers`). A group that lost ranks can be restarted where it was.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from nemorl.base.packages.interpreters import require_interpreter
from nemorl.base.process.logs import carried
from nemorl.config.cluster import ClusterConfig
from nemorl.contracts.workers import Composed, P, R, References, S, ShardVerb, Verb
from nemorl.errors import NemorlError, ResourceError, WorkerLostError
from nemorl.resources.ray_actor import WorkerFacts, start_worker
from nemorl.resources.ray_answers import BLAME_S, Answers
from nemorl.resources.ray_cluster import Place, Places
from nemorl.resources.ray_errors import FIXES, in_words
from nemorl.resources.ray_ranks import GroupSettings, Rank, log_size
from nemorl.resources.worker import AttachedFactory, HostGroup, Role, WorkerContext, WorkerFactory
from nemorl.weights import Digested, Form, WeightHandle

SHUTDOWN_S = 20.0
"""Longest wait for an orderly shutdown; then the processes are ended."""


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
        self._size = self.settings.workers or cluster.world_size
        may_hang = self.settings.is_spmd and self._size > 1
        self._answers = Answers(cluster.config.worker_timeout_s, cluster.config.hang_timeout_s if may_hang else None)
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
        return list(self._answers.gather(verb.__name__, calls).values())

    def scatter_as(
        self, role: Role, verb: ShardVerb[S, P, R], shards: Sequence[S], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        results = self._answers.gather(verb.__name__, self._scattered(role, verb.__name__, kwargs, shards, args))
        return [results[numbers[0]] for numbers in self._shards]

    def scatter_kept(
        self, verb: ShardVerb[S, P, R], shards: Sequence[S], *args: P.args, **kwargs: P.kwargs
    ) -> References:
        calls = self._scattered("backend", verb.__name__, kwargs, shards, args, keeps=True)
        results = {rank.number: result for rank, (_, result) in calls.items()}
        try:
            self._answers.gather(verb.__name__, {rank: done for rank, (done, _) in calls.items()})
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
            return list(ray.get(list(references), timeout=self._answers.timeout_s))
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
                    answer.set_result(self._answers.read(method, worker, done.result, {}))
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
        handle: WeightHandle = self._answers.gather("publish", calls)[0]
        return handle

    def attach_engine(self, factory: AttachedFactory) -> None:
        """Build an engine beside each worker. Restarted workers get theirs again."""
        self._engine = factory
        self._answers.gather("attach_engine", {rank: rank.actor.attach_engine.remote(factory) for rank in self._ranks})

    def restart(self, worker_class: WorkerFactory | None = None) -> None:
        """Replace the workers that were lost; in an SPMD group, all of them.

        Calls that are made meanwhile reach the workers of before: a lost one still answers with ``WorkerLostError``.

        Args:
            worker_class: What to build from now on. Unset: the same again.
        """
        self._factory = worker_class or self._factory
        lost = self._ranks if self.settings.is_spmd else [*filter(attrgetter("is_lost"), self._ranks), *self._dead()]
        for rank in lost:
            ray.kill(rank.actor)
            rank.is_lost = True
        self._start([rank.number for rank in lost])

    def _dead(self) -> list[Rank]:
        """Those whose process is gone, as Ray knows; one that is busy does not answer in time."""
        asked = {rank.actor.facts.remote(): rank for rank in self._ranks if not rank.is_lost}
        answers = ray.wait([*asked], num_returns=len(asked), timeout=BLAME_S)[0] if asked else []
        return [asked[answer] for answer in answers if _is_error(answer)]

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
            facts = self._answers.gather("start", {rank: rank.actor.facts.remote() for rank in started})
            for rank in started:
                rank.facts = facts[rank.number]
            contexts = self._contexts(ranks, started)
            build = {rank: rank.actor.build.remote(self._factory, contexts[rank.number]) for rank in started}
            self._answers.gather("build", build)
            if self._engine is not None:
                attached = {rank: rank.actor.attach_engine.remote(self._engine) for rank in started}
                self._answers.gather("attach_engine", attached)
        except BaseException:
            for rank in started:
                with suppress(RayError):  # it would hide what happened
                    ray.kill(rank.actor)
            raise
        self._ranks = ranks

    def _places_of(self, number: int) -> list[Place]:
        width = self.settings.places_per_worker
        return self.cluster.places[number * width : (number + 1) * width]

    def _actor(self, number: int, place: Place) -> Any:
        try:
            return self._starter(self.settings.log(number), place)()
        except (TypeError, ValueError) as error:
            raise ResourceError(
                f"Ray does not start {self.settings.name}: {error}", fix=FIXES["environment"]
            ) from error

    def _starter(self, log: Path | None, place: Place) -> Callable[[], Any]:
        settings, bundle = self.settings, self.cluster.bundle
        cluster = self.cluster.config
        cores = cluster.cpus_per_worker
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, int(cores)))
        options = {
            "num_cpus": bundle["CPU"] * settings.share,
            "num_gpus": bundle.get("GPU", 0.0) * settings.share,
            "scheduling_strategy": place.strategy,
            "max_concurrency": settings.concurrent_calls,
            "runtime_env": _runtime_env(cluster, settings.python),
        }
        pulses = self._answers.hang_timeout_s is not None
        return partial(start_worker, options, log and log.resolve(), Path.cwd(), threads, pulses=pulses)

    def _contexts(self, ranks: Sequence[Rank], started: Sequence[Rank]) -> list[WorkerContext]:
        count, width = len(ranks), self.settings.places_per_worker
        if width > 1:
            asked = {rank.number for rank in started}
            return [self._wide_context(rank) if rank.number in asked else self._context for rank in ranks]
        if not self.settings.is_spmd or count == 1:
            return [self._context] * count
        first = ranks[0]
        port = self._answers.gather("free_port", {first: first.actor.free_port.remote()})[first.number]
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


def _runtime_env(cluster: ClusterConfig, python: Path | None) -> dict[str, Any] | None:
    """Ray's description of a worker process; ``None`` where it is like any other."""
    found = dict(cluster.runtime_env)
    if cluster.env_vars:
        found["env_vars"] = cluster.env_vars
    if python is not None:
        found["py_executable"] = str(python)
    return found or None


def _is_error(answer: Any) -> bool:
    try:
        ray.get(answer)
    except RayError:
        return True
    return False


def _shared(shard: Any, ranks: int) -> Any:
    """The shard, or a reference to one copy of it where several ranks read it."""
    return ray.put(shard) if ranks > 1 and _is_large(shard) else shard


def _is_large(value: Any) -> bool:
    """Worth sending as one shared copy. Plain numbers, names and paths are cheaper to send as they are."""
    return not isinstance(value, (str, int, float, bool, Path, type(None), ray.ObjectRef))
