"""Single requests from the driver: where they go, who waits for whom, and what becomes of them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
from nemorl.errors import BackendError, DeadlineError, WorkerLostError
from nemorl.types import Completion, GenerationRequest, SamplingParams
from nemorl_rl.placement.tenants import ROLLOUT, SYNC, Phase, Tenancy
from nemorl_rl.serving.generation_policy import GenerationPolicy, RequestLimits
from nemorl_rl.serving.requests import NamedRequests
from nemorl_rl.serving.routing import SLACK, Affinity, Router, beginnings_of
from recorded_messages import Raises


class Unwatched:
    """Nothing was planned."""

    def entered(self, phase: Phase, holdings: Any) -> None: ...

    def explained(self, phase: Phase, error: Any, holdings: Any) -> Any:
        return error


LIMITS = RequestLimits(per_replica=2, deadline_s=60.0)
WAIT_S = 60.0


class Engine:
    """Answers a request when it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[GenerationRequest, Future[list[Completion]]]] = []
        self.changed = threading.Condition()

    def submit(self, request: GenerationRequest) -> Future[list[Completion]]:
        with self.changed:
            self.asked.append((request, Future()))
            self.changed.notify_all()
            return self.asked[-1][1]

    def shutdown(self) -> None: ...

    def wait_for(self, count: int) -> None:
        """Until this many requests have come."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.asked) >= count, WAIT_S)

    def answer(self, place: int) -> None:
        request, future = self.asked[place]
        with suppress(InvalidStateError):  # it has been cancelled
            future.set_result([Completion((*request.token_ids, seed), (-1.0,), "stop") for seed in request.seeds])


class Replicas:
    """A worker group of engines, which may be lost."""

    def __init__(self, count: int) -> None:
        self.engines = [Engine() for _ in range(count)]
        self.named = [NamedRequests(engine) for engine in self.engines]  # type: ignore[arg-type]

    @property
    def data_parallel_size(self) -> int:
        return len(self.engines)

    def submit(self, rank: int, verb: Callable[..., Future[Any]], *args: Any) -> Future[Any]:
        return verb(self.named[rank], *args)

    def lose(self, rank: int) -> WorkerLostError:
        error = WorkerLostError(f"generation backend rank {rank} died", fix="")
        lost, self.engines[rank] = self.engines[rank], Engine()
        self.named[rank] = NamedRequests(self.engines[rank])  # type: ignore[arg-type]
        for _, future in lost.asked:
            if not future.done():
                future.set_exception(error)
        return error

    def shutdown(self) -> None: ...


def request(*token_ids: int, seeds: Sequence[int] = (7,)) -> GenerationRequest:
    return GenerationRequest(token_ids, SamplingParams(), tuple(seeds))


@contextmanager
def policy_over(
    replicas: Replicas, limits: RequestLimits | None = LIMITS, **options: Any
) -> Iterator[Callable[..., Future[list[Completion]]]]:
    policy = GenerationPolicy(replicas, single_requests=limits, **options)  # type: ignore[arg-type]

    def submit(*token_ids: int, owner: str = "episode 3", **more: Any) -> Future[list[Completion]]:
        return policy.submit(request(*token_ids), owner=owner, **more)

    try:
        yield submit
    finally:
        policy.shutdown()


def test_a_request_stays_with_the_replica_of_its_conversation_until_that_is_much_busier() -> None:
    router = Router(lambda: range(2), limit=100)
    assert [router.choose(["a"]), router.choose(["b"])] == [0, 1]
    # Replica 0 has one request, as replica 1 has: it is preferred until it has SLACK more.
    assert [router.choose(["a"]) for _ in range(SLACK)] == [0] * SLACK
    assert router.choose(["a"]) == 1  # 17 against 1
    assert router.choose(["a"]) == 1  # it is known there now


def test_prompts_that_begin_alike_go_to_one_replica() -> None:
    replicas = Replicas(3)
    prefix = tuple(range(64))
    with policy_over(replicas, RequestLimits(8, 60.0)) as submit:
        for tail in range(3):
            submit(*prefix, tail)
        submit(1, 2, 3)
        replicas.engines[0].wait_for(3)
        replicas.engines[1].wait_for(1)
        assert not replicas.engines[2].asked


def test_more_requests_than_places_wait_in_order_and_all_are_answered() -> None:
    replicas = Replicas(1)
    with policy_over(replicas) as submit:
        futures = [submit(number) for number in range(5)]
        for number in range(5):
            replicas.engines[0].wait_for(min(number + 2, 5))
            assert len(replicas.engines[0].asked) <= number + 2  # two at a time
            replicas.engines[0].answer(number)
            assert futures[number].result(WAIT_S)[0].token_ids == (number, 7)


def test_a_late_request_names_its_owner_and_frees_its_place(raises: Raises) -> None:
    replicas = Replicas(1)
    with policy_over(replicas, RequestLimits(1, 60.0)) as submit:
        late = submit(1, deadline_s=0.05)
        with raises(DeadlineError, 3, 0.05):
            late.result(WAIT_S)
        patient = submit(3)
        replicas.engines[0].wait_for(2)
        assert replicas.engines[0].asked[0][1].cancelled()
        replicas.engines[0].answer(1)
        assert patient.result(WAIT_S)[0].token_ids == (3, 7)


def test_a_request_that_waits_for_a_place_may_be_late_too(raises: Raises) -> None:
    replicas = Replicas(1)
    with policy_over(replicas, RequestLimits(1, 60.0)) as submit:
        first = submit(1)
        waiting = submit(2, deadline_s=0.05, owner="episode 4")
        with raises(DeadlineError, 4, 0.05):
            waiting.result(WAIT_S)
        replicas.engines[0].answer(0)
        assert first.result(WAIT_S)[0].token_ids == (1, 7)
        assert len(replicas.engines[0].asked) == 1


def test_cancelling_reaches_the_engine_and_lets_the_next_one_in() -> None:
    replicas = Replicas(1)
    with policy_over(replicas, RequestLimits(1, 60.0)) as submit:
        first, second, third = submit(1), submit(2), submit(3)
        replicas.engines[0].wait_for(1)
        assert second.cancel()
        assert first.cancel()
        replicas.engines[0].wait_for(2)
        assert replicas.engines[0].asked[0][1].cancelled()
        assert replicas.engines[0].asked[1][0].token_ids == (3,)
        replicas.engines[0].answer(1)
        assert third.result(WAIT_S)
        with pytest.raises(CancelledError):
            first.result()


def test_an_error_of_one_request_is_its_own(raises: Raises) -> None:
    replicas = Replicas(1)
    with policy_over(replicas) as submit:
        bad, good = submit(1), submit(2)
        replicas.engines[0].wait_for(2)
        replicas.engines[0].asked[0][1].set_exception(BackendError("too long", fix="shorten it"))
        replicas.engines[0].answer(1)
        assert good.result(WAIT_S)
        with raises(BackendError):
            bad.result(WAIT_S)


def test_requests_of_a_lost_replica_are_made_again_once_it_is_replaced() -> None:
    replicas, revived = Replicas(2), []
    with policy_over(replicas, revive=revived.append) as submit:
        futures = [submit(number) for number in range(4)]
        for engine in replicas.engines:
            engine.wait_for(2)
        error = replicas.lose(0)
        replicas.engines[0].wait_for(2)
        assert revived == [error]
        for engine in replicas.engines:
            for place in range(2):
                engine.answer(place)
        assert [future.result(WAIT_S)[0].token_ids for future in futures] == [(n, 7) for n in range(4)]


def test_a_replica_that_cannot_be_replaced_fails_its_requests_with_its_error() -> None:
    replicas = Replicas(1)
    with policy_over(replicas) as submit:
        future = submit(1)
        replicas.engines[0].wait_for(1)
        error = replicas.lose(0)
        with pytest.raises(WorkerLostError) as caught:
            future.result(WAIT_S)
        assert caught.value is error


def test_the_devices_are_the_engines_while_requests_run_and_free_afterwards() -> None:
    tenancy = Tenancy({ROLLOUT: {}, SYNC: {}}, Unwatched(), limit_s=WAIT_S)
    replicas = Replicas(1)
    with policy_over(replicas, turn=tenancy.during) as submit:
        with tenancy.during(SYNC):
            future = submit(1)  # at once; it is sent when the devices are free
            assert not replicas.engines[0].asked
        replicas.engines[0].wait_for(1)
        replicas.engines[0].answer(0)
        future.result(WAIT_S)
        with tenancy.during(SYNC):  # waits for the desk to let go
            pass


def test_shutting_down_fails_what_is_on_its_way(raises: Raises) -> None:
    replicas = Replicas(1)
    with policy_over(replicas, RequestLimits(1, 60.0)) as submit:
        futures = [submit(1), submit(2)]
        replicas.engines[0].wait_for(1)
    for future in futures:
        with raises(BackendError):
            future.result(WAIT_S)
    with raises(BackendError):
        submit(3)


def test_an_engine_that_takes_no_single_requests_is_refused_by_name(raises: Raises) -> None:
    with (
        policy_over(Replicas(1), None) as submit,
        raises(BackendError, "submit"),
    ):
        submit(1)


def test_a_request_that_names_weights_of_an_engine_that_has_the_newest_alone_is_refused(raises: Raises) -> None:
    policy = GenerationPolicy(Replicas(1), single_requests=RequestLimits(1, 60.0))  # type: ignore[arg-type]
    for ask in (lambda named: policy.generate([named]), lambda named: policy.submit(named, owner="me")):
        with raises(BackendError, "snapshots", 4):
            ask(replace(request(1), version=4))


def test_a_cancel_that_overtakes_its_request_cancels_it() -> None:
    engine = Engine()
    named = NamedRequests(engine)  # type: ignore[arg-type]
    named.cancel(5)
    assert named.begin(5, request(1)).cancelled()
    assert engine.asked == []
    named.begin(6, request(1)).cancel()
    assert named._running == {}
    named.cancel(7)
    assert list(named._cancelled) == [7]  # forgotten when 1024 others have come


def test_nothing_is_lost_and_nothing_leaks_under_random_cancels_from_many_threads() -> None:
    replicas = Replicas(3)
    policy = GenerationPolicy(replicas, single_requests=RequestLimits(8, WAIT_S))  # type: ignore[arg-type]
    stop = threading.Event()

    def answer(engine: Engine) -> None:
        done = 0
        while not stop.wait(0.001):
            while done < len(engine.asked):
                engine.answer(done)
                done += 1

    answering = [threading.Thread(target=answer, args=(engine,)) for engine in replicas.engines]
    for thread in answering:
        thread.start()
    futures: dict[int, Future[list[Completion]]] = {}

    def submit(worker: int) -> None:
        rng = random.Random(worker)
        for number in range(worker * 25, worker * 25 + 25):
            futures[number] = policy.submit(request(number, seeds=(1, 2)), owner=f"thread {worker}")
            if rng.random() < 0.3:
                futures[rng.choice([*futures])].cancel()

    threads = [threading.Thread(target=submit, args=(worker,)) for worker in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wait(futures.values(), WAIT_S).not_done
    for number, future in futures.items():
        assert future.cancelled() or [c.token_ids for c in future.result(0)] == [(number, 1), (number, 2)]
    policy.shutdown()
    stop.set()
    for thread in answering:
        thread.join()
    desk = policy._desk
    assert desk is not None
    assert not desk._calls
    assert not desk._waiting
    assert all(not named._running for named in replicas.named)


def test_affinity_prefers_the_longest_beginning_and_forgets_who_has_left() -> None:
    affinity = Affinity[str]()
    prompt = tuple(range(200))  # blocks of 64: 4 beginnings, of 64, 128, 192 and 200 tokens
    affinity.remember(beginnings_of(prompt[:128]), "old")
    affinity.remember(beginnings_of(prompt[:64]), "new")  # 64 tokens in common, where old has 128
    loads = {"least": 0, "new": 1, "old": 2}
    assert affinity.choose(beginnings_of(prompt), loads) == "old"
    assert affinity.choose(beginnings_of(prompt[:100]), loads) == "new"
    assert affinity.choose(beginnings_of(prompt), {"least": 0, "new": 1}) == "new"
    affinity.forget("new")
    assert affinity.choose(beginnings_of(prompt[:100]), loads) == "least"
