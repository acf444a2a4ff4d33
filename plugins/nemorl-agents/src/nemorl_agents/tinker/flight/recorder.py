"""FlightRecorder: tells the loops of a server's clients apart, and keeps each as a run.

What goes wrong here costs a record, never a client's request: it is warned of, and that loop is recorded no further.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
from nemorl_agents.tinker.flight.loop import TOO_MUCH, Loop
from nemorl_agents.tinker.flight.operations import (
    FOLDER,
    LOADED,
    Operation,
    last_seq,
    read_step,
    recorded_steps,
    step_file,
)
from nemorl_agents.tinker.folders import Folders, plain
from nemorl_agents.tinker.models import RUNS, STATE
from nemorl_agents.tinker.records import Model, Records, Request, Sampler
from nemorl_agents.tinker.wire.bodies import LoadWeights, body_of

log = logging.getLogger(__name__)


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
        self._lock = threading.Lock()
        """Held by whoever changes what a loop holds, and never while a file is written: samples do not wait for one."""
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
        with self._guarded(request.scope):
            loop = self._loop(request.scope, request.seq)
            if loop is None or request.body is None or request.seq <= loop.told_seq:
                return
            loop.told_seq = request.seq
            with self._lock:
                loop.hold(Operation(request.kind, request.id, request.seq, request.body, answer))
            match request.kind:
                case "load_weights":
                    self._keep_loaded(loop, request)
                case "save_weights":
                    self._keep_saved(loop, request)
                case "optim_step":
                    self._keep_step(loop)

    def sampled(self, answers: Sequence[tuple[Request, bytes]]) -> None:
        """Samples of one call."""
        try:
            sources = {scope: self._source(scope) for scope in {request.scope for request, _ in answers}}
        except Exception as error:
            log.warning("%d samples are not recorded: %s", len(answers), error)
            return
        with self._lock:
            self._calls += 1
            for request, answer in answers:
                model_id, weights = sources[request.scope]
                loop = self._loops.get(model_id)
                if loop is not None and request.body is not None:
                    made = Operation("sample", request.id, request.seq, request.body, answer, self._calls, weights)
                    loop.hold(made)

    def _source(self, sampler_id: str) -> tuple[str, int]:
        """(model, number of the request that saved them) of a sampler's weights; ("", 0) for those of a base."""
        sampler = self._records.samplers.get(sampler_id)
        if sampler is None or sampler.folder is None:
            return "", 0
        return self._model_of(sampler) or "", Folders.seq_of(sampler.folder)

    def end(self, model_id: str, status: Mapping[str, Any], save: Callable[[Path], None]) -> None:
        """The client of a loop is done or gone.

        Args:
            model_id: Of the loop.
            status: How its session ended.
            save: Writes the model's state into a folder.
        """
        with self._guarded(model_id):
            loop = self._loop(model_id)
            if loop is not None:
                self._keep_last(loop, model_id, save)
                self._later(model_id, partial(loop.book.end, status))
        with self._lock:
            self._loops.pop(model_id, None)
        self._lost.discard(model_id)

    def _keep_last(self, loop: Loop, model_id: str, save: Callable[[Path], None]) -> None:
        """The state after the last step, where it is to be had."""
        if loop.book.is_saved or loop.has_loaded:
            return
        folder = self._folder / RUNS / f".last_{plain(model_id)}"
        try:
            with replacing_folder(folder) as draft:
                save(draft)
        except Exception as error:
            log.warning("%s ends without a checkpoint of its last step: %s", model_id, error)
            return
        step = loop.book.step  # a model that came back to be saved may have told of more

        def keep() -> None:
            loop.book.save(step, folder / STATE)
            remove(folder)

        self._later(model_id, keep)

    def close(self) -> None:
        """Before the journal: loops go on where the next server begins here."""
        for model_id, loop in self._loops.items():
            self._later(model_id, partial(loop.book.close, "the server ended"))
        self._behind.shutdown(wait=True)
        self._loops.clear()

    # One loop

    @contextmanager
    def _guarded(self, model_id: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            log.warning("%s is recorded no further: %s", model_id, error)
            self._lost.add(model_id)
            with self._lock:
                loop = self._loops.pop(model_id, None)
            if loop is not None:
                self._later(model_id, partial(loop.book.close, "its record could not be written"))

    def _later(self, model_id: str, job: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                job()
            except Exception as error:
                log.warning("a part of the record of %s is lost: %s", model_id, error)

        self._behind.submit(guarded)

    def _loop(self, model_id: str, seq: int = -1) -> Loop | None:
        """The loop of a model, one of whose requests is being told; ``None`` where none is recorded."""
        if model_id in self._lost:
            return None
        if model_id in self._loops:
            return self._loops[model_id]
        model = self._records.models.get(model_id)
        if model is None:
            return None
        path = self._folder / RUNS / plain(model_id)
        steps = recorded_steps(path / FOLDER)
        kept = last_seq(read_step(step_file(path, steps[-1]))) if steps else -1
        if model.state is not None and kept < model.state_seq != seq:
            raise DataError(
                f"requests up to {model.state_seq} are in its saved state, and the record knows those up to {kept}",
                fix="nothing else is lost",
            )
        book = Logbook(path, self._config(model, path), self._decode, log.warning)
        if not book.step:
            book.directory.event("client", **self._facts(model))
        with self._lock:
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
        with self._lock:
            operations, left_out = loop.taken()
        book, step = loop.book, loop.book.keep(operations)
        if left_out:
            self._later(book.path.name, partial(book.directory.warn, f"step {step}: {left_out} {TOO_MUCH}"))
        self._later(book.path.name, partial(book.tell, step))  # by its file: memory does not grow with those that wait

    def _keep_loaded(self, loop: Loop, request: Request) -> None:
        assert request.body is not None, "it has run"
        found = self._records.checkpoints.get(body_of(LoadWeights, request.body).path)
        assert found is not None, "it was loaded"
        with replacing_folder(loop.book.path / LOADED / f"{request.seq:08d}") as draft:
            linked(self._folder / found.folder, draft)

    def _keep_saved(self, loop: Loop, request: Request) -> None:
        if loop.has_loaded:
            return
        for checkpoint in self._records.checkpoints.where("model = ? AND type = 'training'", request.scope):
            if Folders.seq_of(checkpoint.folder) == request.seq:
                step, state = loop.book.step, self._folder / checkpoint.folder / STATE
                self._later(request.scope, partial(loop.book.save, step, state))
