"""Who comes when, what a failure touches, and what comes back after a stop."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from nemorl_agents.tinker import work
from nemorl_agents.tinker.errors import ApiError
from tinker_talk import Open, run
from tinker_toy import BASE


def step(model: str, seq: int) -> dict[str, Any]:
    return {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 0.5, "weight_decay": 1.0}}


def test_models_take_turns(talk: Open) -> None:
    async def scene() -> None:
        async with talk(hold_s=5.0) as it:
            session = await it.session()
            models = [await it.model(session, number) for number in range(2)]
            it.models.calls.clear()
            for model in models:  # all of the first one's are there before the second's
                for seq in (4, 3, 2):
                    await it.asked("/optim_step", step(model, seq))
            it.service.worker.soon(lambda: time.sleep(0.2))
            ids = [(await it.asked("/optim_step", step(model, 1)))["request_id"] for model in models]
            last = [f"{request_id.rpartition(':')[0]}:4" for request_id in ids]
            for request_id in last:
                await it.asked("/retrieve_future", {"request_id": request_id})
            assert it.models.calls == [("step", model) for _ in range(4) for model in models]

    run(scene())


@pytest.mark.parametrize("replay_s", [0.0, 1000.0])
def test_a_model_comes_back_as_it_was(talk: Open, tmp_path: Path, replay_s: float) -> None:
    """Three halvings, a server that begins anew, and one more: 1/16."""

    async def before() -> str:
        async with talk(replay_s=replay_s) as it:
            model = await it.model(await it.session())
            for seq in (1, 2, 3):
                await it.halved(model, seq)
            assert await it.scale(model) == pytest.approx(1 / 8)
            return str(model)

    async def after(model: str) -> None:
        async with talk(replay_s=replay_s) as it:
            await it.halved(model, 4)
            assert await it.scale(model) == pytest.approx(1 / 16)
            verbs = [verb for verb, _ in it.models.calls if verb in ("step", "load")]
            assert verbs == (["load", "step"] if replay_s == 0 else ["step"] * 4)

    run(after(run(before())))
    states = [*(tmp_path / "served" / "states").glob("*/*")]
    assert len(states) == (1 if replay_s == 0 else 0)  # of each model the latest


def test_requests_that_waited_run_when_the_server_is_back(talk: Open) -> None:
    async def before() -> tuple[str, str]:
        async with talk() as it:
            model = await it.model(await it.session())
            return model, (await it.asked("/optim_step", step(model, 2)))["request_id"]

    async def after(model: str, request_id: str) -> None:
        async with talk() as it:
            await it.halved(model, 1)
            assert "metrics" in await it.asked("/retrieve_future", {"request_id": request_id})
            assert await it.scale(model) == pytest.approx(1 / 4)

    run(after(*run(before())))


def test_what_waited_in_a_session_that_ended_does_not_run(talk: Open) -> None:
    """The server was stopped between the session's end and what follows from it."""

    async def before() -> tuple[str, str]:
        async with talk() as it:
            session = await it.session()
            model = await it.model(session)
            request_id = (await it.asked("/optim_step", step(model, 2)))["request_id"]
            it.service.records.sessions.change(session, ended_s=1.0, status={"type": "cancelled"})
            return model, request_id

    async def after(model: str, request_id: str) -> None:
        async with talk() as it:
            assert (await it.asked("/retrieve_future", {"request_id": request_id}))["category"] == "user"
            assert (await it.post("/optim_step", step(model, 1))).status_code == 410
            assert it.models.calls == []

    run(after(*run(before())))


def test_a_disk_that_is_full_for_a_while_applies_nothing_twice(talk: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemorl_agents.tinker.work.DISK_S", 0.05)

    async def scene() -> None:
        async with talk(hold_s=0.3) as it:
            model = await it.model(await it.session())
            journal_file = it.service.records.journal._write
            steps = it.models.step

            def step_on_a_full_disk(*given: Any) -> dict[str, float]:
                journal_file.execute("PRAGMA query_only = ON")
                return steps(*given)

            monkeypatch.setattr(it.models, "step", step_on_a_full_disk)
            request_id = (await it.asked("/optim_step", step(model, 1)))["request_id"]
            found = await it.asked("/retrieve_future", {"request_id": request_id})
            assert found["type"] == "try_again"
            monkeypatch.setattr(it.models, "step", steps)
            journal_file.execute("PRAGMA query_only = OFF")
            while found.get("type") == "try_again":
                found = await it.asked("/retrieve_future", {"request_id": request_id})
            assert await it.scale(model) == pytest.approx(1 / 2)
            assert [verb for verb, _ in it.models.calls].count("step") > 1  # again, each time on the model as it was

    run(scene())


def test_what_fails_while_the_disk_is_full_is_told_once_there_is_room(
    talk: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemorl_agents.tinker.work.DISK_S", 0.05)

    async def scene() -> None:
        async with talk(hold_s=0.3) as it:
            model = await it.model(await it.session())
            request_id = (await it.asked("/optim_step", step(model, 2)))["request_id"]  # waits for the first
            journal_file = it.service.records.journal._write
            journal_file.execute("PRAGMA query_only = ON")
            it.service.worker.soon(lambda: it.service.worker.end([model], ApiError(410, "it is over"), {"type": "x"}))
            assert (await it.asked("/retrieve_future", {"request_id": request_id}))["type"] == "try_again"
            journal_file.execute("PRAGMA query_only = OFF")
            found: dict[str, Any] = {"type": "try_again"}
            while found.get("type") == "try_again":
                found = await it.asked("/retrieve_future", {"request_id": request_id})
            assert "it is over" in found["error"]

    run(scene())


def test_samples_that_come_one_by_one_are_one_call(talk: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client sends each of its prompts by itself. Here a second may pass between two, for machines that are busy."""
    monkeypatch.setattr(work, "GATHER_S", 1.0)
    monkeypatch.setattr(work, "LONGEST_GATHER_S", 30.0)

    async def scene() -> None:
        async with talk(hold_s=30.0) as it:
            body = {"session_id": await it.session(), "sampling_session_seq_id": 0, "base_model": BASE}
            sampler = (await it.asked("/create_sampling_session", body))["sampling_session_id"]
            ids = []
            for seq in range(1, 5):
                prompt = {"chunks": [{"type": "encoded_text", "tokens": [seq]}]}
                asked = {"sampling_session_id": sampler, "seq_id": seq, "num_samples": 1, "prompt": prompt}
                ids.append((await it.asked("/asample", {**asked, "sampling_params": {"max_tokens": 2}}))["request_id"])
                await asyncio.sleep(0.05)
            for request_id in ids:
                assert (await it.post("/retrieve_future", {"request_id": request_id})).status_code == 200
            assert it.models.calls == [("sample", BASE)]

    run(scene())


def test_a_sample_that_runs_keeps_no_model_waiting_where_both_can_go_on(talk: Open) -> None:
    """The sample ends once a step that was asked for after it has run: on one thread neither would."""
    stepped, began = threading.Event(), threading.Event()

    async def scene() -> None:
        async with talk(hold_s=30.0, samples_apart=True) as it:
            session = await it.session()
            model = await it.model(session)
            sample = it.models.sample

            def until_stepped(base: str, snapshot: Path | None, requests: Any) -> Any:
                began.set()
                assert stepped.wait(20.0)
                return sample(base, snapshot, requests)

            it.models.sample = until_stepped
            body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
            sampler = (await it.asked("/create_sampling_session", body))["sampling_session_id"]
            prompt = {"chunks": [{"type": "encoded_text", "tokens": [3]}]}
            asked = {"sampling_session_id": sampler, "seq_id": 0, "num_samples": 1, "prompt": prompt}
            waiting = (await it.asked("/asample", {**asked, "sampling_params": {"max_tokens": 2}}))["request_id"]
            assert await asyncio.to_thread(began.wait, 20.0)
            assert "error" not in await it.halved(model, 1)
            stepped.set()
            answer = await it.post("/retrieve_future", {"request_id": waiting})
            assert answer.headers["content-type"] == "application/x-protobuf"

    run(scene())


def test_a_model_that_is_unloaded_is_gone_and_its_checkpoints_remain(talk: Open, tmp_path: Path) -> None:
    async def scene() -> tuple[str, str]:
        async with talk() as it:
            session = await it.session()
            model, other = [await it.model(session, number) for number in range(2)]
            path = (await it.result("/save_weights", {"model_id": model, "seq_id": 1, "path": "kept"}))["path"]
            await it.asked("/optim_step", step(model, 3))  # waits for number 2, which will not come
            assert (await it.post("/unload_model", {"model_id": model}, owner="bob")).status_code == 404
            for _ in range(2):  # a retry is the same request
                unloaded = await it.result("/unload_model", {"model_id": model})
                assert unloaded == {"type": "unload_model", "model_id": model}
            assert model not in it.models.adapters
            waited = await it.asked("/retrieve_future", {"request_id": f"{model}:3"})
            assert waited["category"] == "user"
            assert (await it.post("/optim_step", step(model, 2))).status_code == 410
            await it.halved(other, 1)
            return model, path

    async def after(model: str, path: str) -> None:
        async with talk() as it:
            assert (await it.post("/optim_step", step(model, 2))).status_code == 410
            session = await it.session()
            body = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}
            assert (await it.result("/load_weights", body))["type"] == "load_weights"

    run(after(*run(scene())))


def test_an_unloading_that_was_promised_happens_when_the_server_is_back(talk: Open) -> None:
    async def before() -> str:
        async with talk() as it:
            model = await it.model(await it.session())
            it.service.worker.shutdown()
            await it.asked("/unload_model", {"model_id": model})
            return str(model)

    async def after(model: str) -> None:
        async with talk() as it:
            assert (await it.result("/unload_model", {"model_id": model}))["model_id"] == model

    run(after(run(before())))


def test_weights_that_are_replaced_while_they_are_read_are_read_anew(talk: Open) -> None:
    """Of an inflight sampler, whose files a save on the other thread removes at the worst moment."""

    async def scene() -> None:
        async with talk(samples_apart=True) as it:
            session = await it.session()
            model = await it.model(session)
            save = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0, "kind": "inflight"}
            sampler = (await it.result("/save_weights_for_sampler", save))["sampling_session_id"]
            sample, asked_for = it.models.sample, []

            def gone_at_first(base: str, snapshot: Path | None, requests: Any) -> Any:
                asked_for.append(snapshot)
                if len(asked_for) > 1:
                    return sample(base, snapshot, requests)
                again = asyncio.run_coroutine_threadsafe(
                    it.result("/save_weights_for_sampler", {**save, "seq_id": 2, "sampling_session_seq_id": 1}), loop
                )
                again.result(20.0)
                assert snapshot is not None
                raise FileNotFoundError(snapshot)

            loop, it.models.sample = asyncio.get_running_loop(), gone_at_first
            prompt = {"chunks": [{"type": "encoded_text", "tokens": [3]}]}
            body = {"sampling_session_id": sampler, "seq_id": 0, "num_samples": 1, "prompt": prompt}
            request_id = (await it.asked("/asample", {**body, "sampling_params": {"max_tokens": 2}}))["request_id"]
            answer = await it.post("/retrieve_future", {"request_id": request_id})
            assert answer.headers["content-type"] == "application/x-protobuf"
            first, second = asked_for
            assert not first.exists()
            assert second.exists()

    run(scene())
