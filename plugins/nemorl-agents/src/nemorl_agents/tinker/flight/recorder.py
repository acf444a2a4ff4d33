"""FlightRecorder: tells the loops of a server's clients apart, and keeps each as a run.

What goes wrong here costs a record, never a client's request: it is warned of, and that loop is recorded no further.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from nemorl.base.files.atomic import remove, replacing_folder
from nemorl.config import GenerationConfig, PolicyConfig
from nemorl.config.load import validate
from nemorl.errors import DataError

from nemorl_agents.tinker.flight.config import ClientLoopConfig
from nemorl_agents.tinker.flight.learned import Decode
from nemorl_agents.tinker.flight.logbook import Logbook, linked
from nemorl_agents.tinker.flight.operations import FOLDER, LOADED, Operation, last_seq, read_step, step_file
from nemorl_agents.tinker.folders import plain
from nemorl_agents.tinker.models import RUNS, STATE
from nemorl_agents.tinker.records import Model, Records, Request, Sampler
from nemorl_agents.tinker.wire.bodies import LoadWeights, body_of

log = logging.getLogger(__name__)
LOST_LOAD = "kind = 'load_weights' AND state IN ('done', 'gone') AND body IS NULL"


@dataclass
class Loop:
    """One that goes on."""

    book: Logbook
    kept_seq: int
    """Requests up to this one are on disk."""
    operations: list[Operation] = field(default_factory=list)
    """Those since the last step."""


class FlightRecorder:
    """The loops of a server. Samples may be told by another thread than the rest."""

    def __init__(self, policy: PolicyConfig, generation: GenerationConfig, decode: Decode) -> None:
        """
        Args:
            policy: Of the base; its adapter is the largest that is served.
            generation: The engine that samples.
            decode: Token ids to text.
        """
        self._policy, self._generation, self._decode = policy, generation, decode
        self._folder: Path
        self._records: Records
        self._loops: dict[str, Loop] = {}
        self._lost: set[str] = set()
        self._calls = 0
        self._lock = threading.RLock()
        self._behind = ThreadPoolExecutor(1, "nemorl-flight")

    def open(self, folder: Path, records: Records) -> None:
        """Begin.

        Args:
            folder: Of the server.
            records: Its journal.
        """
        self._folder, self._records = folder, records

    def ran(self, request: Request, answer: bytes) -> None:
        """A request of a model has run, or has been run again after a kill.

        Args:
            request: With its body.
            answer: It was given.
        """
        with self._guarded(request.scope, request.seq) as loop:
            if loop is None or request.body is None or request.seq <= loop.kept_seq:
                return
            operation = Operation(request.kind, request.id, request.seq, request.body, answer)
            loop.operations.append(operation)
            match request.kind:
                case "load_weights":
                    self._keep_loaded(loop, request)
                case "save_weights":
                    self._keep_saved(loop, request)
                case "optim_step":
                    self._keep_step(loop)

    def sampled(self, answers: Sequence[tuple[Request, bytes]]) -> None:
        """Samples of one call."""
        with self._lock:
            self._calls += 1
            for request, answer in answers:
                self._sampled(request, answer)

    def _sampled(self, request: Request, answer: bytes) -> None:
        sampler = self._records.samplers.get(request.scope)
        model_id = None if sampler is None else self._model_of(sampler)
        if sampler is None or sampler.folder is None or model_id not in self._loops or request.body is None:
            return
        weights = int(sampler.folder[-8:])
        made = Operation("sample", request.id, request.seq, request.body, answer, self._calls, weights)
        self._loops[model_id].operations.append(made)

    def end(self, model_id: str, status: Mapping[str, Any], save: Callable[[Path], None]) -> None:
        """The client of a loop is done or gone.

        Args:
            model_id: Of the loop.
            status: How its session ended.
            save: Writes the model's state into a folder.
        """
        with self._guarded(model_id) as loop:
            if loop is None:
                return
            state = self._folder / RUNS / f".last_{plain(model_id)}"
            if not loop.book.is_saved:
                with replacing_folder(state) as draft:
                    save(draft)
            step = loop.book.step
            self._loops.pop(model_id)

            def finish() -> None:
                loop.book.save(step, state / STATE)
                remove(state)
                loop.book.end(status)

            self._later(model_id, finish)
        self._lost.discard(model_id)

    def close(self) -> None:
        """Before the journal: loops go on where the next server begins here."""
        for loop in self._loops.values():
            self._behind.submit(loop.book.close)
        self._behind.shutdown(wait=True)
        self._loops.clear()

    # One loop

    @contextmanager
    def _guarded(self, model_id: str, seq: int = -1) -> Iterator[Loop | None]:
        with self._lock:
            try:
                yield None if model_id in self._lost else self._loop(model_id, seq)
            except Exception as error:
                self._lose(model_id, error)

    def _lose(self, model_id: str, error: Exception) -> None:
        log.warning("%s is recorded no further: %s", model_id, error)
        self._lost.add(model_id)
        loop = self._loops.pop(model_id, None)
        if loop is not None:
            self._behind.submit(loop.book.close)

    def _later(self, model_id: str, job: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                job()
            except Exception as error:
                log.warning("a part of the record of %s is lost: %s", model_id, error)

        self._behind.submit(guarded)

    def _loop(self, model_id: str, seq: int) -> Loop | None:
        """The loop of a model, one of whose requests is being told; ``None`` for one that was never made."""
        if model_id not in self._loops:
            model = self._records.models.get(model_id)
            if model is None:
                return None
            path = self._folder / RUNS / plain(model_id)
            book = Logbook(path, self._config(model, path), self._decode, log.warning)
            last = read_step(step_file(path, book.step)) if book.step else []
            if not book.step:
                book.directory.event("client", **self._facts(model))
            kept = last_seq(last)
            if self._records.requests.count(f"scope = ? AND seq > ? AND seq != ? AND {LOST_LOAD}", model_id, kept, seq):
                book.close()
                raise DataError("the server was killed as it loaded a state", fix="nothing else is lost")
            self._loops[model_id] = Loop(book, kept)
        return self._loops[model_id]

    def _config(self, model: Model, path: Path) -> ClientLoopConfig:
        adapter = {name: value for name, value in model.new.items() if name != "base_model"}
        fields = {
            "policy": self._policy.model_dump(mode="json"),
            "generation": self._generation.model_dump(mode="json"),
            "adapter": adapter,
            "data": {"name": "client_requests", "path": str((path / FOLDER).resolve())},
            "checkpoint": {"every": 0, "export": False},
        }
        return validate(ClientLoopConfig, fields, source="flight recorder")

    def _facts(self, model: Model) -> dict[str, Any]:
        session = self._records.sessions.get(model.session)
        facts = {} if session is None else session.facts
        return {"model": model.id, "client": model.owner, "session": facts, "metadata": model.metadata}

    def _model_of(self, sampler: Sampler) -> str | None:
        if sampler.model_path is None:
            return sampler.model
        found = self._records.checkpoints.get(sampler.model_path)
        return None if found is None else found.model

    def _keep_step(self, loop: Loop) -> None:
        operations, loop.operations = loop.operations, []
        step = loop.book.keep(operations)
        loop.kept_seq = last_seq(operations)
        self._later(loop.book.path.name, lambda: loop.book.tell(step, operations))

    def _keep_loaded(self, loop: Loop, request: Request) -> None:
        assert request.body is not None, "it has run"
        found = self._records.checkpoints.get(body_of(LoadWeights, request.body).path)
        assert found is not None, "it was loaded"
        with replacing_folder(loop.book.path / LOADED / f"{request.seq:08d}") as draft:
            linked(self._folder / found.folder, draft)

    def _keep_saved(self, loop: Loop, request: Request) -> None:
        for checkpoint in self._records.checkpoints.where("model = ? AND type = 'training'", request.scope):
            if checkpoint.folder.endswith(f"-{request.seq:08d}"):
                step, state = loop.book.step, self._folder / checkpoint.folder / STATE
                self._later(request.scope, partial(loop.book.save, step, state))
