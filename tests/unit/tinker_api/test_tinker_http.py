"""Answers that need no model in memory: sessions, keys, lists, and what is refused."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from nemorl.errors import UsageError
from nemorl_agents.tinker.keys import Keys, own_key, read_keys
from nemorl_agents.tinker.routes_checkpoints import CheckpointRoutes
from nemorl_agents.tinker.routes_sampling import SamplingRoutes
from nemorl_agents.tinker.routes_sessions import SessionRoutes
from nemorl_agents.tinker.routes_training import TrainingRoutes
from recorded_messages import Raises
from tinker_talk import KEYS, Open, run
from tinker_toy import BASE


def test_nobody_comes_in_without_a_key(talk: Open) -> None:
    async def scene() -> None:
        async with talk() as it:
            for headers in ({}, {"X-API-Key": ""}, {"X-API-Key": KEYS["ada"][:-1]}, {"Authorization": KEYS["ada"]}):
                answer = await it.http.post("/api/v1/client/config", json={}, headers=headers)
                assert answer.status_code == 401
            assert (await it.http.get("/api/v1/healthz")).json() == {"status": "ok"}

    run(scene())


def test_switches_of_clients_are_told(talk: Open) -> None:
    async def scene() -> None:
        async with talk() as it:
            config = await it.asked("/client/config", {"sdk_version": "0.38.0"})
            assert config["parallel_fwdbwd_chunks"]
            assert not config["custom_loss_server_side"]
            assert (await it.asked("/client/dynamic_config", {"sdk_version": "0.38.0"}))["sample_cancel_enabled"]
            assert (await it.asked("/telemetry", {"events": []})) == {"status": "accepted"}

    run(scene())


def test_sessions_are_found_by_what_is_known_of_them(talk: Open) -> None:
    async def scene() -> None:
        async with talk() as it:
            first = await it.session(display_name="Sums of two", user_metadata={"run": "a"})
            second = await it.session(display_name="Words", user_metadata={"run": "b"})
            theirs = await it.session(owner="bob")
            await it.asked(f"/sessions/{second}/finish", {"reason": {"type": "errored"}})

            async def found(**wanted: Any) -> list[str]:
                return [each["session_id"] for each in (await it.asked("/sessions/search", wanted))["sessions"]]

            assert await found() == [second, first]
            assert await found(display_name="sums") == [first]
            assert await found(display_name="two words") == []
            assert await found(user_metadata={"run": "b"}) == [second]
            assert await found(session_id=first) == [first]
            assert await found(session_id=theirs) == []
            assert await found(statuses=[{"type": "active"}]) == [first]
            assert await found(statuses=[{"type": "client_finished", "reasons": ["success"]}]) == []
            page = await it.asked("/sessions/search", {"limit": 1})
            rest = await it.asked("/sessions/search", {"limit": 1, "cursor": page["next_cursor"]})
            assert [each["session_id"] for each in rest["sessions"]] == [first]
            assert rest["next_cursor"] is None
            assert (await it.get("/sessions?limit=1&offset=1"))["sessions"] == [first]

    run(scene())


def test_checkpoints_have_names_times_and_owners(talk: Open, tmp_path: Path) -> None:
    async def scene() -> None:
        async with talk() as it:
            model = await it.model(await it.session())
            save = {"model_id": model, "seq_id": 1, "path": "one", "user_metadata": {"a": "b"}}
            path = (await it.result("/save_weights", save))["path"]
            assert path == f"tinker://{model}/weights/one"
            again = await it.result("/save_weights", {**save, "seq_id": 2})
            assert again["category"] == "user"
            assert "overwrite" in again["error"]
            assert (await it.result("/save_weights", {**save, "seq_id": 3, "overwrite": True}))["path"] == path
            await it.halved(model, 4)  # after it, the files that were replaced are gone
            files = tmp_path / "served" / "checkpoints"
            assert [each.name for each in files.glob("*/training/*")] == ["one-00000003"]
            (shown,) = (await it.get(f"/training_runs/{model}/checkpoints"))["checkpoints"]
            assert (shown["checkpoint_id"], shown["public"], shown["user_metadata"]) == (
                "weights/one",
                False,
                {"a": "b"},
            )
            assert shown["size_bytes"] > 0
            url = f"/api/v1/training_runs/{model}/checkpoints/weights/one"
            theirs = await it.http.delete(url, headers={"X-API-Key": KEYS["bob"]})
            assert theirs.status_code == 404
            assert (await it.post("/weights_info", {"tinker_path": path}, owner="bob")).status_code == 404
            await it.post(f"/training_runs/{model}/checkpoints/weights/one/publish", {})
            info = await it.asked("/weights_info", {"tinker_path": path}, owner="bob")
            assert (info["base_model"], info["lora_rank"]) == (BASE, 4)

    run(scene())


def test_a_link_with_a_wrong_sign_leads_nowhere(talk: Open) -> None:
    async def scene() -> None:
        async with talk() as it:
            for sign in ("", "0" * 64, "é", "%ff", "\u3042"):
                query = {"until": str(int(time.time()) + 60), "sign": sign}
                answer = await it.http.get("/api/v1/files/a/external_weights/b/c", params=query)
                assert answer.status_code == 404

    run(scene())


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "x" * 201, "a b"])
def test_names_that_are_no_names_are_refused(talk: Open, name: str) -> None:
    async def scene() -> None:
        async with talk() as it:
            model = await it.model(await it.session())
            found = await it.result("/save_weights", {"model_id": model, "seq_id": 1, "path": name})
            assert found["category"] == "user"

    run(scene())


def test_a_checkpoint_whose_time_is_over_goes(talk: Open, tmp_path: Path) -> None:
    async def scene() -> None:
        async with talk() as it:
            model = await it.model(await it.session())
            await it.result("/save_weights", {"model_id": model, "seq_id": 1, "path": "one", "ttl_seconds": 3600})
            short = {"model_id": model, "seq_id": 2, "path": "two", "ttl_seconds": 60}
            assert "ttl_seconds" in (await it.result("/save_weights", short))["error"]
            records = it.service.records
            (row,) = records.checkpoints.where("1")
            assert row.expires_s == pytest.approx(time.time() + 3600, abs=60)
            it.service.sweep()
            assert records.checkpoints.count("1") == 1
            records.checkpoints.change(row.path, expires_s=time.time() - 1)
            it.service.sweep()
            await it.halved(model, 3)
            assert records.checkpoints.count("1") == 0
            assert not [*(tmp_path / "served" / "checkpoints").glob("*/*/*")]

    run(scene())


def test_the_end_of_a_session_leaves_checkpoints_alone(talk: Open, tmp_path: Path) -> None:
    async def scene() -> None:
        async with talk(replay_s=0) as it:
            session = await it.session()
            model = await it.model(session)
            await it.halved(model, 1)
            saved = (await it.result("/save_weights", {"model_id": model, "seq_id": 2, "path": "kept"}))["path"]
            await it.result("/save_weights_for_sampler", {"model_id": model, "seq_id": 3, "sampling_session_seq_id": 0})
            await it.asked(f"/sessions/{session}/finish", {"reason": {"type": "success"}})
            other = await it.session()
            body = {"session_id": other, "model_seq_id": 0, "path": saved, "optimizer": True}
            resumed = (await it.result("/load_weights", body))["model_id"]
            assert resumed == f"{other}:train:0"
            assert await it.scale(resumed) == pytest.approx(1 / 2)
            assert model not in it.models.adapters
            assert not (tmp_path / "served" / "snapshots" / model.replace(":", ".")).exists()
            assert not (tmp_path / "served" / "states" / model.replace(":", ".")).exists()

    run(scene())


def test_a_sampling_session_has_the_weights_it_was_made_with(talk: Open) -> None:
    async def scene() -> None:
        async with talk() as it:
            session = await it.session()
            model = await it.model(session)
            training = (await it.result("/save_weights", {"model_id": model, "seq_id": 1}))["path"]
            body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
            made = [await it.asked("/create_sampling_session", body) for _ in range(2)]
            assert made[0] == made[1]
            other = {**body, "base_model": "toy/frozen"}
            assert (await it.post("/create_sampling_session", other)).status_code == 400
            wrong = {"session_id": session, "sampling_session_seq_id": 1, "model_path": training}
            assert "save_weights_for_sampler" in (await it.post("/create_sampling_session", wrong)).json()["error"]
            unknown = {**body, "sampling_session_seq_id": 2, "base_model": "toy/none"}
            assert BASE in (await it.post("/create_sampling_session", unknown)).json()["error"]
            sampler = made[0]["sampling_session_id"]
            joined = [await it.asked("/join_sampling_session", {"sampling_session_id": sampler}) for _ in range(2)]
            assert [each["client_counter"] for each in joined] == [1, 2]

    run(scene())


def test_a_body_that_is_too_long_is_refused(talk: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemorl_agents.tinker.app.MOST_BODY_BYTES", 1000)

    async def scene() -> None:
        async with talk() as it:
            assert (await it.post("/optim_step", b" " * 1001)).status_code == 413
            assert (await it.post("/optim_step", b" " * 1000)).status_code == 422

    run(scene())


ODD = [
    b"",
    b"null",
    b"[]",
    b"{}",
    b"[" * 100_000,
    b'{"model_id": "\\ud800", "session_id": "\\ud800", "request_id": "\\ud800", "sampling_session_id": "\\ud800", '
    b'"tinker_path": "\\ud800", "seq_id": 1, "reason": {}}',
    b'{"model_id": "a:train:0", "sampling_session_id": "a", "seq_id": 1e999}',
    b'{"model_id": "a:train:0", "sampling_session_id": "a", "seq_id": -1}',
    b'{"model_id": "a:train:0", "sampling_session_id": "a", "seq_id": 99999999999999999999999999}',
    b'{"model_id": 7, "session_id": 7, "seq_id": {}, "num_samples": "x"}',
    b"\xff\xfe\x00",
]


@pytest.mark.parametrize("body", ODD, ids=range(len(ODD)))
def test_odd_bodies_are_the_clients_fault(talk: Open, body: bytes) -> None:
    async def scene() -> None:
        async with talk() as it:
            groups = [SessionRoutes, TrainingRoutes, SamplingRoutes, CheckpointRoutes]
            endpoints = [each for group in groups for each in group(it.service).endpoints()]
            for endpoint in endpoints:
                if endpoint.method in ("POST", "PUT") and endpoint.path != "/forward_backward":  # needs the wheel
                    path = endpoint.path.replace("{", "").replace("}", "")
                    send = it.http.request(
                        endpoint.method, f"/api/v1{path}", content=body, headers={"X-API-Key": KEYS["ada"]}
                    )
                    assert (await send).status_code < 500, path

    run(scene())


# Keys


def test_a_key_is_made_once_and_is_its_owners_alone(tmp_path: Path) -> None:
    first = own_key(tmp_path / "served")
    assert own_key(tmp_path / "served").by_name == first.by_name
    assert (tmp_path / "served" / "key").stat().st_mode & 0o077 == 0
    assert own_key(tmp_path / "served", "tml-given-0123").by_name == {"client": "tml-given-0123"}


def test_keys_that_clients_could_not_send_are_refused(tmp_path: Path, raises: Raises) -> None:
    with raises(UsageError, "tml-"):
        Keys({"ada": "nemorl-0123456789"})
    with raises(UsageError):
        Keys({"ada": KEYS["ada"], "bob": KEYS["ada"]})
    path = tmp_path / "keys"
    path.write_text(f"# our clients\nada {KEYS['ada']}\n\nbob {KEYS['bob']}\n")
    assert read_keys(path).by_name == KEYS
    for text in ("", "ada\n", f"ada {KEYS['ada']}\nada {KEYS['bob']}\n"):
        path.write_text(text)
        with raises(UsageError, path):
            read_keys(path)


@pytest.mark.parametrize(
    ("method", "path", "word"),
    [
        ("POST", "/copy_weights", "copy_weights"),
        ("POST", "/retrieve_futures", "retrieve_futures"),
        ("POST", "/create_custom_loss", "custom_loss_server_side"),
        ("GET", "/training_runs/run/checkpoints/weights/last/archive", "save_weights_external"),
        ("DELETE", "/training_runs/run/checkpoints/last", "weights/last"),
    ],
)
def test_what_is_not_served_is_refused_by_name(talk: Open, method: str, path: str, word: str) -> None:
    async def scene() -> None:
        async with talk() as it:
            answer = await it.http.request(method, f"/api/v1{path}", headers={"X-API-Key": KEYS["ada"]}, content=b"{}")
            assert answer.status_code == 400
            assert answer.headers["x-should-retry"] == "false"
            assert word in answer.json()["error"]

    run(scene())
