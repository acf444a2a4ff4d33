"""EngineFleet: engines with devices of their own that come and go while a run is on, seen as one worker group.

Each engine is a group of one worker. One that is lost is left out at once: its work goes to the others, and it is
started again as soon as its devices are there. An engine that comes later gets the newest weights before its first
request. One whose node is about to go stays until another is ready elsewhere. What keeps time and listens to people is
in ``fleet_keeper``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from nemorl.contracts import GenerationBackend
from nemorl.contracts.workers import P, R, S, ShardVerb, Verb
from nemorl.errors import NemorlError, ResourceError, UsageError, WeightsLostError, WorkerLostError, boundary
from nemorl.weights import Digested, Form, WeightHandle

if TYPE_CHECKING:
    from nemorl.resources.ray_actor import WorkerFacts

from nemorl_rl.placement.fleet_engine import Devices, Engine, Host, Source, State, first_line

MOST_THREADS = 4096
"""Calls that wait for engines at the same time."""
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0
"""Between two starts of an engine that does not come up: the second is doubled from the first, up to the last."""
LOOK_S = 5.0
"""Between two looks at the nodes, each a question to the cluster."""
NO_DEVICES = "; its devices are gone"


class EngineFleet:
    """A ``WorkerGroup``. Everything here may be called from any thread."""

    def __init__(
        self,
        source: Source,
        *,
        max_restarts: int,
        restart_window_s: float,
        patience_s: float,
        warn: Callable[[str], None],
        remark: Callable[[str], None],
    ) -> None:
        """
        Args:
            source: Builds engines.
            max_restarts: How many times within ``restart_window_s`` one engine is started again.
            restart_window_s: Seconds.
            patience_s: Longest wait for an engine when none is left.
            warn: Told of each loss.
            remark: Told who is ready.
        """
        self._source, self._warn, self._remark = source, warn, remark
        self._max_restarts, self._window_s, self._patience_s = max_restarts, restart_window_s, patience_s
        self._engines: list[Engine] = []
        self._numbers = count()
        self._changed = threading.Condition(threading.RLock())
        """Guards the books; told of every change."""
        self._together = threading.RLock()
        """Held while all engines are called: none joins meanwhile, which would miss what the others are told."""
        self._pool = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="nemorl-fleet")
        self.joined = 0
        """Engines that came, or came back, after the first ones."""
        self._look_at = 0.0
        """Moment of ``time.monotonic()`` of the next look at the nodes"""
        self.on_shutdown: Callable[[], None] = lambda: None

    # Who is there

    @property
    def data_parallel_size(self) -> int:
        return len(self.ranks)

    @property
    def ranks(self) -> Sequence[int]:
        """Numbers of the engines that take requests."""
        with self._changed:
            return [engine.number for engine in self._engines if engine.state == "ready"]

    @property
    def facts(self) -> list[WorkerFacts]:
        """Host, address and process of each engine that is there, on Ray."""
        groups: list[Any] = [engine.workers for engine in self._in("ready", "leaving")]
        return [facts for group in groups for facts in group.facts]

    def as_json(self) -> list[dict[str, Any]]:
        """The state of each engine."""
        with self._changed:
            return [engine.as_json() for engine in self._engines]

    def _in(self, *states: State) -> list[Engine]:
        with self._changed:
            return [engine for engine in self._engines if engine.state in states]

    # Work

    def call(self, verb: Verb[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Of all engines at once; one that is lost meanwhile has no result.

        Raises:
            WorkerLostError: None is left.
        """
        found = self._answers(lambda engine: True, verb, args, kwargs)
        if not found:
            raise self._deserted()
        return found

    def call_lent(self, verb: Verb[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """As ``call``, of those on the trainer's devices, of which none need be left."""
        return self._answers(lambda engine: engine.host is not None, verb, args, kwargs)

    def _answers(self, who: Callable[[Engine], bool], verb: Verb[P, R], args: Any, kwargs: Any) -> list[R]:
        found: list[R] = []
        with self._together:
            called = [self._begun(engine) for engine in self._in("ready", "leaving") if who(engine)]
            for answer in [self._pool.submit(self._call, engine, verb, args, kwargs) for engine in called]:
                try:
                    found.append(answer.result())
                except WeightsLostError:
                    raise
                except WorkerLostError:
                    continue
        return found

    def _call(self, engine: Engine, verb: Verb[P, R], args: Any, kwargs: Any) -> R:
        try:
            return engine.workers.call(verb, *args, **kwargs)[0]
        except WorkerLostError as error:
            self._lose(engine, error)
            raise
        finally:
            self._ended(engine)

    def scatter(self, verb: ShardVerb[S, P, R], shards: Sequence[S], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """One result per shard, each from the engine that had least to do. The shard of a lost one goes to another.

        Raises:
            WorkerLostError: None is left.
        """
        found: dict[int, R] = {}
        begin = partial(self._begin_shard, verb, args, kwargs)
        going = {begin(shard): index for index, shard in enumerate(shards)}
        while going:
            done, _ = wait(going, return_when=FIRST_COMPLETED)
            for answer in done:
                index = going.pop(answer)
                try:
                    found[index] = answer.result()
                except WeightsLostError:
                    raise
                except WorkerLostError:
                    going[begin(shards[index])] = index
        return [found[index] for index in range(len(shards))]

    def _begin_shard(self, verb: ShardVerb[S, P, R], args: Any, kwargs: Any, shard: S) -> Future[R]:
        with self._changed:
            ready = self._in("ready")
            if not ready:
                raise self._deserted()
            engine = self._begun(min(ready, key=lambda engine: engine.in_progress))
        return self._pool.submit(self._shard, engine, verb, shard, args, kwargs)

    def _shard(self, engine: Engine, verb: ShardVerb[S, P, R], shard: Any, args: Any, kwargs: Any) -> R:
        try:
            (found,) = engine.workers.scatter(verb, [shard], *args, **kwargs)
        except WorkerLostError as error:
            self._lose(engine, error)
            raise
        finally:
            self._ended(engine)
        engine.served += len(shard)
        return found

    def submit(self, rank: int, verb: Verb[P, Future[R]], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        with self._changed:
            engine = next((one for one in self._in("ready", "leaving") if one.number == rank), None)
            if engine is None:
                raise WorkerLostError(f"engine-{rank} is no longer there", fix="its requests go to others")
            self._begun(engine)
        answer: Future[R] = Future()
        try:
            sent: Future[R] = engine.workers.submit(0, verb, *args, **kwargs)
        except BaseException:
            self._ended(engine)
            raise
        sent.add_done_callback(partial(self._settle, engine, answer))
        return answer

    def _settle(self, engine: Engine, answer: Future[R], sent: Future[R]) -> None:
        self._ended(engine)
        error = sent.exception()
        if isinstance(error, WorkerLostError):
            self._lose(engine, error)
        if error is not None:
            answer.set_exception(error)
            return
        engine.served += sent.result() is not None  # a cancel has none
        answer.set_result(sent.result())

    def publish(
        self, transport: str, version: int, form: Form = "model", digested: Digested | None = None
    ) -> WeightHandle:
        raise AssertionError("engines take weights and give none")

    def _begun(self, engine: Engine) -> Engine:
        with self._changed:
            engine.in_progress += 1
        return engine

    def _ended(self, engine: Engine) -> None:
        with self._changed:
            engine.in_progress -= 1
            self._changed.notify_all()

    # Who comes and goes

    def start(self, size: int) -> None:
        """Begin with this many engines, all started at the same time."""
        self.start_on([self._source.starter.reserve_engine(0.0) for _ in range(size)])

    def start_on(self, places: Sequence[Devices], host: Host | None = None) -> None:
        """Begin with engines on these devices; the trainer's, where it is their host."""
        begin_s, engines = time.monotonic(), [Engine(next(self._numbers), devices, host) for devices in places]
        self._engines += engines
        with self._source.building(host) as weights:
            for start in [self._pool.submit(self._source.build, engine, weights) for engine in engines]:
                start.result()
        for engine in engines:
            engine.state, engine.start_s = "ready", time.monotonic() - begin_s

    def add(self, size: int, wait_s: float) -> list[str]:
        """Names of more engines, which have their devices and are being started.

        Args:
            size: How many, or none of them.
            wait_s: Longest wait for devices that others hold.

        Raises:
            ResourceError: There are no devices for so many.
        """
        return [engine.name for engine in self._add(size, wait_s)]

    def _add(self, size: int, wait_s: float) -> list[Engine]:
        reserved: list[Devices] = []
        try:
            while len(reserved) < size:
                reserved.append(self._source.starter.reserve_engine(wait_s))
        except NemorlError as error:
            for devices in reserved:
                devices.shutdown()
            raise ResourceError(
                f"there are devices for {len(reserved)} of {size} more engines: {error.message}",
                fix="ask for fewer, join more nodes, or end what holds the devices (`ray status` lists it)",
            ) from error
        with self._changed:
            engines = [Engine(next(self._numbers), devices) for devices in reserved]
            self._engines += engines
        for engine in engines:
            self._pool.submit(self._bring, engine)
        return engines

    def drop(self, name: str) -> None:
        """Let an engine finish what it has, then end it and give its devices back.

        Raises:
            UsageError: There is no such engine, or no other.
        """
        with self._changed:
            named = [engine for engine in self._engines if engine.name == name]
            if not named or named[0].state == "leaving":
                others = ", ".join(engine.name for engine in self._engines if engine.state != "leaving")
                raise UsageError(f"the run has no engine {name!r}", fix=f"it has {others}")
            if named[0].state == "ready" and len(self._in("ready")) == 1:
                raise UsageError(f"{name} is the only engine that is ready: the run needs one", fix="add one first")
            named[0].state = "leaving"

    def tend(self) -> None:
        """Start again whoever was lost and has devices, move whoever's node goes, end whoever has finished leaving."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self._leave_nodes()
        for engine in self._in("lost"):
            if now >= engine.retry_at:
                self._retry(engine, now)
        for engine in self._in("starting"):
            if not engine.devices.is_there:  # its node was lost with it; Ray goes on with the start on another one
                engine.trouble = _without_devices(engine.trouble)
        with self._changed:
            gone = [engine for engine in self._in("leaving") if engine.in_progress == 0]
            self._engines = [engine for engine in self._engines if engine not in gone]
        for engine in gone:
            engine.end()

    def _leave_nodes(self) -> None:
        """Start others for engines on nodes that are about to go. Without room for them these stay while they can."""
        leaving = self._source.starter.leaving_nodes()
        for engine in self._in("ready") if leaving else ():
            if engine.heir is None and engine.devices.is_on(leaving):
                with suppress(ResourceError):
                    engine.heir = self._add(1, 0.0)[0]
                    self._remark(f"the node of {engine.name} is about to go: {engine.heir.name} is to take its place")

    def _retry(self, engine: Engine, now: float) -> None:
        engine.retry_at = now + FIRST_RETRY_S
        if not engine.devices.is_there:
            engine.trouble = _without_devices(engine.trouble)
            return
        with self._changed:
            while engine.retries and engine.retries[0] <= now - self._window_s:
                engine.retries.popleft()
            tries = len(engine.retries)
            engine.state = "starting" if tries < self._max_restarts else "given_up"
            self._changed.notify_all()
        if engine.state == "given_up":
            self._warn(f"{engine.name} is not started again: {tries} restarts within {self._window_s:g} s")
            return
        engine.retries.append(now)
        self._pool.submit(self._bring, engine)

    def _bring(self, engine: Engine) -> None:
        """Start an engine and let it in, with the newest weights."""
        begin_s, source = time.monotonic(), self._source
        with self._changed:
            engine.in_progress += 1  # a start counts as work: who is told to leave meanwhile does so after it
        try:
            with boundary(f"starting {engine.name}"), source.building(engine.host) as weights:
                try:
                    source.build(engine, weights)
                except NemorlError:
                    if source.newest() is weights:
                        raise
                    # They were replaced twice meanwhile, and are gone. Nobody replaces these while this is held.
                    with self._together:
                        source.build(engine, source.newest())
                        self._admit(engine, time.monotonic() - begin_s)
                else:
                    with self._together:
                        if (newest := source.newest()) is not None and newest is not weights:
                            engine.workers.call(GenerationBackend.update_weights, newest, newest.version)
                        self._admit(engine, time.monotonic() - begin_s)
        except NemorlError as error:
            self._put_off(engine, error)
        finally:
            self._ended(engine)

    def _admit(self, engine: Engine, start_s: float) -> None:
        with self._changed:
            engine.start_s, engine.trouble = start_s, ""
            if engine.state == "starting":
                engine.state = "ready"
                self.joined += 1
            for other in self._engines:
                if other.heir is engine and other.state == "ready":
                    other.state = "leaving"
            self._changed.notify_all()
        self._remark(f"{engine.name} is ready after {start_s:.1f} s: {len(self.ranks)} engines")

    def _put_off(self, engine: Engine, error: NemorlError) -> None:
        """A start has failed; the next one is of a new process."""
        if engine.group is not None:
            engine.group.shutdown()
            engine.group = None
        with self._changed:
            engine.trouble = first_line(error)
            if isinstance(error, WeightsLostError) and engine.retries:
                engine.retries.pop()  # the trainer died, and comes back: it is not the engine's fault
            wait_s = min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** len(engine.retries))
            engine.retry_at = time.monotonic() + wait_s
            if engine.state == "starting":
                engine.state = "lost"
            self._changed.notify_all()
        self._warn(f"{engine.name} did not start: {engine.trouble}")

    def _lose(self, engine: Engine, error: WorkerLostError) -> None:
        if isinstance(error, WeightsLostError):
            return
        with self._changed:
            if engine.state != "ready":
                return  # somebody else has noticed, or it was leaving
            engine.state, engine.lost, engine.trouble = "lost", engine.lost + 1, first_line(error)
            engine.retry_at = time.monotonic()
            self._changed.notify_all()
        others = ", ".join(f"engine-{rank}" for rank in self.ranks) or "the first that is started again or added"
        self._warn(f"{error.message}\n{engine.name} is lost; its requests go to {others}")

    def await_engine(self, error: WorkerLostError) -> None:
        """Return at once while there is an engine, else when one is back.

        Raises:
            WorkerLostError: ``error``, when none comes.
        """
        end = time.monotonic() + self._patience_s
        with self._changed:
            while not self._in("ready"):
                left = end - time.monotonic()
                if left <= 0 or not self._in("lost", "starting"):
                    raise error
                self._changed.wait(min(left, 1.0))

    def _deserted(self) -> WorkerLostError:
        account = "; ".join(f"{one.name} is {one.state}: {one.trouble}" for one in self._engines)
        return WorkerLostError(
            f"no engine is left ({account})",
            fix="look at the log of an engine; the run waits for one that comes back, as long as its starts are not "
            "used up (cluster.max_restarts)",
        )

    def shutdown(self) -> None:
        """End all engines and give their devices back."""
        self.on_shutdown()
        with self._changed:
            engines, self._engines = self._engines, []
        for ended in [self._pool.submit(engine.end) for engine in engines]:
            ended.result()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _without_devices(trouble: str) -> str:
    """What is wrong with an engine whose node is gone, too."""
    return f"{trouble.removesuffix(NO_DEVICES)}{NO_DEVICES}"
