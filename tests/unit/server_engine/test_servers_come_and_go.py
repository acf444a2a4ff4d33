"""Servers die, are replaced, join and leave: every response comes, of the weights and the seed asked for."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import weights_of
from nemorl.config import PolicyConfig
from nemorl.errors import BackendError, DeadlineError
from nemorl.types import GenerationRequest, SamplingParams
from nemorl_agents.servers import ways
from nemorl_agents.servers.roster import Roster
from nemorl_agents.servers.versions import WeightVersions, place_of

pytestmark = pytest.mark.slow

SAMPLING = SamplingParams(max_new_tokens=6)
REQUESTS = [GenerationRequest((9, 10 + number), SAMPLING, tuple(range(4))) for number in range(12)]


def test_requests_of_a_dead_server_are_made_again_elsewhere_with_the_same_seeds(serve: Any, build: Any) -> None:
    wanted = build(serve()).generate(REQUESTS)  # by one server that lives
    first, second = serve(), serve()
    engine = build(first, second)

    def die(count: int) -> None:
        if count == 5:
            first.kill()

    first.before_sample = die
    assert engine.generate(REQUESTS) == wanted
    assert len(first.prompts) + len(second.prompts) > 48  # what it had not answered was asked again


def test_a_run_whose_only_server_dies_waits_for_its_replacement_and_gives_it_the_weights(
    serve: Any, build: Any
) -> None:
    wanted = build(serve()).generate(REQUESTS)
    server = serve()
    replaced = []

    def die(count: int) -> None:
        if count == 5:
            server.kill()
            replaced.append(serve(server.port))

    engine = build(server)
    server.before_sample = die
    assert engine.generate(REQUESTS) == wanted
    assert replaced[0].loads == ["weights_000001"]


def test_a_server_replaced_while_nobody_asked_it_anything_is_given_the_weights_before_its_answers_count(
    serve: Any, build: Any
) -> None:
    server = serve()
    engine = build(server)
    wanted = engine.generate(REQUESTS)
    server.kill()
    replacement = serve(server.port)  # it would answer with the weights it was started with
    assert engine.generate(REQUESTS) == wanted
    assert replacement.loads == ["weights_000001"]


def test_an_update_reaches_servers_that_were_away_while_it_happened(serve: Any, build: Any, tmp_path: Path) -> None:
    one, other = serve(), serve()
    engine = build(one, other)
    other.kill()
    engine.generate(REQUESTS)
    engine.update_weights(weights_of(2.0, 2), 2)
    back = serve(other.port)
    until(lambda: state(tmp_path)["servers"][1]["weights"] == "2")
    assert {completion.weight_version for group in engine.generate(REQUESTS) for completion in group} == {2}
    assert back.loads == ["weights_000002"]


def test_without_a_server_the_wait_ends_at_its_deadline_and_says_for_whom(serve: Any, build: Any, raises: Any) -> None:
    server = serve()
    engine = build(server, reconnect_timeout_s=0.3)
    server.kill()
    places = r"127\.0\.0\.1:\d+: .*|127\.0\.0\.1:\d+|--port \d+"
    with raises(DeadlineError, 0.3, server.url, server.port, varies=places):
        engine.generate(REQUESTS[:1])


def test_an_added_server_gets_the_weights_before_its_first_request(serve: Any, build: Any, tmp_path: Path) -> None:
    first, added = serve(), serve()
    engine = build(first)
    engine.update_weights(weights_of(3.0, 2), 2)
    roster(tmp_path).want([first.url, added.url], [first.url])
    until(lambda: [server["state"] for server in state(tmp_path)["servers"]] == ["ready", "ready"])
    assert "/inference/v1/generate" not in added.calls
    assert added.loads == ["weights_000002"]
    engine.generate(REQUESTS)
    assert added.prompts
    assert first.prompts


def test_a_dropped_server_gets_no_more_requests(serve: Any, build: Any, tmp_path: Path) -> None:
    stays, dropped = serve(), serve()
    engine = build(stays, dropped)
    roster(tmp_path).want([stays.url], [stays.url, dropped.url])
    until(lambda: len(state(tmp_path)["servers"]) == 1)
    engine.generate(REQUESTS)
    assert len(stays.prompts) == 48
    assert not dropped.prompts


def test_a_server_that_is_wanted_again_before_it_has_left_serves_on(serve: Any, build: Any, tmp_path: Path) -> None:
    server, other = serve(), serve()
    engine = build(server)
    may_answer, is_asked = threading.Event(), threading.Event()

    def wait(count: int) -> None:
        is_asked.set()
        may_answer.wait(20)

    server.before_sample = wait
    busy = engine.submit(REQUESTS[0])
    assert is_asked.wait(20)
    roster(tmp_path).want([other.url], [server.url])
    until(lambda: [each["state"] for each in state(tmp_path)["servers"]] == ["leaving", "ready"])
    roster(tmp_path).want([server.url], [server.url])
    until(lambda: state(tmp_path)["servers"][0]["state"] == "ready")
    may_answer.set()
    assert len(busy.result(20)) == 4
    assert len(engine.generate(REQUESTS[:1])[0]) == 4


def test_addresses_of_a_changed_config_come_before_those_that_the_command_left(tmp_path: Path) -> None:
    found = Roster(tmp_path)
    found.want(["http://b:1"], ["http://a:1"])
    assert found.wanted(["http://a:1"]) == ("http://b:1",)
    assert found.wanted(["http://c:1"]) == ("http://c:1",)


def test_a_list_that_somebody_damaged_changes_no_server(serve: Any, build: Any, tmp_path: Path) -> None:
    server = serve()
    engine = build(server)
    file = tmp_path / "run" / "scratch" / "engines" / "wanted.json"
    for text in ("{", json.dumps({"configured": [server.url], "urls": ["no address"]})):
        file.write_text(text)
        until(lambda: str(file) in state(tmp_path).get("trouble", ""))
        assert len(engine.generate(REQUESTS[:1])) == 1
    file.unlink()
    until(lambda: state(tmp_path)["trouble"] == "")


def test_two_runs_on_one_server_are_told_apart(serve: Any, build: Any, raises: Any) -> None:
    server = serve()
    one, other = build(server), build(server)
    other.generate(REQUESTS[:1])
    with raises(BackendError):
        one.generate(REQUESTS[:1])


def test_a_server_that_hangs_counts_as_lost(serve: Any, build: Any) -> None:
    hangs, other = serve(), serve()
    held = threading.Event()
    hangs.before_sample = lambda count: held.wait(20) and None
    engine = build(hangs, other, timeout_s=2.0)
    try:
        assert len(engine.generate(REQUESTS)) == 12
    finally:
        held.set()
    assert len(other.prompts) == 48


def test_samples_of_a_prompt_go_to_one_server_and_prompts_to_the_least_busy(serve: Any, build: Any) -> None:
    servers = [serve(), serve()]
    gate = threading.Barrier(48 + 1, timeout=20)
    for server in servers:
        server.before_sample = lambda count: gate.wait() and None
    engine = build(*servers)
    asked = threading.Thread(target=engine.generate, args=(REQUESTS,))
    asked.start()
    gate.wait()
    asked.join()
    places = [set(server.prompts) for server in servers]
    assert not places[0] & places[1]
    assert all(len(server.prompts) >= 48 // 2 - 16 for server in servers)


def test_no_server_has_more_requests_than_max_concurrency(serve: Any, build: Any) -> None:
    server = serve()
    now, most, lock = [0], [0], threading.Lock()

    def count_up(count: int) -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.005)
        with lock:
            now[0] -= 1

    server.before_sample = count_up
    build(server, max_concurrency=3).generate(REQUESTS)
    assert most[0] <= 3


def test_a_server_that_joins_from_another_machine_is_sent_no_weights_in_the_clear(
    serve: Any, build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, joining = serve(takes_tensors=True), serve(takes_tensors=True)
    engine = build(here, weights="distributed")
    is_own = ways.names_loopback
    monkeypatch.setattr(ways, "names_loopback", lambda url: is_own(url) and url != joining.url)
    roster(tmp_path).want([here.url, joining.url], [here.url])
    until(lambda: [server["state"] for server in state(tmp_path)["servers"]] == ["ready", "refused"])
    assert "unencrypted" in state(tmp_path)["servers"][1]["trouble"]
    assert joining.loads == []
    assert len(engine.generate(REQUESTS[:1])) == 1


def roster(run: Path) -> Roster:
    return Roster(run / "run" / "scratch" / "engines")


def state(run: Path) -> dict[str, Any]:
    return roster(run).state() or {"servers": []}


def until(happened: Callable[[], bool]) -> None:
    """Wait for something that another thread brings about."""
    end = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < end, "it did not happen in 20 s"
        time.sleep(0.01)


def test_weights_that_a_killed_run_left_are_removed_by_its_next_life_alone(tiny_model: Path, tmp_path: Path) -> None:
    policy = PolicyConfig(model_name=str(tiny_model))
    for shared in (None, tmp_path / "shared"):
        mine, other = (place_of(tmp_path / run / "scratch", shared) for run in ("mine", "other"))
        assert mine != other
        for place in (mine, other):
            for name in ("weights_000001", ".writing_weights_000002"):
                (place / name).mkdir(parents=True)
        WeightVersions(mine, policy)
        assert [len(list(place.iterdir())) for place in (mine, other)] == [0, 2]
