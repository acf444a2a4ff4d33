"""Execution: what each kind of request does to the models, and how a model comes back after a kill.

A model in memory is its last saved state and the requests after it, run again in their order. States are saved after an
optimizer step, where there is no gradient, once the work since the last one has taken long enough: a kill costs at most
that much work, and no request is ever applied twice or left out.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemorl.base.files.atomic import remove, replacing_folder
from nemorl.errors import DataError

from nemorl_agents.tinker.errors import failure_of
from nemorl_agents.tinker.flight.observing import Flight
from nemorl_agents.tinker.folders import Folders
from nemorl_agents.tinker.models import Base, Models, NewModel
from nemorl_agents.tinker.records import Answer, Checkpoint, Model, Records, Request
from nemorl_agents.tinker.wire.bodies import CreateModel, LoadWeights, OptimStep, body_of
from nemorl_agents.tinker.wire.data import PassBody, pass_body
from nemorl_agents.tinker.wire.outputs import PROTOBUF, encoded_pass

if TYPE_CHECKING:
    from nemorl.contracts.training import Loss

LossNamed = Callable[[str, Mapping[str, float | str]], "Loss"]
"""From a client's name of a loss and its config to the loss"""


@dataclass
class Done:
    """A request that has run."""

    payload: bytes
    media_type: str = "application/json"
    rows: list[Callable[[], None]] = field(default_factory=list)
    """Writes to the journal, kept together with the answer or not at all."""
    keeps_body: bool = False
    """It is run again when the model comes back."""
    after: Callable[[], None] = lambda: None
    """What can wait until the answer is out."""

    @property
    def answer(self) -> Answer:
        return Answer("done", self.payload, self.media_type)


def done(payload: Mapping[str, Any], *rows: Callable[[], None]) -> Done:
    """A request whose answer is JSON."""
    return Done(json.dumps(payload).encode(), rows=[*rows])


def failed(error: Exception) -> Answer:
    """The answer of a request that raised."""
    message, category = failure_of(error)
    return Answer("failed", json.dumps({"error": message, "category": category}).encode())


def derived_seed(text: str) -> int:
    """A seed below 2^63 that follows from a text: of requests that name none."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 1


class Execution:
    """Runs requests of models on the thread that owns them."""

    def __init__(
        self,
        models: Models,
        records: Records,
        folders: Folders,
        loss_named: LossNamed,
        flight: Flight,
        *,
        replay_s: float,
    ) -> None:
        """
        Args:
            models: What trains.
            records: The journal.
            folders: Where states are saved.
            loss_named: Losses by their names; raises ``UsageError`` for one it does not know.
            flight: Told of what has run.
            replay_s: Seconds of work that a kill may cost a model. 0: a state after each step.
        """
        self.models, self.records, self.folders, self.flight = models, records, folders, flight
        self._loss_named, self._replay_s = loss_named, replay_s
        self._here: set[str] = set()
        """Models in memory"""
        self._spent_s: defaultdict[str, float] = defaultdict(float)
        """Work since the saved state"""

    def run(self, request: Request) -> Done:
        """Run a request of a model."""
        assert request.body is not None, "a request that waits has its body"
        began_s = time.monotonic()
        match request.kind:
            case "create_model":
                return self._create(request, body_of(CreateModel, request.body))
            case "load_weights":
                return self._load(request, body_of(LoadWeights, request.body))
            case "forward_backward":
                found = self._pass(request.scope, pass_body(request.body))
            case "optim_step":
                found = self._step(request, body_of(OptimStep, request.body))
            case _:
                raise AssertionError(f"{request.kind} is run elsewhere")
        self._spent_s[request.scope] += time.monotonic() - began_s
        return found

    def base(self, name: str) -> Base:
        """A base by its name.

        Raises:
            DataError: There is none.
        """
        found = next((base for base in self.models.bases if base.name == name), None)
        if found is None:
            served = ", ".join(base.name for base in self.models.bases)
            raise DataError(f"the model {name[:200]} is not served", fix=f"served is: {served}")
        return found

    def model(self, model_id: str) -> Model:
        """The record of a model, which is in memory afterwards.

        Raises:
            DataError: It was never made.
        """
        found = self.records.models.get(model_id)
        if found is None:
            raise DataError(f"the model {model_id} was never made", fix="the answer of create_model says why")
        if model_id not in self._here:
            self._bring_back(found)
        return found

    def forget(self, model_id: str) -> None:
        """Take a model out of memory. It comes back with its next request."""
        self._here.discard(model_id)
        self._spent_s.pop(model_id, None)
        self.models.free(model_id)

    def _bring_back(self, model: Model) -> None:
        self.models.free(model.id)
        self.models.create(model.id, NewModel(**model.new))
        if model.state is not None:
            self.models.load(model.id, self.folders.root / model.state, optimizer=True)
        began_s = time.monotonic()
        since = "scope = ? AND seq > ? AND state = 'done' AND body IS NOT NULL ORDER BY seq"
        for request in self.records.requests.where(since, model.id, model.state_seq):
            assert request.body is not None
            if request.kind == "optim_step":
                self.models.step(model.id, body_of(OptimStep, request.body).adam())
            else:
                body = pass_body(request.body)
                self.models.forward_backward(model.id, body.data(), self._loss_named(body.loss_name, body.loss_config))
            self.flight.ran(request, request.answer or b"")
        self._spent_s[model.id] = time.monotonic() - began_s
        self._here.add(model.id)

    # Kinds of requests

    def _create(self, request: Request, body: CreateModel) -> Done:
        base = self.base(body.base_model)
        if not base.trainable:
            raise DataError(f"{base.name} is served for sampling alone")
        body.optimizer_config.require_adam()
        if body.lora_config is None:
            raise DataError("a model without lora_config is not served", fix="use create_lora_training_client")
        given = body.lora_config.model_dump()
        if given["seed"] is None:
            given["seed"] = derived_seed(request.scope)
        new = NewModel(base_model=base.name, **given)
        self.models.free(request.scope)
        self.models.create(request.scope, new)
        self._here.add(request.scope)
        record = _record(request, new, body.user_metadata)
        payload = {"type": "create_model", "model_id": request.scope}
        return done(payload, lambda: self.records.models.put(record))

    def _load(self, request: Request, body: LoadWeights) -> Done:
        checkpoint = self.checkpoint(body.path, request.owner)
        if checkpoint.type != "training":
            raise DataError(f"{body.path} cannot be trained on", fix="load what save_state wrote")
        if body.optimizer_config is not None:
            body.optimizer_config.require_adam()
        new = NewModel(**checkpoint.new)
        if body.model_id is None:
            if body.base_model not in (None, new.base_model):
                raise DataError(f"{body.path} is of {new.base_model}, not of {body.base_model}")
            self.models.free(request.scope)
            self.models.create(request.scope, new)
            record = _record(request, new, body.user_metadata)
        else:
            record = self.model(request.scope)
            if _shape(record.new) != _shape(checkpoint.new):
                raise DataError(f"{body.path} has an adapter of another shape", fix=f"it is {_shape(checkpoint.new)}")
        self.models.load(request.scope, self.folders.root / checkpoint.folder, optimizer=body.optimizer)
        self._here.add(request.scope)
        put = self._state_saved(record, request.seq)
        payload = {"type": "load_weights", "path": body.path, "model_id": request.scope}
        found = done(payload, put)
        found.after = lambda: self._drop_states(request.scope)
        return found

    def _pass(self, model_id: str, body: PassBody) -> Done:
        self.model(model_id)
        loss = self._loss_named(body.loss_name, body.loss_config)
        call = self.models.forward if body.forward_only else self.models.forward_backward
        passed = call(model_id, body.data(), loss)
        return Done(encoded_pass(passed), PROTOBUF, keeps_body=not body.forward_only)

    def _step(self, request: Request, body: OptimStep) -> Done:
        adam = body.adam()
        self.model(request.scope)
        found = done({"metrics": self.models.step(request.scope, adam)})
        found.keeps_body = True
        found.after = lambda: self._save_state(request)
        return found

    # States

    def save(self, model_id: str, folder: Path) -> None:
        """Write a model's weights and optimizer into a folder that is not there yet."""
        self.model(model_id)
        self.models.save(model_id, folder, optimizer=True)

    def _save_state(self, request: Request) -> None:
        """After a step: its answer is kept, so that a kill in here costs no more than a replay."""
        if self._spent_s[request.scope] < self._replay_s:
            return
        record = self.records.models.get(request.scope)
        assert record is not None, "a step was made on it"
        self._state_saved(record, request.seq)()
        self._drop_states(request.scope)

    def _state_saved(self, record: Model, seq: int) -> Callable[[], None]:
        """Write a state; returns the write that makes it the model's."""
        folder = self.folders.state(record.id, seq)
        with replacing_folder(folder) as draft:
            self.models.save(record.id, draft, optimizer=True)
        self._spent_s[record.id] = 0.0
        values = {**asdict(record), "state_seq": seq, "state": folder.relative_to(self.folders.root).as_posix()}

        def put() -> None:
            with self.records.journal.writing():
                self.records.models.put(Model(**values))
                self.records.drop_bodies(record.id, seq)

        return put

    def _drop_states(self, model_id: str) -> None:
        record = self.records.models.get(model_id)
        kept = None if record is None or record.state is None else self.folders.root / record.state
        for folder in self.folders.states(model_id):
            if folder != kept:
                remove(folder)

    def checkpoint(self, path: str, owner: str) -> Checkpoint:
        """A checkpoint that this owner may read.

        Raises:
            DataError: There is none, or not for this owner: nobody learns which.
        """
        found = self.records.checkpoints.get(path)
        if found is None or (found.owner != owner and not found.is_public):
            raise DataError(f"there is no checkpoint {path[:300]}", fix="RestClient.list_user_checkpoints names yours")
        return found


def _record(request: Request, new: NewModel, metadata: Mapping[str, Any] | None) -> Model:
    return Model(request.scope, request.session, request.owner, asdict(new), dict(metadata or {}), time.time())


def _shape(new: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in new.items() if key != "seed"}
