"""Service: what a server knows, and the verbs that routes call; requests come in here and answers go out."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from nemorl.base.files.atomic import remove
from nemorl_trust.audit.recording import record

from nemorl_agents.tinker.errors import ApiError, ended, missing
from nemorl_agents.tinker.execution import Execution, LossNamed
from nemorl_agents.tinker.flight.observing import Flight, NoFlight
from nemorl_agents.tinker.folders import Folders
from nemorl_agents.tinker.futures import HOLD_S, Futures
from nemorl_agents.tinker.intake import Intake
from nemorl_agents.tinker.journal import Journal
from nemorl_agents.tinker.keys import Keys
from nemorl_agents.tinker.models import Models
from nemorl_agents.tinker.records import Kind, Model, Records, Request, Sampler, Session
from nemorl_agents.tinker.saving import Saving
from nemorl_agents.tinker.work import Worker

log = logging.getLogger(__name__)

UNFINISHED = "SELECT session FROM requests WHERE state = 'waiting'"
ACTIVE: Mapping[str, Any] = {"type": "active"}


def unloading(model_id: str) -> str:
    """The scope of the one request that unloads a model: it has no number among the model's own."""
    return f"{model_id}:unload"


@dataclass(frozen=True)
class Times:
    """How long things are waited for and kept, in seconds."""

    hold_s: float = HOLD_S
    """A poll waits for its answer; below the client's 45 s."""
    replay_s: float = 30.0
    """Work of one model that a kill may cost: it is done again. 0: a state is saved after each optimizer step."""
    park_s: float = 300.0
    """Without a sign of its client, a session's models leave the memory; they come back with its next request."""
    end_s: float = 86_400.0
    """Without a sign of its client, a session ends: what it saved by name remains."""
    answer_s: float = 3600.0
    """An answer is kept after its client has it."""
    sweep_s: float = 30.0
    """Between two looks at all this."""


class Service:
    """One server. It lives on one event loop; the models have a thread of their own."""

    def __init__(
        self,
        models: Models,
        folder: Path,
        keys: Keys,
        loss_named: LossNamed,
        *,
        times: Times | None = None,
        keep_snapshots: int = 16,
        flight: Flight | None = None,
    ) -> None:
        """
        Args:
            models: What trains and samples.
            folder: Of the journal and all that is saved.
            keys: Of clients.
            loss_named: Losses by their names.
            times: How long things are waited for and kept.
            keep_snapshots: Weights without a name that are kept of each model.
            flight: Records the loops. Unset: nobody does.

        Raises:
            UsageError: Another server has the folder.
        """
        self.keys, self.times = keys, times or Times()
        self.models = models
        self.folders = Folders(folder)
        self.records = Records(Journal(folder))
        self.flight = flight if flight is not None else NoFlight()
        self.flight.open(folder, self.records)
        self._execution = Execution(
            models, self.records, self.folders, loss_named, self.flight, replay_s=self.times.replay_s
        )
        self._saving = Saving(self._execution, keep_snapshots=keep_snapshots)
        self._seen_s: dict[str, float] = {}
        """Signs of sessions in this process"""
        self._parked: set[str] = set()
        self._sweeps: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin, with what an earlier server of this folder left."""
        self.futures = Futures(asyncio.get_running_loop(), self.records, hold_s=self.times.hold_s)
        self.worker = Worker(self._execution, self._saving, self.futures.done)
        self._intake = Intake(self.records, lambda each: self._offer(each.id, each.scope, each.seq, each.kind))
        now_s = time.monotonic()
        self._seen_s = {session.id: now_s for session in self.records.sessions.where("ended_s IS NULL")}
        for request_id, scope, seq, kind in self.records.waiting():
            self._offer(request_id, scope, seq, kind)
        for session in self.records.sessions.where(f"ended_s IS NOT NULL AND id IN ({UNFINISHED})"):
            self._clear(session)
        self.worker.start()
        self._sweeps = asyncio.create_task(self._sweep_now_and_then())

    async def stop(self) -> None:
        """End after the request that runs; the others wait in the journal."""
        if self._sweeps is not None:
            self._sweeps.cancel()
        await asyncio.to_thread(self.worker.shutdown)
        self.futures.forget(time.time() - self.times.answer_s)
        await asyncio.to_thread(self.flight.close)
        self.records.journal.close()

    # Sessions

    def create_session(self, owner: str, facts: Mapping[str, Any]) -> Session:
        """A new one."""
        session = Session(str(uuid.uuid4()), owner, time.time(), None, dict(ACTIVE), dict(facts))
        self.records.sessions.put(session)
        self._seen_s[session.id] = time.monotonic()
        record("tinker_session_started", {"session": session.id, "client": owner})
        return session

    def session(self, owner: str, session_id: str) -> Session:
        """A session of this owner that goes on; being asked for is a sign of its client.

        Raises:
            ApiError: There is none (404), or it has ended (410).
        """
        found = self.any_session(owner, session_id)
        if found.ended_s is not None:
            raise ended(session_id, str(found.status.get("type", "ended")))
        self._seen_s[session_id] = time.monotonic()
        self._parked.discard(session_id)
        return found

    def any_session(self, owner: str, session_id: str) -> Session:
        """A session of this owner, also one that has ended.

        Raises:
            ApiError: There is none.
        """
        found = self.records.sessions.get(session_id)
        if found is None or found.owner != owner:
            raise missing("session", session_id)
        return found

    def end_session(self, session: Session, status: Mapping[str, Any]) -> None:
        """Nothing more is done in it; checkpoints remain."""
        if session.ended_s is not None:
            return
        self.records.sessions.change(session.id, ended_s=time.time(), status=dict(status))
        self._seen_s.pop(session.id, None)
        self._parked.discard(session.id)
        self._clear(replace(session, status=dict(status)))

    def _clear(self, session: Session) -> None:
        """What waits in a session that has ended fails, and its models are forgotten."""
        found = [model.id for model in self.records.models.where("session = ?", session.id)]
        models = [each for each in found if self.records.answer(f"{unloading(each)}:0") is None]
        left = self.records.requests.where("session = ? AND state = 'waiting' AND kind = 'sample'", session.id)
        for request in left:
            self.worker.cancel(request.id, self._lane(request.scope))
        waiting = {scope for request_id, scope, _, kind in self.records.waiting() if kind != "sample"}
        started = {scope for scope in waiting if scope.startswith(f"{session.id}:")}
        reason = ended(session.id, str(session.status.get("type", "ended")))
        self.worker.soon(lambda: self.worker.end([*{*models, *started}], reason, session.status))

    # Requests

    def model(self, owner: str, model_id: str) -> Model:
        """A model of this owner.

        Raises:
            ApiError: There is none.
        """
        found = self.records.models.get(model_id)
        if found is None or found.owner != owner:
            raise missing("model", model_id)
        return found

    def sampler(self, owner: str, sampler_id: str) -> Sampler:
        """A sampler of this owner.

        Raises:
            ApiError: There is none.
        """
        found = self.records.samplers.get(sampler_id)
        if found is None or found.owner != owner:
            raise missing("sampling session", sampler_id)
        return found

    async def unload(self, owner: str, model_id: str) -> str:
        """Forget a model for good, once what runs has ended; returns the id of the request. Checkpoints remain.

        Raises:
            ApiError: There is none, or its session is gone.
        """
        session = self.model(owner, model_id).session
        return await self.submit(owner, session, unloading(model_id), 0, "unload_model", model_id.encode())

    async def submit(
        self,
        owner: str,
        session_id: str,
        scope: str,
        seq: int,
        kind: Kind,
        body: bytes,
        *,
        canonical: bytes | None = None,
        sequences: int = 1,
    ) -> str:
        """Take a request in; returns its id. It is on the disk before it is promised.

        Args:
            owner: Of the session.
            session_id: Of the scope.
            scope: A model or a sampler.
            seq: Of the request in its scope.
            kind: Of the request.
            body: As it came.
            canonical: Equal for retries, where bodies need not be. Unset: the body.
            sequences: That a sample asks for.

        Raises:
            ApiError: Another body has this number, or the session or the model is gone.
        """
        self.session(owner, session_id)
        if kind != "sample" and self.records.answer(f"{unloading(scope)}:0") is not None:
            raise ApiError(410, f"the model {scope} was unloaded", fix="load what save_state wrote into a new one")
        digest = blake2b(kind.encode() + b"\0" + (body if canonical is None else canonical), digest_size=16).hexdigest()
        request = Request(
            f"{scope}:{seq}", scope, seq, session_id, owner, kind, digest, body,
            created_s=time.time(), sequences=sequences,
        )  # fmt: skip
        await self._intake.take(request)
        return request.id

    def waits_for(self, request_id: str) -> str | None:
        """What a request of a model waits for that only its client can send."""
        scope, _, seq = request_id.rpartition(":")
        number = self.worker.missing(scope)
        if number is None or int(seq) < number:
            return None
        return f"request {number} of this model has not come; later ones wait for it"

    def cancel(self, owner: str, request_id: str) -> None:
        """Leave out a sample that waits.

        Raises:
            ApiError: There is no such request.
        """
        found = self.records.answer(request_id)
        if found is None or found[0] != owner:
            raise missing("request", request_id)
        scope = request_id.rpartition(":")[0]
        if found[1].state == "waiting" and self.records.samplers.get(scope) is not None:
            self.worker.cancel(request_id, self._lane(scope))

    def _offer(self, request_id: str, scope: str, seq: int, kind: Kind) -> None:
        if kind == "sample":
            self.worker.offer_sample(request_id, self._lane(scope))
        elif kind == "unload_model":
            self.worker.soon(lambda: self.worker.unload(request_id, scope.removesuffix(unloading(""))))
        else:
            self.worker.offer(request_id, scope, seq)

    def _lane(self, sampler_id: str) -> str:
        sampler = self.records.samplers.get(sampler_id)
        assert sampler is not None, "requests of unknown samplers are refused"
        return sampler.lane

    # What passes with time

    async def _sweep_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(self.times.sweep_s)
            try:
                await asyncio.to_thread(self.futures.forget, time.time() - self.times.answer_s)
                self.sweep()
            except Exception:
                log.exception("a Tinker server could not clear up")

    def sweep(self) -> None:
        """End and park sessions whose clients are gone, and remove checkpoints whose time is over."""
        now_s = time.monotonic()
        for session_id, seen_s in [*self._seen_s.items()]:
            session = self.records.sessions.get(session_id)
            if session is not None and now_s - seen_s > self.times.end_s:
                self.end_session(session, {"type": "cancelled", "detail": "its client gave no sign"})
            elif now_s - seen_s > self.times.park_s and session_id not in self._parked:
                self._parked.add(session_id)
                for model in self.records.models.where("session = ?", session_id):
                    self.worker.soon(lambda model_id=model.id: self.worker.park(model_id))  # type: ignore[misc]
        for checkpoint in self.records.checkpoints.where("expires_s < ?", time.time()):
            self.remove_checkpoint(checkpoint.path)

    def remove_checkpoint(self, path: str) -> None:
        """Forget a checkpoint and remove its files, after what is being done with them."""
        found = self.records.checkpoints.get(path)
        if found is not None:
            self.records.checkpoints.remove(path)
            self.worker.soon(lambda: remove(self.folders.root / found.folder))
