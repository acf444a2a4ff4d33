"""The thread that owns an engine: others hand it requests one by one, and things to do between two steps.

An engine is not safe to share between threads, but requests come from many, and a run wants to exchange weights while
they are answered. So one thread alone touches it. It makes steps as long as there are requests; what arrives joins at
the next step, what is cancelled leaves before it, and whatever else is asked happens between two steps.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, InvalidStateError, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import count
from typing import Protocol, TypeVar

from nemorl.errors import BackendError
from nemorl.types import Completion, GenerationRequest

T = TypeVar("T")

Answer = Future[list[Completion]]
Outcome = list[Completion] | Exception


class RequestEngine(Protocol):
    """Decodes the requests of a :class:`RequestLoop`, which it knows by number. Its thread alone calls it."""

    def add(self, requests: Mapping[int, GenerationRequest]) -> Mapping[int, Exception]:
        """Begin these, in this order. The errors of those that it refuses."""
        ...

    def drop(self, numbers: Collection[int]) -> None:
        """Forget these and free what they hold."""
        ...

    def step(self) -> Mapping[int, Outcome]:
        """One token for every request that has a place. What became of those that ended with it."""
        ...

    def close(self) -> None:
        """Release memory. It has no requests."""
        ...


class RequestLoop:
    """An engine and its thread: what backends with the capability ``submit`` inherit from. Any thread may call it."""

    def __init__(
        self,
        build: Callable[[], RequestEngine],
        require: Callable[[int, GenerationRequest], None],
        name: str,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        """Build the engine, on its thread.

        Args:
            build: Makes it, without a reference to this object, which ends the thread when nobody else has one. What
                it raises is raised here.
            require: Raises if a request, given its place in its call, cannot be answered. Any thread calls it.
            name: Of the thread.
            lock: Held while the engine is at work, if it shares something with others of its process.
        """
        self._require = require
        self._state = _State(lock or nullcontext())
        self._numbers = count()
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._state.run, args=(build, ready), name=name, daemon=True)
        self._thread.start()
        ready.result()
        # At exit too: an interpreter must not end while the thread is inside of torch.
        self._end = weakref.finalize(self, _stop, self._state, self._thread)

    def submit(self, request: GenerationRequest) -> Answer:
        """Begin a request, which joins those that run (``RequestBackend``)."""
        return self.submit_all([request])[0]

    def submit_all(self, requests: Sequence[GenerationRequest]) -> list[Answer]:
        """Begin requests together: they are computed as one batch, and equal prompts once."""
        answers: list[Answer] = [Future() for _ in requests]
        accepted: dict[int, tuple[GenerationRequest, Answer]] = {}
        for index, (request, answer) in enumerate(zip(requests, answers, strict=True)):
            try:
                self._require(index, request)
            except Exception as error:
                answer.set_exception(error)
                continue
            if request.seeds:
                accepted[next(self._numbers)] = request, answer
            else:
                answer.set_result([])
        self._post(lambda: self._state.add(accepted))
        for number, (_, answer) in accepted.items():
            answer.add_done_callback(partial(_drop_if_cancelled, self._state, number))
        return answers

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """One list per request, one completion per seed. When one fails, or the wait is interrupted, the others are
        cancelled.

        Raises:
            BackendError: A prompt is empty, too long or not of this vocabulary, or the model's logits are not finite.
        """
        answers = self.submit_all(requests)
        try:
            done, _ = wait(answers, return_when=FIRST_EXCEPTION)
            for answer in answers:
                if answer in done:
                    answer.result()
            return [answer.result() for answer in answers]
        except BaseException:
            for answer in answers:
                answer.cancel()
            raise

    def call(self, function: Callable[[], T]) -> T:
        """``function()`` on the engine's thread, between two steps."""
        result: Future[T] = Future()
        self._post(lambda: self._state.resolve(result, function))
        return result.result()

    def call_idle(self, what: str, function: Callable[[], T]) -> T:
        """The same, refused while there are requests.

        Raises:
            BackendError: There are.
        """

        def run() -> T:
            running = len(self._state.running)
            if running:
                raise BackendError(
                    f"the engine cannot {what}: {running} request{'s are' if running > 1 else ' is'} running",
                    fix="wait for their futures, or cancel them, first",
                )
            return function()

        return self.call(run)

    def fail(self, error: Exception) -> None:
        """End all requests with an error. Only for functions that ``call`` runs."""
        self._state.fail(error)

    def shutdown(self) -> None:
        """Take the engine down. Requests in progress fail. Calling it twice is harmless."""
        self._end()

    def _post(self, command: Callable[[], None]) -> None:
        if not (self._thread.is_alive() and self._state.post(command)):
            raise BackendError("this generator has been shut down", fix="build a new one")


class _State:
    """State of the request thread. It does not refer to the ``RequestLoop``, which can so be collected and end it."""

    engine: RequestEngine

    def __init__(self, lock: AbstractContextManager[object]) -> None:
        self.inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """Commands in order; ``None`` ends the thread."""
        self.running: dict[int, Answer] = {}
        self._lock = lock
        self._door = threading.Lock()
        """Held while a command is put into the inbox, and while that is closed."""
        self._is_open = True

    def post(self, command: Callable[[], None]) -> bool:
        """Have the thread do this; ``False`` where it takes no more, so that nobody waits for what is never done."""
        with self._door:
            if self._is_open:
                self.inbox.put(command)
            return self._is_open

    def run(self, build: Callable[[], RequestEngine], ready: Future[None]) -> None:
        """The thread."""

        def start() -> None:
            self.engine = build()

        self.resolve(ready, start)
        if ready.exception() is not None:
            return
        while True:
            while not self.running or not self.inbox.empty():
                command = self.inbox.get()
                if command is None:
                    self._end()
                    return
                self._do(command)
                del command
            self._step()

    def _do(self, command: Callable[[], None]) -> None:
        """Nobody else would see what goes wrong here: it is the error of all requests."""
        try:
            command()
        except Exception as error:
            self.fail(error)

    def resolve(self, future: Future[T], function: Callable[[], T]) -> None:
        """Give the future the function's result or exception."""
        try:
            with self._lock:
                result = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    def add(self, requests: Mapping[int, tuple[GenerationRequest, Answer]]) -> None:
        self.running |= {number: answer for number, (_, answer) in requests.items()}
        refused: Mapping[int, Exception]
        try:
            with self._lock:
                refused = self.engine.add({number: request for number, (request, _) in requests.items()})
        except Exception as error:
            refused = dict.fromkeys(requests, error)
        for number, reason in refused.items():
            self._settle(number, reason)

    def drop(self, number: int) -> None:
        if self.running.pop(number, None) is not None:
            with self._lock:
                self.engine.drop([number])

    def fail(self, error: Exception) -> None:
        """Tell everyone who waits."""
        failed, self.running = self.running, {}
        with self._lock, suppress(Exception):  # the first error is the one to tell
            self.engine.drop(list(failed))
        for answer in failed.values():
            _give(answer, error)

    def _step(self) -> None:
        try:
            with self._lock:
                ended = self.engine.step()
        except Exception as error:
            self.fail(error)
            return
        for number, outcome in ended.items():
            self._settle(number, outcome)

    def _settle(self, number: int, outcome: Outcome) -> None:
        answer = self.running.pop(number, None)
        if answer is not None:
            _give(answer, outcome)

    def _end(self) -> None:
        error = BackendError("the generator was shut down while it generated", fix="wait for generate to return")
        with self._door:
            self._is_open = False
        self.fail(error)
        while not self.inbox.empty():  # what others have posted before must not wait for ever
            command = self.inbox.get()
            if command is not None:
                self._do(command)
        self.fail(error)
        with self._lock:
            self.engine.close()
        del self.engine


def _give(answer: Answer, outcome: Outcome) -> None:
    with suppress(InvalidStateError):  # it has been cancelled
        if isinstance(outcome, Exception):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)


def _drop_if_cancelled(state: _State, number: int, answer: Answer) -> None:
    if answer.cancelled():
        answer.set_running_or_notify_cancel()  # or ``concurrent.futures.wait`` takes no notice
        state.inbox.put(lambda: state.drop(number))


def _stop(state: _State, thread: threading.Thread) -> None:
    state.inbox.put(None)
    thread.join()
