"""Models that take turns in the memory of the devices they share: who is in it, phase by phase.

A phase is a kind of work: rollouts, a training step, sending weights. For each, :func:`phases` says as plain data which
parts of which model are in the devices' memory. Between two phases :class:`Tenancy` first sends away what the next one
does not need, then brings what it lacks, in the order of the table: an engine its weights before its cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from nemorl.contracts import OffloadingBackend, SleepingBackend, WorkerGroup
from nemorl.contracts.memory import DeviceMemoryError, MemoryPart
from nemorl.errors import BackendError, DeadlineError, ForeignError, NemorlError

if TYPE_CHECKING:
    from nemorl.resources.policies import Work

Parts = tuple[MemoryPart, ...]
OnDevice = Mapping[str, Parts]
"""Tenant -> its parts that are in the devices' memory, in the order in which they come."""

ENGINE, POLICY, DRAFT = "engine", "policy", "draft"
"""The draft guesses tokens ahead in the engine, where it is another model of the run (``drafts.config``)."""


class Phase(NamedTuple):
    """One kind of work of one model.

    >>> print(TRAIN, "and", ROLLOUT)
    policy train and rollout
    """

    role: str
    work: Work | Literal["rollout", "sync"]

    def __str__(self) -> str:
        return self.work if self.role == ENGINE else f"{self.role} {self.work}"


ROLLOUT, SYNC = Phase(ENGINE, "rollout"), Phase(ENGINE, "sync")
WORK: Mapping[Work, Parts] = {
    "train": ("weights", "optimizer", "gradients"),
    "measure": ("weights",),
    "reference": ("reference",),
    "save": ("weights", "optimizer"),
}
"""Parts of a trained model that each kind of its work needs."""

TRAIN = Phase(POLICY, "train")
WRITES = (TRAIN, Phase(POLICY, "save"))
"""Phases in which a policy's weights change: steps of the optimizer, and checkpoints that are loaded."""


def phases(roles: Sequence[str], *, shares_weights: bool, adapted: Collection[str] = ()) -> dict[Phase, OnDevice]:
    """The table of a run.

    Args:
        roles: Its models on training backends: ``policy``, and auxiliary ones such as ``critic``.
        shares_weights: The engine runs on the policy's own weights, as far as they are in the form that it needs.
        adapted: Roles that train adapters: their reference is the model without them.

    >>> phases(["policy"], shares_weights=False)[ROLLOUT]
    {'engine': ('weights', 'cache')}
    """
    table: dict[Phase, OnDevice] = {Phase(role, work): {role: parts} for role in roles for work, parts in WORK.items()}
    table |= {Phase(role, "reference"): {role: WORK["measure"]} for role in adapted}
    if shares_weights:
        # The engine has copies of what is not as it trains: merged adapters, layers in another form.
        table[ROLLOUT] = {POLICY: ("weights",), ENGINE: ("weights", "cache")}
    else:
        table[ROLLOUT] = {ENGINE: ("weights", "cache")}
    sent: OnDevice = {role: ("weights",) for role in (POLICY, DRAFT) if role == POLICY or role in roles}
    return {**table, SYNC: {**sent, ENGINE: ("weights",)}}


class Tenant(Protocol):
    """A model that can leave the devices' memory."""

    def keep(self, parts: Parts) -> None:
        """Send away all parts but these."""
        ...

    def bring(self, parts: Parts) -> None:
        """Bring these, in this order. Those that are there stay."""
        ...

    def held_bytes(self) -> Mapping[MemoryPart, int]:
        """Bytes of each part that are in the memory of the fullest device."""
        ...


@dataclass(frozen=True)
class TrainingTenant:
    """A training backend with the capability ``offload``."""

    workers: WorkerGroup

    def keep(self, parts: Parts) -> None:
        movable: Parts = ("gradients", "optimizer", "reference", "weights")
        leaving = [part for part in movable if part not in parts]
        self.workers.call(OffloadingBackend.offload, leaving)

    def bring(self, parts: Parts) -> None:
        self.workers.call(OffloadingBackend.onload, list(parts))

    def held_bytes(self) -> Mapping[MemoryPart, int]:
        return fullest(self.workers.call(OffloadingBackend.held_bytes))


@dataclass(frozen=True)
class EngineTenant:
    """A generation backend with the capability ``sleep``."""

    workers: WorkerGroup

    def keep(self, parts: Parts) -> None:
        # An engine sleeps as a whole. Its weights stay with the host: what comes next may be another rollout.
        self.workers.call(SleepingBackend.sleep, 1)
        if parts:
            self.workers.call(SleepingBackend.wake, list(parts))

    def forget(self) -> None:
        """Leave altogether, weights and all: they come anew before anything is sampled."""
        self.workers.call(SleepingBackend.sleep, 2)

    def bring(self, parts: Parts) -> None:
        self.workers.call(SleepingBackend.wake, list(parts))

    def held_bytes(self) -> Mapping[MemoryPart, int]:
        return fullest(self.workers.call(SleepingBackend.held_bytes))


def fullest(held_by_rank: Sequence[Mapping[MemoryPart, int]]) -> Mapping[MemoryPart, int]:
    """What the fullest of several processes holds."""
    return max(held_by_rank, key=lambda held: sum(held.values()), default={})


Holdings = Mapping[str, Mapping[MemoryPart, int]]
"""Tenant -> bytes of its parts that are in memory."""


class Watch(Protocol):
    """Compares what tenants hold with what was planned (``nemorl_rl.planning.memory.watch``)."""

    def entered(self, phase: Phase, holdings: Callable[[], Holdings]) -> None:
        """Everybody is where the table says; the phase's work is about to begin."""
        ...

    def explained(self, phase: Phase, error: DeviceMemoryError, holdings: Callable[[], Holdings]) -> DeviceMemoryError:
        """The same error, with who holds what."""
        ...


class PhaseGate:
    """One phase at a time: work of one may overlap, that of another one waits for its end."""

    def __init__(self, limit_s: float) -> None:
        """
        Args:
            limit_s: Longest wait for the work of another phase.
        """
        self._limit_s = limit_s
        self._phase: Phase | None = None
        self._workers = 0
        """Threads that are at work in this phase."""
        self._barred: dict[Phase, int] = {}
        """Phases that may not begin yet, and the thread that said so."""
        self._changed = threading.Condition()

    def bar(self, phase: Phase) -> None:
        """Let no work of a phase begin until ``admit``. Called within the phase that is the reason."""
        with self._changed:
            self._barred[phase] = threading.get_ident()

    def admit(self, phase: Phase) -> None:
        """Lift the bar on this phase."""
        with self._changed:
            self._barred.pop(phase, None)
            self._changed.notify_all()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Nobody enters or leaves within it, and the next to enter enters anew."""
        with self._changed:
            self._phase = None
            yield

    @contextmanager
    def during(self, phase: Phase, enter: Callable[[Phase], None] = lambda phase: None) -> Iterator[None]:
        """The block is work of this phase. ``enter`` is called where no such work was before it.

        Raises:
            DeadlineError: the work of another phase did not end in time.
            BackendError: this thread barred the phase, and would wait for itself.
        """
        with self._changed:
            if self._barred.get(phase) == threading.get_ident():
                raise BackendError(
                    f"{phase} was asked for between an update of the weights and their publication: the engine has let "
                    "go of the old ones, or runs on the trainer's own, whose tokens would have the old version",
                    fix="call sync_weights() after train_step, then sample (or set cluster.take_turns: false, where an "
                    "engine keeps weights of its own)",
                )
            if not self._changed.wait_for(lambda: self._may_begin(phase), self._limit_s):
                raise self._late(phase)
            if self._phase != phase:
                self._phase = None
                enter(phase)
                self._phase = phase
            self._workers += 1
        try:
            yield
        finally:
            with self._changed:
                self._workers -= 1
                self._changed.notify_all()

    def _may_begin(self, phase: Phase) -> bool:
        return phase not in self._barred and (self._workers == 0 or self._phase == phase)

    def _late(self, phase: Phase) -> DeadlineError:
        if phase in self._barred:
            return DeadlineError(
                f"{phase} waited {self._limit_s:g} s for new weights to be published: the engine has let go of the old "
                "ones, or runs on the trainer's own",
                fix="call sync_weights() after train_step; raise cluster.worker_timeout_s if updates take so long",
            )
        return DeadlineError(
            f"{phase} waited {self._limit_s:g} s for {self._phase} to end: they use the same devices' memory",
            fix="raise cluster.worker_timeout_s if that work takes so long",
        )


class Tenancy:
    """Moves tenants in and out. Work of one phase may overlap; that of another one waits for its end."""

    def __init__(self, table: Mapping[Phase, OnDevice], watch: Watch, *, limit_s: float) -> None:
        """
        Args:
            table: Of :func:`phases`.
            watch: Told of each phase.
            limit_s: Longest wait for the work of another phase.
        """
        self._table, self._watch, self.gate = table, watch, PhaseGate(limit_s)
        self._tenants: dict[str, Tenant] = {}
        self._present: dict[str, set[MemoryPart]] = {}
        self._forgets: dict[str, Mapping[Phase, Callable[[], None]]] = {}
        self._forgotten: set[str] = set()
        """Tenants nothing of which is kept anywhere."""

    def admit(
        self, name: str, tenant: Tenant, parts: Parts, *, forgets: Mapping[Phase, Callable[[], None]] | None = None
    ) -> None:
        """A tenant has come, or come anew, with these parts in the devices' memory.

        Args:
            name: Of the tenant in the table.
            tenant: It.
            parts: All that it has.
            forgets: Phase -> how it leaves for this one without a copy of what it holds, all of which comes anew before
                it is needed again.
        """
        with self.gate.closed():  # it may be in the way of what was there
            self._tenants[name], self._present[name] = tenant, set(parts)
            self._forgets[name] = forgets or {}
            self._forgotten.discard(name)

    def send_away(self, name: str) -> None:
        """A tenant leaves, if it is there: others are about to be built, with all that they have."""
        with self.gate.closed():
            if self._present.get(name):
                self._step("another is built", f"{name} leaving", partial(self._tenants[name].keep, ()))
                self._present[name] = set()

    def dismiss(self, name: str) -> None:
        """A tenant has ended, and is nobody's concern until it is admitted anew."""
        with self.gate.closed():
            for table in (self._tenants, self._present, self._forgets):
                table.pop(name, None)
            self._forgotten.discard(name)

    def send_all_away(self) -> None:
        """All tenants leave: another is about to be built."""
        for name in self._tenants:
            self.send_away(name)

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """The block finds in memory what the table says.

        Raises:
            DeadlineError: the work of another phase did not end in time.
            BackendError: a part could not be moved; says who holds what.
            DeviceMemoryError: there is no room for the work; says who holds what, and what was planned.
        """
        with self.gate.during(phase, self._enter):
            try:
                yield
            except DeviceMemoryError as error:
                raise self._watch.explained(phase, error, self.holdings) from error

    def _enter(self, phase: Phase) -> None:
        self._move(phase)
        self._watch.entered(phase, self.holdings)

    def holdings(self) -> Holdings:
        """Bytes of each tenant's parts, as the tenants count them."""
        return {name: tenant.held_bytes() for name, tenant in self._tenants.items()}

    def _move(self, phase: Phase) -> None:
        wanted = self._table[phase]
        for name, tenant in self._tenants.items():
            forget = self._forgets[name].get(phase)
            if forget is not None and name not in self._forgotten:
                self._step(str(phase), f"{name} leaving", forget)
                self._present[name] = set()
                self._forgotten.add(name)
            staying = tuple(part for part in wanted.get(name, ()) if part in self._present[name])
            if set(staying) != self._present[name]:
                self._step(str(phase), f"{name} leaving", partial(tenant.keep, staying))
                self._present[name] = set(staying)
        for name, parts in wanted.items():
            missing = tuple(part for part in parts if name in self._tenants and part not in self._present[name])
            if missing:
                self._step(str(phase), f"{name} coming back", partial(self._tenants[name].bring, missing))
                self._forgotten.discard(name)
                self._present[name] |= set(missing)

    def _step(self, moment: str, what: str, move: Callable[[], None]) -> None:
        try:
            move()
        except (BackendError, ForeignError) as error:
            raise BackendError(
                f"before {moment}, {what}: {error.message} ({told(self.holdings)})", fix=error.fix
            ) from error


def account(holdings: Mapping[str, Mapping[MemoryPart, float]]) -> str:
    """The tenants and what they hold, in words."""
    sizes = [(f"{name}'s {part}", size) for name, parts in holdings.items() for part, size in parts.items() if size]
    parts = [f"{what} {size / 2**30:.2f} GiB" for what, size in sizes]
    return f"in memory: {', '.join(parts)}" if parts else "nothing of these models is in memory"


def told(holdings: Callable[[], Holdings]) -> str:
    """:func:`account` for an error, in the midst of which the tenants may not answer."""
    try:
        return account(holdings())
    except NemorlError as error:
        return f"who holds what cannot be told: {error.message}"
