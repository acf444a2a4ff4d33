"""The thread that owns an engine: others hand it requests, and things to do between two steps.

An engine is not safe to share between threads, but a run wants to exchange its weights while it generates. So one
thread alone touches it. It decodes as long as there are requests; whatever else is asked of it happens between two
steps, with the requests left as they are. Several calls of ``generate`` share the engine's batch.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from nemorl.errors import BackendError

T = TypeVar("T")

ONE_ENGINE_AT_A_TIME = threading.Lock()
"""vLLM keeps the context of a forward pass in a variable of the process."""


@dataclass
class Job:
    """The requests of one call of ``generate``."""

    requests: Sequence[tuple[Sequence[int], Any]]
    """Prompt token ids and ``vllm.SamplingParams``, one per sample."""
    done: Future[list[Any]] = field(default_factory=Future)
    outputs: dict[int, Any] = field(default_factory=dict)
    """The ``RequestOutput`` of each finished request, by its position."""


class EngineLoop:
    """An engine and its thread. Everything here may be called from any thread."""

    def __init__(self, build: Callable[[], Any], close: Callable[[Any], None], adapter: Any = None) -> None:
        """Build the engine, on its thread.

        Args:
            build: Makes the ``LLMEngine``. What it raises is raised here.
            close: Takes it down.
            adapter: The ``LoRARequest`` of every request.
        """
        self._state = _State(build, close, adapter)
        self._thread = threading.Thread(target=self._state.run, name="nemorl-vllm", daemon=True)
        self._thread.start()
        self._state.ready.result()
        # At exit too: an interpreter must not end while the thread is inside of torch.
        self._close = weakref.finalize(self, _stop, self._state, self._thread)

    def generate(self, requests: Sequence[tuple[Sequence[int], Any]]) -> list[Any]:
        """The finished ``RequestOutput`` of each request, in order."""
        job = Job(requests)
        self._post(lambda: self._state.add(job))
        try:
            return job.done.result()
        except BaseException:
            self._post(lambda: self._state.drop(job))  # e.g. the user pressed Ctrl-C while waiting
            raise

    def call(self, function: Callable[[Any], T]) -> T:
        """``function(engine)``, between two steps."""
        result: Future[T] = Future()
        self._post(lambda: _resolve(result, lambda: function(self._state.engine)))
        return result.result()

    def fail(self, error: Exception) -> None:
        """End all requests in progress with an error. Only for functions that ``call`` runs."""
        self._state.fail(error)

    def close(self) -> None:
        """Take the engine down. Requests in progress fail. Calling it twice is harmless."""
        self._close()

    def _post(self, command: Callable[[], None]) -> None:
        if not self._thread.is_alive():
            raise BackendError("this generator has been shut down", fix="build a new one")
        self._state.inbox.put(command)


class _State:
    """What the thread works on. It does not refer to the ``EngineLoop``, which can so be collected and end it."""

    def __init__(self, build: Callable[[], Any], close: Callable[[Any], None], adapter: Any) -> None:
        self.inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """Commands in order; ``None`` ends the thread."""
        self.ready: Future[None] = Future()
        self.engine: Any = None
        self._build, self._close_engine, self._adapter = build, close, adapter
        self._jobs: dict[str, tuple[Job, int]] = {}
        """Where the output of each running request belongs."""
        self._count = 0

    def run(self) -> None:
        """The thread."""

        def build() -> None:
            with ONE_ENGINE_AT_A_TIME:
                self.engine = self._build()

        _resolve(self.ready, build)
        if self.engine is None:
            return
        while True:
            while not self._jobs or not self.inbox.empty():
                command = self.inbox.get()
                if command is None:
                    self._end()
                    return
                with ONE_ENGINE_AT_A_TIME:
                    command()
            self._step()

    def add(self, job: Job) -> None:
        """Put the requests of a job into the engine's queue: all of them or, if one is refused, none."""
        from vllm.inputs import tokens_input

        try:
            for position, (prompt, params) in enumerate(job.requests):
                name, self._count = str(self._count), self._count + 1
                self.engine.add_request(name, tokens_input(list(prompt)), params, lora_request=self._adapter)
                self._jobs[name] = job, position
        except Exception as error:
            self.drop(job)
            job.done.set_exception(error)
        if not job.requests:
            job.done.set_result([])

    def drop(self, job: Job) -> None:
        """Forget a job's requests."""
        names = [name for name, (owner, _) in self._jobs.items() if owner is job]
        if names:
            self.engine.abort_request(names)
        for name in names:
            del self._jobs[name]

    def _step(self) -> None:
        """One token for every request of the batch."""
        try:
            with ONE_ENGINE_AT_A_TIME:
                outputs = self.engine.step()
        except Exception as error:
            self.fail(error)
            return
        for output in outputs:
            if output.finished:
                job, position = self._jobs.pop(output.request_id)
                job.outputs[position] = output
                if len(job.outputs) == len(job.requests):
                    job.done.set_result([job.outputs[index] for index in range(len(job.requests))])

    def fail(self, error: Exception) -> None:
        """Tell everyone who waits."""
        jobs = {id(job): job for job, _ in self._jobs.values()}
        for job in jobs.values():
            self.drop(job)
            job.done.set_exception(error)

    def _end(self) -> None:
        self.fail(BackendError("the generator was shut down while it generated", fix="wait for generate to return"))
        engine, self.engine = self.engine, None
        with ONE_ENGINE_AT_A_TIME:
            self._close_engine(engine)


def _resolve(future: Future[T], function: Callable[[], T]) -> None:
    """Give the future the function's result or exception."""
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


def _stop(state: _State, thread: threading.Thread) -> None:
    state.inbox.put(None)
    thread.join()
