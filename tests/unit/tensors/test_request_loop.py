"""The thread that owns an engine, over one that answers when it is told to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import CancelledError, Future, wait

import pytest
from nemorl.errors import BackendError
from nemorl.types import Completion, GenerationRequest, SamplingParams
from nemorl_tensors.engines.requests import Outcome, RequestLoop
from recorded_messages import Raises

WAIT_S = 60.0


class Engine:
    """Each step answers the requests whose first token is in ``ready``; 13 makes the step fail."""

    def __init__(self) -> None:
        self.ready: set[int] = set()
        self.has: dict[int, GenerationRequest] = {}
        self.dropped: list[int] = []
        self.together: list[int] = []
        """How many requests came at the same time."""
        self.is_closed = False
        self.steps = threading.Semaphore(0)

    def add(self, requests: Mapping[int, GenerationRequest]) -> Mapping[int, Exception]:
        self.together.append(len(requests))
        refused = {n: ValueError("unlucky") for n, request in requests.items() if request.token_ids[0] == 4}
        self.has |= {n: request for n, request in requests.items() if n not in refused}
        return refused

    def drop(self, numbers: Collection[int]) -> None:
        for number in numbers:
            self.dropped.append(self.has.pop(number).token_ids[0])

    def step(self) -> Mapping[int, Outcome]:
        self.steps.acquire(timeout=0.01)
        if 13 in self.ready:
            self.ready.remove(13)
            raise BackendError("out of memory", fix="ask for less")
        ended = {n: request for n, request in self.has.items() if request.token_ids[0] in self.ready}
        for number in ended:
            del self.has[number]
        return {n: [Completion((seed,), (-1.0,), "stop") for seed in request.seeds] for n, request in ended.items()}

    def close(self) -> None:
        self.is_closed = True


def require(index: int, request: GenerationRequest) -> None:
    if not request.token_ids:
        raise BackendError(f"generation request {index} has an empty prompt", fix="give a token")


def request(*token_ids: int, seeds: tuple[int, ...] = (1,)) -> GenerationRequest:
    return GenerationRequest(token_ids, SamplingParams(), seeds)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def loop(engine: Engine) -> RequestLoop:
    return RequestLoop(lambda: engine, require, "test")


def test_a_call_of_generate_reaches_the_engine_as_one_batch(engine: Engine, loop: RequestLoop) -> None:
    engine.ready = {1, 2, 3}
    found = loop.generate([request(1), request(2, seeds=(5, 6)), request(3, seeds=())])
    assert [[c.token_ids for c in group] for group in found] == [[(1,)], [(5,), (6,)], []]
    assert engine.together == [2]  # without seeds there is nothing to do


def test_a_request_that_fails_ends_generate_and_takes_the_others_along(
    engine: Engine, loop: RequestLoop, raises: Raises
) -> None:
    engine.ready = {3}
    with raises(BackendError, 1):
        loop.generate([request(1), request(), request(3)])
    loop.call(lambda: None)
    assert not engine.has
    assert 1 in engine.dropped


def test_what_the_engine_refuses_is_the_error_of_that_request(engine: Engine, loop: RequestLoop) -> None:
    engine.ready = {5}
    refused, answered = loop.submit_all([request(4), request(5)])
    assert isinstance(refused.exception(WAIT_S), ValueError)
    assert answered.result(WAIT_S)


def test_a_failing_step_fails_what_runs_and_nothing_later(engine: Engine, loop: RequestLoop) -> None:
    futures = [loop.submit(request(1)), loop.submit(request(2))]
    loop.call(lambda: engine.ready.add(13))
    for future in futures:
        assert isinstance(future.exception(WAIT_S), BackendError)
    assert sorted(engine.dropped) == [1, 2]
    engine.ready = {6}
    assert loop.submit(request(6)).result(WAIT_S)


def test_a_cancelled_request_leaves_before_the_next_step_and_wakes_who_waits(engine: Engine, loop: RequestLoop) -> None:
    future = loop.submit(request(1))
    waiting: list[Future[object]] = []
    thread = threading.Thread(target=lambda: waiting.extend(wait([future], WAIT_S).done))  # type: ignore[arg-type]
    thread.start()
    assert future.cancel()
    thread.join(WAIT_S)
    assert waiting == [future]
    with pytest.raises(CancelledError):
        future.result()
    loop.call(lambda: None)
    assert engine.dropped == [1]
    assert not future.cancel() or future.cancelled()  # again: nothing happens
    loop.call(lambda: None)
    assert engine.dropped == [1]


def test_what_must_find_the_engine_idle_is_refused_by_name(engine: Engine, loop: RequestLoop, raises: Raises) -> None:
    future = loop.submit(request(1))
    with raises(BackendError, "sleep", 1):
        loop.call_idle("sleep", lambda: None)
    engine.ready = {1}
    future.result(WAIT_S)
    assert loop.call_idle("sleep", lambda: 5) == 5


def test_an_error_of_a_call_is_the_callers(loop: RequestLoop) -> None:
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda: 1 / 0)
    assert loop.call(lambda: 1) == 1


def test_closing_fails_what_runs_and_refuses_what_comes(engine: Engine, loop: RequestLoop, raises: Raises) -> None:
    future = loop.submit(request(1))
    loop.shutdown()
    loop.shutdown()
    assert engine.is_closed
    assert "shut down while it generated" in str(future.exception(WAIT_S))
    with raises(BackendError):
        loop.submit(request(1))


def test_whoever_comes_while_the_engine_closes_is_refused(engine: Engine, loop: RequestLoop) -> None:
    closes, goes_on = threading.Event(), threading.Event()

    def close() -> None:
        closes.set()
        assert goes_on.wait(WAIT_S)

    engine.close = close  # type: ignore[method-assign]
    closing = threading.Thread(target=loop.shutdown)
    closing.start()
    assert closes.wait(WAIT_S)
    late: Future[None] = Future()
    threading.Thread(target=lambda: _settle(late, lambda: loop.call(lambda: None)), daemon=True).start()
    assert "has been shut down" in str(late.exception(WAIT_S))
    goes_on.set()
    closing.join()


def _settle(future: Future[None], function: Callable[[], None]) -> None:
    try:
        future.set_result(function())
    except BackendError as error:
        future.set_exception(error)


def test_an_engine_that_cannot_be_built_says_why(raises: Raises) -> None:
    def build() -> Engine:
        raise BackendError("no such model", fix="name another one")

    with raises(BackendError, "model"):
        RequestLoop(build, require, "test")
