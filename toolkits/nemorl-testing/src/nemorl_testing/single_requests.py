"""Checks of generation backends that take requests one by one while others run (capability ``submit``)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

from nemorl.contracts import RequestBackend
from nemorl.contracts.memory import SleepingBackend
from nemorl.errors import NemorlError
from nemorl.types import Completion, GenerationRequest, SamplingParams

from nemorl_testing.backends import (
    MAX_SEQUENCE_TOKENS,
    build_generator,
    in_process_weights,
    model_folder,
    other_model,
    require_in_process,
    shared_generator,
)
from nemorl_testing.kit import NotApplicable, Subject, expect
from nemorl_testing.models import load_reference, response_logprobs

PROMPTS = ((9, 18, 10), (11, 12, 13, 14, 15, 16, 17, 40), (30,), (61, 60, 20, 21, 61))
SAMPLED = SamplingParams(max_new_tokens=12)
LONG = GenerationRequest(
    PROMPTS[0], SamplingParams(max_new_tokens=MAX_SEQUENCE_TOKENS - 8, ignore_eos=True), tuple(range(32))
)
"""Takes more than a hundred steps."""
ONE_LONG = replace(LONG, seeds=(0,))
"""The same for one row: an engine of two rows has room beside it."""
ATTEMPTS = 20
"""Of what only shows while a request runs: a busy machine may answer it before this process gets its turn."""
LIMIT_S = 120.0
"""Longest wait for an answer. What takes longer hangs."""


def check_submitted_requests_are_answered_as_in_a_batch(subject: Subject) -> None:
    """Each future is given one completion per seed, those of generate, whichever thread submitted. (DESIGN 5)"""
    engine = _engine(subject)
    requests = [GenerationRequest(ids, SAMPLED, (3, 4)) for ids in PROMPTS]
    wanted = [_tokens(engine.generate([request])) for request in requests]
    found: dict[int, Future[list[Completion]]] = {}

    def submit(index: int) -> None:
        found[index] = engine.submit(requests[index])

    threads = [threading.Thread(target=submit, args=(index,)) for index in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    given = [_tokens([found[index].result(LIMIT_S)]) for index in range(len(requests))]
    expect(given == wanted, f"submitted {given}, generated {wanted}")


def check_a_request_joins_those_that_run(subject: Subject) -> None:
    """A short request that comes after a long one is answered before it. (DESIGN 5)"""
    engine = _engine(subject)
    short = GenerationRequest(PROMPTS[1], replace(SAMPLED, max_new_tokens=2))

    def attempt() -> bool:
        order: list[str] = []
        first = engine.submit(ONE_LONG)
        first.add_done_callback(lambda _: order.append("long"))
        second = engine.submit(short)
        second.add_done_callback(lambda _: order.append("short"))
        wait([first, second], LIMIT_S)
        return order[0] == "short"

    _eventually(attempt, "a request of 2 tokens was never answered before one of more than 100 that came first")


def check_requests_do_not_change_each_other(subject: Subject) -> None:
    """A response is the same alone, and joining others in whatever order. (DESIGN 7.1)"""
    engine = _engine(subject)
    requests = [GenerationRequest(ids, SAMPLED, (3, 4)) for ids in PROMPTS]
    alone = [_alone(engine, request) for request in requests]
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        background = engine.submit(LONG)
        futures = {index: engine.submit(requests[index]) for index in order}
        together = [_tokens([futures[index].result(LIMIT_S)]) for index in range(len(requests))]
        background.cancel()
        expect(together == alone, f"alone {alone}, submitted in the order {order} {together}")


def check_a_cancelled_request_frees_what_it_holds(subject: Subject) -> None:
    """A cancelled future is cancelled, unless it was done; nothing of its request runs on. (DESIGN 5)"""
    engine = _engine(subject)
    future = engine.submit(LONG)
    is_cancelled = future.cancel()
    expect(future.done() and future.cancelled() == is_cancelled, f"after cancel() the future is {future}")
    expect(not wait([future], LIMIT_S).not_done, "concurrent.futures.wait takes no notice of a cancelled future")
    if isinstance(engine, SleepingBackend) and "sleep" in subject.config.supports:
        try:
            engine.sleep(1)  # refused while requests run
        except NemorlError as error:
            expect(False, f"after its only request was cancelled, the engine says: {error.message}")
        engine.wake(["weights", "cache"])
    short = GenerationRequest(PROMPTS[1], SAMPLED, (5,))
    wanted = _alone(engine, short)
    others = [engine.submit(LONG), engine.submit(short)]
    others[0].cancel()
    expect(_tokens([others[1].result(LIMIT_S)]) == wanted, "cancelling one request changed another")


def check_a_bad_request_fails_alone(subject: Subject) -> None:
    """What is wrong with one request is a nemorl error of its own future; those that run go on. (DESIGN 5)"""
    engine = _engine(subject)
    good = GenerationRequest(PROMPTS[1], SAMPLED, (5,))
    wanted = _alone(engine, good)
    bad = [GenerationRequest(ids, SAMPLED) for ids in ((), tuple([PROMPTS[0][0]] * MAX_SEQUENCE_TOKENS))]
    futures = [engine.submit(request) for request in (good, *bad, good)]
    for future in futures[1:3]:
        error = future.exception(LIMIT_S)
        expect(isinstance(error, NemorlError), f"a request that cannot be answered was given {error!r}")
    for future in (futures[0], futures[3]):
        expect(_tokens([future.result(LIMIT_S)]) == wanted, "a bad request changed another")


def check_running_requests_go_on_with_new_weights(subject: Subject) -> None:
    """update_weights waits for no request: tokens after it are the new weights', and say so. (DESIGN 7.8)"""
    require_in_process(subject)
    models = [load_reference(model_folder(subject)), other_model(subject)]
    engine = _engine(subject, in_process_weights(models[0], 0))
    version = 0

    def attempt() -> bool:
        nonlocal version
        begun = engine.submit(ONE_LONG)
        engine.submit(GenerationRequest(PROMPTS[2], replace(SAMPLED, max_new_tokens=2))).result(LIMIT_S)
        version += 1
        engine.update_weights(in_process_weights(models[version % 2], version), version)
        completions = begun.result(LIMIT_S)
        for completion in completions[:4]:
            _expect_spans(models, completion, subject.settings.tolerance)
        return any(completion.weight_versions == (version - 1, version) for completion in completions)

    _eventually(attempt, "no completion of a request that was running has tokens of both weights")


def check_sleep_is_refused_while_requests_run(subject: Subject) -> None:
    """An engine that has requests does not sleep: a nemorl error says so, and they are answered. (DESIGN 5)"""
    if "sleep" not in subject.config.supports:
        raise NotApplicable("the backend does not declare supports={'sleep'}")
    engine: Any = _engine(subject)
    wanted = _alone(engine, LONG)

    def attempt() -> bool:
        future = engine.submit(LONG)
        try:
            engine.sleep(1)
        except NemorlError:
            expect(_tokens([future.result(LIMIT_S)]) == wanted, "refusing to sleep changed a request")
            return True
        expect(future.done(), "the engine sleeps, and its request will never be answered")
        engine.wake(["weights", "cache"])
        return False

    _eventually(attempt, "the engine never refused to sleep while a request ran")


def _engine(subject: Subject, weights: Any = None) -> RequestBackend:
    if "submit" not in subject.config.supports:
        raise NotApplicable("the backend does not declare supports={'submit'}")
    engine = shared_generator(subject) if weights is None else build_generator(subject, weights)
    expect(isinstance(engine, RequestBackend), f"{type(engine).__name__} has no submit")
    assert isinstance(engine, RequestBackend)
    return engine


def _alone(engine: RequestBackend, request: GenerationRequest) -> list[list[tuple[int, ...]]]:
    return _tokens([engine.submit(request).result(LIMIT_S)])


def _eventually(attempt: Callable[[], bool], seen: str) -> None:
    expect(any(attempt() for _ in range(ATTEMPTS)), f"{seen}, in {ATTEMPTS} attempts")


def _tokens(found: Sequence[Sequence[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in completions] for completions in found]


def _expect_spans(models: Sequence[Any], completion: Completion, tolerance: float) -> None:
    """The log-probs of each span of a completion to ``LONG`` are those of its weights."""
    ids, starts = completion.token_ids, completion.version_starts
    expect(len(starts) == len(completion.weight_versions), f"{completion.weight_versions} start at {starts}")
    expect(starts[0] == 0 and list(starts) == sorted(set(starts)) and starts[-1] < len(ids), f"they start at {starts}")
    for version, start, end in zip(completion.weight_versions, starts, (*starts[1:], len(ids)), strict=True):
        wanted = response_logprobs(models[version % 2], LONG.token_ids, ids, 1.0)[start:end]
        gap = max(abs(one - other) for one, other in zip(completion.logprobs[start:end], wanted, strict=True))
        expect(gap <= tolerance, f"tokens {start} to {end} are not of weights {version}: log-probs {gap:.3g} apart")
