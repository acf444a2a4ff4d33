"""Requests as a client sends them when things go wrong: twice, early, under another number, too late, or not at all."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from nemorl.resources.ports import free_port
from raw_client import RawClient, pass_bytes, step_body
from tinker_toy import BASE
from toy_server import Keeper


@pytest.fixture
def client(address: str) -> RawClient:
    return RawClient(address)


@pytest.fixture
def impatient(keeper: Keeper, tmp_path: Path) -> RawClient:
    """Of a server whose polls wait for a moment only."""
    return RawClient(keeper.begin(tmp_path / "served", free_port(), hold_s=0.1, sweep_s=0.1))


def waiting(client: RawClient, request_id: str) -> Any:
    return client.asked("/retrieve_future", {"request_id": request_id})


def test_a_retry_is_the_same_request(client: RawClient) -> None:
    model = client.model(client.session())
    body = pass_bytes(model, 1, [1, 2, 3])
    ids = [client.asked("/forward_backward", body)["request_id"] for _ in range(3)]
    assert len(set(ids)) == 1
    first = client.fetched(ids[0])
    assert client.fetched(ids[0]) == first
    assert json.loads(client.result("/optim_step", step_body(model, 2)))["metrics"]["grad_norm"] > 0
    again = client.asked("/forward_backward", body)["request_id"]  # after its step, too
    assert client.fetched(again) == first


def test_another_body_under_a_number_is_refused_for_good(client: RawClient) -> None:
    model = client.model(client.session())
    client.result("/forward_backward", pass_bytes(model, 1, [1, 2, 3]))
    answer = client.post("/forward_backward", pass_bytes(model, 1, [1, 2, 4]))
    assert (answer.status_code, answer.headers["x-should-retry"]) == (400, "false")
    assert f"request 1 of {model}" in answer.json()["error"]


def test_who_comes_early_waits_and_is_told_for_whom(impatient: RawClient) -> None:
    model = impatient.model(impatient.session())
    late = impatient.asked("/optim_step", step_body(model, 3))["request_id"]
    told = waiting(impatient, late)
    assert (told["type"], told["queue_state"]) == ("try_again", "paused_capacity")
    assert "request 1 of this model" in told["queue_state_reason"]
    for seq in (2, 1):
        impatient.asked("/forward_backward", pass_bytes(model, seq, [1, 2, 3]))
    assert json.loads(impatient.fetched(late))["metrics"]["grad_norm"] > 0


def test_a_poll_waits_for_its_answer(keeper: Keeper, tmp_path: Path) -> None:
    client = RawClient(keeper.begin(tmp_path / "served", free_port(), models={"slow_s": 0.3}))
    model = client.model(client.session())
    request_id = client.asked("/forward_backward", pass_bytes(model, 1, [1, 2, 3]))["request_id"]
    began_s = time.monotonic()
    assert b"try_again" not in client.post("/retrieve_future", {"request_id": request_id}).content
    assert 0.1 < time.monotonic() - began_s < 2


def test_sequence_ids_are_known_at_submission(client: RawClient) -> None:
    session = client.session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
    sampler = client.asked("/create_sampling_session", body)["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}, {"type": "encoded_text", "tokens": [2, 3]}]}
    asked = {"sampling_session_id": sampler, "seq_id": 7, "num_samples": 3, "prompt": prompt}
    given = client.asked("/asample", {**asked, "sampling_params": {"max_tokens": 2}})
    assert given["sample_sequence_ids"] == [f"{sampler}:7:{number}" for number in range(3)]


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}},
        {"prompt": {"chunks": []}},
        {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1] * 65}]}},
        {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [99]}]}},
        {"record_stability_info": True},
        {"prompt_alt_tokens_k": 2},
        {"sampling_params": {"temperature": -1}},
        {"something_new": 1},
    ],
    ids=str,
)
def test_a_sample_that_cannot_be_had_fails_alone(client: RawClient, change: dict[str, Any]) -> None:
    session = client.session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
    sampler = client.asked("/create_sampling_session", body)["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    fine = {"sampling_session_id": sampler, "prompt": prompt, "sampling_params": {"max_tokens": 2, "seed": 1}}
    asked = [{**fine, "seq_id": 0}, {**fine, **change, "seq_id": 1}, {**fine, "seq_id": 2}]
    ids = [client.asked("/asample", each)["request_id"] for each in asked]
    first, wrong, last = map(client.fetched, ids)
    assert first == last
    assert json.loads(wrong)["category"] == "user"


def test_a_failed_request_keeps_its_place(client: RawClient) -> None:
    """What is wrong in a request is told by its future: its number is taken, and the next one runs."""
    model = client.model(client.session())
    wrong = {"model_id": model, "seq_id": 1, "optimizer_params": {"type": "dimuon", "learning_rate": 0.1}}
    failed = json.loads(client.result("/optim_step", wrong))
    assert failed["category"] == "user"
    assert "dimuon" in failed["error"]
    unknown = {**step_body(model, 2), "momentum": 0.9}
    assert "momentum" in json.loads(client.result("/optim_step", unknown))["error"]
    assert "metrics" in json.loads(client.result("/optim_step", step_body(model, 3)))


def test_a_model_that_could_not_be_made_fails_what_follows(client: RawClient) -> None:
    session = client.session()
    wanted = {"session_id": session, "model_seq_id": 0, "base_model": "toy/frozen", "lora_config": {"rank": 4}}
    asked = client.asked("/create_model", wanted)
    assert json.loads(client.fetched(asked["request_id"]))["category"] == "user"
    after = json.loads(client.result("/optim_step", step_body(asked["model_id"], 1)))
    assert asked["model_id"] in after["error"]


def test_a_finished_session_is_over(client: RawClient) -> None:
    session = client.session()
    model = client.model(session)
    held = client.asked("/optim_step", step_body(model, 2))["request_id"]
    client.asked(f"/sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})
    assert "client_finished" in json.loads(client.fetched(held))["error"]
    assert client.post("/session_heartbeat", {"session_id": session}).status_code == 410
    assert client.post("/optim_step", step_body(model, 3)).status_code == 410


def test_without_a_sign_of_life_a_session_is_parked_and_then_ends(keeper: Keeper, tmp_path: Path) -> None:
    address = keeper.begin(tmp_path / "served", free_port(), park_s=0.3, end_s=2.0, sweep_s=0.05)
    client, other = RawClient(address), RawClient(address)
    session, model = client.session(), ""
    model = client.model(session)
    first = client.result("/forward_backward", pass_bytes(model, 1, [1, 2, 3]))
    time.sleep(0.6)  # parked: it comes back with its gradient
    assert json.loads(client.result("/optim_step", step_body(model, 2)))["metrics"]["grad_norm"] > 0
    twin = other.model(other.session())
    assert other.result("/forward_backward", pass_bytes(twin, 1, [1, 2, 3])) == first
    other.result("/optim_step", step_body(twin, 2))
    after = [
        each.result("/forward_backward", pass_bytes(m, 3, [1, 2, 3])) for each, m in ((client, model), (other, twin))
    ]
    assert after[0] == after[1]
    time.sleep(2.5)
    assert client.post("/session_heartbeat", {"session_id": session}).status_code == 410


def test_a_sample_that_waits_can_be_cancelled(keeper: Keeper, tmp_path: Path) -> None:
    client = RawClient(keeper.begin(tmp_path / "served", free_port(), models={"slow_s": 0.5}))
    session = client.session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
    sampler = client.asked("/create_sampling_session", body)["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    fine = {"sampling_session_id": sampler, "prompt": prompt, "sampling_params": {"max_tokens": 2}}
    running = client.asked("/asample", {**fine, "seq_id": 0})["request_id"]
    time.sleep(0.2)
    queued = client.asked("/asample", {**fine, "seq_id": 1})["request_id"]
    client.asked("/cancel_future", {"request_id": queued})
    assert json.loads(client.fetched(queued))["category"] == "user"
    assert b"category" not in client.fetched(running)


def test_old_unnamed_weights_make_room(keeper: Keeper, tmp_path: Path) -> None:
    client = RawClient(keeper.begin(tmp_path / "served", free_port()))
    model = client.model(client.session())
    for number in range(18):
        saved = {"model_id": model, "seq_id": number + 1, "sampling_session_seq_id": number}
        client.result("/save_weights_for_sampler", saved)
    client.result("/optim_step", step_body(model, 19))  # they are removed when an answer is out, before the next
    kept = sorted(each.name for each in (tmp_path / "served" / "snapshots").glob("*/*"))
    assert kept == [f"{seq:08d}" for seq in range(3, 19)]


def test_inflight_samplers_go_along_with_the_latest_weights(client: RawClient) -> None:
    session = client.session()
    model = client.model(session)
    saves = [
        {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0, "kind": "inflight"},
        {"model_id": model, "seq_id": 2, "sampling_session_seq_id": 1, "kind": "snapshot"},
        {"model_id": model, "seq_id": 5, "sampling_session_seq_id": 2, "kind": "inflight"},
    ]
    for save in saves[:2]:
        client.result("/save_weights_for_sampler", save)
    client.result("/forward_backward", pass_bytes(model, 3, [1, 2, 3]))
    client.result("/optim_step", step_body(model, 4, learning_rate=1.0))
    client.result("/save_weights_for_sampler", saves[2])
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    params = {"max_tokens": 4, "seed": 1, "stop": []}
    found = []
    for number in range(3):
        asked = {"sampling_session_id": f"{session}:sample:{number}", "seq_id": 0, "prompt": prompt}
        found.append(client.result("/asample", {**asked, "sampling_params": params, "prompt_logprobs": True}))
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("path", ["/nowhere", "/billing/usage"])
def test_what_is_not_served_is_said_in_json(client: RawClient, path: str) -> None:
    answer = client.post(path, {})
    assert answer.status_code == 404
    assert path in answer.json()["error"]


def test_another_client_finds_nothing(client: RawClient, address: str) -> None:
    session = client.session()
    model = client.model(session)
    other = RawClient(address, owner="bob")
    held = client.asked("/optim_step", step_body(model, 2))["request_id"]
    for path, body in [
        ("/get_info", {"model_id": model}),
        ("/retrieve_future", {"request_id": held}),
        ("/cancel_future", {"request_id": held}),
        ("/session_heartbeat", {"session_id": session}),
        ("/optim_step", step_body(model, 1)),
        ("/create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}),
    ]:
        assert other.post(path, body).status_code == 404, path


def test_samplers_and_models_take_turns(keeper: Keeper, tmp_path: Path) -> None:
    """3 requests of 1000 sequences are 3 calls; the step that comes after the first of them is made between them."""
    client = RawClient(keeper.begin(tmp_path / "served", free_port(), models={"slow_s": 0.3}))
    session = client.session()
    model = client.model(session)
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
    sampler = client.asked("/create_sampling_session", body)["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
    asked = {"sampling_session_id": sampler, "num_samples": 1000, "prompt": prompt}
    ids = []
    for seq in range(3):
        ids.append(
            client.asked("/asample", {**asked, "seq_id": seq, "sampling_params": {"max_tokens": 0}})["request_id"]
        )
    began_s = time.monotonic()
    client.result("/optim_step", step_body(model, 1))
    stepped_s = time.monotonic() - began_s
    client.fetched(ids[2])
    assert time.monotonic() - began_s > stepped_s + 0.25  # the third is sampled after the step
