"""Engines come, go and die while they are called: nothing is lost, and each has the weights that the others have."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine_yard import WAIT_S, Sampler, Yard, handle
from nemorl.contracts import GenerationBackend
from nemorl.errors import BackendError, DeadlineError, ResourceError, UsageError, WorkerLostError
from nemorl.types import GenerationRequest, SamplingParams
from nemorl_rl.placement import fleet as fleets
from nemorl_rl.placement.fleet import EngineFleet
from nemorl_rl.placement.fleet_keeper import FleetKeeper
from nemorl_rl.placement.fleet_orders import Orders, ask, state_of
from nemorl_rl.serving.generation_policy import GenerationPolicy, RequestLimits
from nemorl_rl.serving.requests import NamedRequests
from recorded_messages import Raises


def request(number: int) -> GenerationRequest:
    return GenerationRequest((number,), SamplingParams(), (0,))


def answered(policy: GenerationPolicy, *numbers: int) -> Any:
    """What the engines of the yard say to these requests: each a prompt and the version of the weights."""
    return policy.generate([request(number) for number in numbers])


def until(holds: Callable[[], Any]) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def tended(fleet: EngineFleet, holds: Callable[[], Any]) -> None:
    """Tend it until that holds."""

    def step() -> Any:
        fleet.tend()
        return holds()

    until(step)


def states(fleet: EngineFleet) -> list[str]:
    return [engine["state"] for engine in fleet.as_json()]


def test_the_shard_of_an_engine_that_dies_is_done_by_another_and_all_results_are_in_order() -> None:
    yard = Yard(3)
    fleet = yard.fleet(3)
    policy = GenerationPolicy(fleet, fleet.await_engine)
    doomed = yard.processes[1].sampler
    doomed.may_answer.clear()
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(answered, policy, *range(7))
        assert doomed.has_work.wait(WAIT_S)
        yard.processes[1].kill()
        # Shards are requests 0 3 6, 1 4 and 2 5; the second is made again.
        assert answers.result(WAIT_S) == [[((number,), 1)] for number in range(7)]
    assert states(fleet) == ["ready", "lost", "ready"]
    assert any("engine-1 is lost" in said and "engine-0, engine-2" in said for said in yard.said)
    assert yard.processes[0].sampler.answered + yard.processes[2].sampler.answered == 7
    # Nobody waits for a replacement: the next batch has two shards.
    assert answered(policy, 9) == [[((9,), 1)]]
    tended(fleet, lambda: states(fleet) == ["ready"] * 3)
    assert fleet.as_json()[1]["lost"] == 1
    fleet.shutdown()
    assert yard.free == 3


def test_when_all_have_died_the_call_waits_for_the_first_that_is_back() -> None:
    yard = Yard(2)
    fleet = yard.fleet(2)
    policy = GenerationPolicy(fleet, fleet.await_engine)
    for process in yard.processes:
        process.kill()
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(answered, policy, 0, 1)
        tended(fleet, answers.done)
        assert answers.result() == [[((0,), 1)], [((1,), 1)]]
    assert policy.lives >= 1  # a receipt of the weights is due
    assert any("started again or added" in said for said in yard.said)
    fleet.shutdown()


def test_a_batch_that_finds_no_engine_waits_for_one_and_is_not_answered_with_nothing() -> None:
    yard = Yard(1)
    fleet = yard.fleet(1)
    policy = GenerationPolicy(fleet, fleet.await_engine)
    yard.processes[0].kill()
    with pytest.raises(WorkerLostError):
        fleet.call(GenerationBackend.update_weights, handle(1), 1)
    assert (states(fleet), fleet.data_parallel_size) == (["lost"], 0)
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(answered, policy, 0, 1)
        tended(fleet, answers.done)
        assert answers.result() == [[((0,), 1)], [((1,), 1)]]
    fleet.shutdown()


def test_an_engine_that_dies_again_and_again_is_given_up_and_the_last_one_ends_the_run(raises: Raises) -> None:
    yard = Yard(1)
    fleet = yard.fleet(1, max_restarts=2)
    policy = GenerationPolicy(fleet, fleet.await_engine)
    keeping = threading.Event()

    def keep() -> None:
        while not keeping.wait(0.01):
            fleet.tend()

    keeper = threading.Thread(target=keep)
    keeper.start()
    for number in range(2):
        yard.processes[0].kill()
        assert answered(policy, number) == [[((number,), 1)]]
    yard.processes[0].kill()
    with raises(WorkerLostError, "engine-0", 0):
        answered(policy, 2)
    keeping.set()
    keeper.join()
    assert states(fleet) == ["given_up"]
    fleet.shutdown()


def test_an_engine_whose_node_is_gone_comes_back_with_its_devices_and_uses_up_no_start() -> None:
    yard = Yard(2)
    fleet = yard.fleet(2, max_restarts=1)
    yard.bays[1].is_there = False
    yard.processes[1].kill()
    assert fleet.call(GenerationBackend.update_weights, handle(1), 1) == [8]
    for _ in range(5):
        fleet._engines[1].retry_at = 0.0
        fleet.tend()
    assert states(fleet) == ["ready", "lost"]
    assert fleet.as_json()[1]["trouble"].count("devices") == 1
    yard.bays[1].is_there = True
    fleet._engines[1].retry_at = 0.0
    tended(fleet, lambda: states(fleet) == ["ready"] * 2)
    fleet.shutdown()


def test_an_engine_that_joins_after_an_update_that_came_while_it_started_has_its_weights() -> None:
    yard = Yard(2)
    fleet = yard.fleet(1)
    begun, may_build = threading.Event(), threading.Event()

    def before_build() -> None:
        begun.set()
        assert may_build.wait(WAIT_S)

    yard.before_build = before_build
    assert fleet.add(1, 0.0) == ["engine-1"]
    assert begun.wait(WAIT_S)
    assert states(fleet) == ["ready", "starting"]
    yard.newest = handle(2)
    assert fleet.call(GenerationBackend.update_weights, yard.newest, 2) == [8]  # the trainer does not wait for it
    may_build.set()
    until(lambda: fleet.data_parallel_size == 2)
    assert [process.sampler.version for process in yard.processes] == [2, 2]
    assert fleet.joined == 1
    fleet.shutdown()


def test_an_engine_whose_weights_were_taken_away_while_it_started_is_built_again_with_the_newest() -> None:
    yard = Yard(2)
    fleet = yard.fleet(1)
    tries: list[int] = []

    def vanish(sampler: Sampler) -> Sampler:
        tries.append(sampler.version)
        if len(tries) == 1:
            yard.newest = handle(3)
            raise BackendError("version 1 is no longer published", fix="ask for the newest")
        return sampler

    yard.wraps = vanish
    fleet.add(1, 0.0)
    until(lambda: fleet.data_parallel_size == 2)
    assert tries == [1, 3]
    assert yard.processes[-1].sampler.version == 3
    fleet.shutdown()


def test_no_engine_joins_while_all_are_called() -> None:
    yard = Yard(2)
    fleet = yard.fleet(1)
    entered, may_end = threading.Event(), threading.Event()

    class Slow(Sampler):
        def update_weights(self, weights: Any, version: int) -> int:
            entered.set()
            assert may_end.wait(WAIT_S)
            return super().update_weights(weights, version)

    yard.processes[0].sampler = Slow(handle(1))
    with ThreadPoolExecutor(1) as pool:
        update = pool.submit(fleet.call, GenerationBackend.update_weights, handle(2), 2)
        assert entered.wait(WAIT_S)
        fleet.add(1, 0.0)
        until(lambda: len(yard.processes) == 2)
        time.sleep(0.05)  # it is built, and would be let in now
        assert states(fleet) == ["ready", "starting"]
        yard.newest = handle(2)
        may_end.set()
        assert update.result(WAIT_S) == [8]
    until(lambda: fleet.data_parallel_size == 2)
    assert [process.sampler.version for process in yard.processes] == [2, 2]
    fleet.shutdown()


def test_an_engine_that_is_dropped_finishes_what_it_has_and_gives_its_devices_back(raises: Raises) -> None:
    yard = Yard(2)
    fleet = yard.fleet(2)
    policy = GenerationPolicy(fleet, fleet.await_engine)
    yard.processes[1].sampler.may_answer.clear()
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(answered, policy, 0, 1)
        assert yard.processes[1].sampler.has_work.wait(WAIT_S)
        fleet.drop("engine-1")
        fleet.tend()
        assert (states(fleet), yard.free) == (["ready", "leaving"], 0)
        assert answered(policy, 2, 3) == [[((2,), 1)], [((3,), 1)]]
        assert yard.processes[1].sampler.answered == 0  # it gets no more
        yard.processes[1].sampler.may_answer.set()
        assert answers.result(WAIT_S) == [[((0,), 1)], [((1,), 1)]]
    fleet.tend()
    assert (states(fleet), yard.free) == (["ready"], 1)
    assert yard.processes[1].is_shut
    with raises(UsageError, "engine-0"):
        fleet.drop("engine-0")
    with raises(UsageError, "engine-1", "engine-0"):
        fleet.drop("engine-1")
    fleet.shutdown()


def test_too_many_are_refused_and_none_of_them_keeps_devices(raises: Raises) -> None:
    yard = Yard(3)
    fleet = yard.fleet(1)
    with raises(ResourceError, 2, 3):
        fleet.add(3, 0.0)
    assert (states(fleet), yard.free) == (["ready"], 2)
    assert fleet.add(2, 0.0) == ["engine-1", "engine-2"]
    fleet.shutdown()


def test_single_requests_of_a_dead_engine_go_to_the_others_and_to_whoever_joins() -> None:
    yard = Yard(3)
    yard.wraps = NamedRequests  # type: ignore[assignment]
    fleet = yard.fleet(2)
    limits = RequestLimits(per_replica=1, deadline_s=WAIT_S)
    policy = GenerationPolicy(fleet, fleet.await_engine, single_requests=limits, ranks=lambda: fleet.ranks)
    first, second = (policy.submit(request(number), owner="test") for number in range(2))
    samplers: list[Any] = [process.sampler._engine for process in yard.processes]
    until(lambda: all(sampler.waiting for sampler in samplers))
    yard.processes[0].sampler = samplers[0]
    yard.processes[0].kill()
    assert not first.done()
    fleet.add(1, 0.0)
    until(lambda: fleet.data_parallel_size == 2)  # engines 1 and 2
    samplers[1].waiting[0].set_result(["second"])
    assert second.result(WAIT_S) == ["second"]  # type: ignore[comparison-overlap]
    late = yard.processes[2].sampler._engine
    until(lambda: len(samplers[1].waiting) + len(late.waiting) == 2)
    for sampler in (samplers[1], late):
        for future in sampler.waiting:
            if not future.done():
                future.set_result(["first"])
    assert first.result(WAIT_S) == ["first"]  # type: ignore[comparison-overlap]
    policy.shutdown()


def test_orders_are_carried_out_answered_and_forgotten(tmp_path: Path, raises: Raises) -> None:
    yard = Yard(2)
    fleet = yard.fleet(1)
    folder = tmp_path / "scratch" / "fleet"
    folder.mkdir(parents=True)
    (folder / "old.order").write_text('{"add": 1}')  # of somebody who asked a run that was killed
    keeper = FleetKeeper(fleet, folder, lambda: {"backend": "engine", "weights": 1})
    assert ask(tmp_path, {"add": 1}, WAIT_S) == ["engine-1"]
    with raises(UsageError, 0, 1):
        ask(tmp_path, {"add": 1}, WAIT_S)
    with raises(UsageError):
        ask(tmp_path, {"add": True}, WAIT_S)
    until(lambda: fleet.data_parallel_size == 2)
    assert ask(tmp_path, {"drop": "engine-0"}, WAIT_S) == ["engine-0"]
    until(lambda: [engine["name"] for engine in (state_of(tmp_path) or {})["engines"]] == ["engine-1"])
    fleet.shutdown()
    keeper.close()
    assert (state_of(tmp_path) or {})["is_over"] is True
    assert [path.name for path in folder.iterdir()] == ["state.json"]
    with raises(DeadlineError, str(tmp_path), "0.3"):
        ask(tmp_path, {"add": 1}, 0.3)
    assert [path.name for path in folder.iterdir()] == ["state.json"]


def test_a_damaged_order_is_answered_and_the_others_are_carried_out(tmp_path: Path) -> None:
    orders = Orders(tmp_path / "fleet")
    (tmp_path / "fleet" / "a.order").write_text("{")
    (tmp_path / "fleet" / "b.order").write_text('{"drop": "engine-3"}')
    dropped: list[str] = []
    orders.serve(lambda size: [], dropped.append)
    assert dropped == ["engine-3"]
    assert "damaged" in (tmp_path / "fleet" / "a.answer").read_text()


def test_a_start_that_fails_is_tried_again_later_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "FIRST_RETRY_S", 1e-3)
    yard = Yard(2)
    fleet = yard.fleet(1, max_restarts=2)

    def fail() -> None:
        raise BackendError("no memory", fix="lower it")

    yard.before_build = fail
    fleet.add(1, 0.0)
    tended(fleet, lambda: states(fleet) == ["ready", "given_up"])
    assert fleet.as_json()[1]["trouble"] == "no memory"
    assert sum("no memory" in text for text in yard.said) == 3  # the first start and two more
    fleet.shutdown()


def test_an_engine_leaves_a_node_that_is_about_to_go_once_another_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "LOOK_S", 0.0)
    yard = Yard(3)
    fleet = yard.fleet(2)
    policy = GenerationPolicy(fleet, fleet.await_engine)
    busy = yard.processes[1].sampler
    busy.may_answer.clear()
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(answered, policy, 0, 1)
        assert busy.has_work.wait(WAIT_S)
        yard.leaving = ["node-1"]
        # It finishes what it has, and gives its devices back after that.
        tended(fleet, lambda: states(fleet) == ["ready", "leaving", "ready"])
        assert yard.free == 0
        busy.may_answer.set()
        assert answers.result(WAIT_S) == [[((0,), 1)], [((1,), 1)]]
    tended(fleet, lambda: fleet.ranks == [0, 2] and yard.free == 1)
    assert busy.answered == 1
    assert [engine["lost"] for engine in fleet.as_json()] == [0, 0]
    fleet.shutdown()


def test_without_room_elsewhere_an_engine_stays_on_a_node_that_is_about_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "LOOK_S", 0.0)
    yard = Yard(1)
    fleet = yard.fleet(1)
    yard.leaving = ["node-0"]
    for _ in range(3):
        fleet.tend()
    assert states(fleet) == ["ready"]
    yard.free = 1  # a node has joined
    tended(fleet, lambda: fleet.ranks == [1])
    fleet.shutdown()
