"""The body of a Ray actor: one rank, its log file, and a few facts about where it runs."""

from __future__ import annotations

import os
import socket
import sys
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemorl.base.process.logs import Carried, entered
from nemorl.errors import NemorlError
from nemorl.resources.heartbeat import Pulse, pulse_of
from nemorl.resources.ports import free_port
from nemorl.resources.worker import AttachedFactory, Role, WorkerContext, WorkerFactory, WorkerHost
from nemorl.weights import Digested, Form, WeightHandle


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """Host, address and process of a worker."""

    host: str
    address: str
    pid: int
    gpus: tuple[str, ...] = ()
    """Ids of its GPUs"""


PULSE = "pulse"
"""The concurrency group of heartbeats: Ray answers them from a thread of their own, beside the call at work."""


class RayWorker:
    """The actor of one rank. Its calls run in the order they were made."""

    def __init__(self, log: Path | None, folder: Path, threads: str) -> None:
        if log is not None:
            _log_to(log)
        os.environ["OMP_NUM_THREADS"] = threads  # nothing has imported torch yet
        if folder.is_dir():
            os.chdir(folder)  # relative paths of a config mean the same here as in the driver
        self._host: WorkerHost | None = None
        self._working = 0
        """The thread of the call at work."""

    def facts(self) -> WorkerFacts:
        import ray

        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", ())
        return WorkerFacts(socket.gethostname(), address, os.getpid(), tuple(gpus))

    def free_port(self) -> int:
        """A port for a rendezvous on this machine."""
        return free_port()

    def build(self, factory: WorkerFactory, context: WorkerContext) -> None:
        if context.gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(context.gpus)  # nothing has used CUDA yet
        self._host = WorkerHost(factory, context)

    def attach_engine(self, factory: AttachedFactory) -> None:
        self._built.attach_engine(factory)

    def invoke(
        self,
        role: Role,
        method: str,
        kwargs: dict[str, Any],
        logs: Carried | None,
        *args: Any,
        answers: bool = True,
        parts: int = 0,
        keeps: bool = False,
    ) -> Any:
        """One method of the worker. Arguments stand at the top level, where Ray resolves references.

        ``answers`` is False where another rank returns the same. With ``parts``, a function and as many arguments of it
        stand in place of the first argument. With ``keeps``, the result comes beside word that it is there, and the
        caller waits for that alone.
        """
        self._working = threading.get_ident()
        with entered(logs):
            if parts:
                make, *values = args[: 1 + parts]
                args = (make(*values), *args[1 + parts :])
            found = self._built.call(role, method, args, kwargs)
            found = found.result() if isinstance(found, Future) else found
            found = found if answers else None
            return (None, found) if keeps else found

    def pulse(self) -> Pulse:
        """Where the call at work is; asked of groups whose ranks wait for each other."""
        return pulse_of(self._working)

    def publish(self, transport: str, version: int, form: Form, digested: Digested | None) -> WeightHandle | None:
        self._working = threading.get_ident()
        return self._built.publish(transport, version, form, digested)

    def shutdown(self) -> None:
        if self._host is not None:
            self._host.shutdown()

    @property
    def _built(self) -> WorkerHost:
        if self._host is None:
            raise NemorlError("this worker was restarted and holds nothing yet", fix="this is a bug: please report it")
        return self._host


def start_worker(options: dict[str, Any], *args: Any, pulses: bool = False) -> Any:
    """A ``RayWorker`` in an actor, which ends with the process that calls this.

    Args:
        options: Ray's, of the actor.
        args: Of ``RayWorker``.
        pulses: It answers heartbeats. Its calls then run in one thread that is not the process's first.
    """
    import ray

    actor = ray.remote(concurrency_groups={PULSE: 1})(RayWorker) if pulses else ray.remote(RayWorker)
    return actor.options(**options).remote(*args)


def _log_to(path: Path) -> None:
    """Everything that this process prints, native libraries included, goes to ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(file, descriptor)
    os.close(file)
