"""What goes wrong with a record: no client notices, and what is kept is true."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nemorl.config import GenerationConfig, PolicyConfig
from nemorl.storage.run_directory import RunDirectory
from nemorl_agents.tinker.flight import logbook, loop
from nemorl_agents.tinker.flight.operations import read_step, step_file
from nemorl_agents.tinker.flight.recorder import FlightRecorder
from nemorl_agents.tinker.journal import Journal
from nemorl_agents.tinker.models import STATE
from nemorl_agents.tinker.records import Checkpoint, Kind, Model, Records, Request, Sampler
from nemorl_agents.tinker.wire.messages import messages
from tinker_talk import Open, run

MODEL = "s:train:0"
NEW = {"base_model": "tiny", "rank": 4, "seed": 1, "train_mlp": True, "train_attn": True, "train_unembed": True}
SUCCESS = {"type": "client_finished", "reason": {"type": "success"}}


def flight(rank: int = 8) -> FlightRecorder:
    policy = PolicyConfig(model_name="tiny", lora={"rank": rank})  # type: ignore[arg-type]
    return FlightRecorder(policy, GenerationConfig(), lambda ids: " ".join(map(str, ids)))


def stepped(seq: int) -> tuple[Request, bytes]:
    body = {"model_id": MODEL, "seq_id": seq, "adam_params": {"learning_rate": 0.25}, "type": "optim_step"}
    return request(seq, "optim_step", body), b'{"metrics": {}}'


def request(seq: int, kind: Kind, body: dict[str, Any], scope: str = MODEL) -> Request:
    return Request(f"{scope}:{seq}", scope, seq, "s", "ada", kind, "", json.dumps(body).encode())


def events(folder: Path) -> list[tuple[str, str | None]]:
    lines = [json.loads(line) for line in (folder / "runs" / "s.train.0" / "events.jsonl").read_text().splitlines()]
    return [(each["event"], each.get("reason")) for each in lines if each["event"] not in ("client", "warning")]


def kept(folder: Path) -> dict[int, list[tuple[str, int]]]:
    """(kind, number) of the requests of each step."""
    files = sorted((folder / "runs" / "s.train.0" / "requests").iterdir())
    return {n: [(each.kind, each.seq) for each in read_step(file)] for n, file in enumerate(files, start=1)}


@pytest.fixture
def records(tmp_path: Path) -> Records:
    made = Records(Journal(tmp_path))
    made.models.put(Model(MODEL, "s", "ada", NEW, {}, 0.0))
    return made


@pytest.fixture
def recorder(tmp_path: Path, records: Records) -> Iterator[FlightRecorder]:
    made = flight()
    made.open(tmp_path, records)
    yield made
    made.close()


Begun = Callable[..., FlightRecorder]


@pytest.fixture
def begun(tmp_path: Path, records: Records) -> Begun:
    """A recorder of the same folder, as the next server has one."""

    def begin(rank: int = 8) -> FlightRecorder:
        made = flight(rank)
        made.open(tmp_path, records)
        return made

    return begin


def nothing(folder: Path) -> None:
    raise OSError(28, "No space left on device")


def saving(folder: Path) -> None:
    (folder / STATE).mkdir(parents=True)
    (folder / STATE / "weights").write_text("7")


def test_a_server_with_other_options_serves_on_and_leaves_the_record_as_it_was(begun: Begun, tmp_path: Path) -> None:
    first = begun()
    first.ran(*stepped(1))
    first.close()
    second = begun(rank=16)
    second.ran(*stepped(2))
    second.ran(*stepped(3))
    second.end(MODEL, SUCCESS, saving)
    second.close()
    assert list(kept(tmp_path)) == [1]
    third = begun()  # the next one told of all that the journal still knows
    for seq in (1, 2, 3):
        third.ran(*stepped(seq))
    third.close()
    assert [seq for ((_, seq),) in kept(tmp_path).values()] == [1, 2, 3]


def test_a_run_that_is_in_use_costs_the_record_alone(recorder: FlightRecorder, tmp_path: Path) -> None:
    first = flight()
    first.open(tmp_path, recorder._records)
    first.ran(*stepped(1))
    recorder.ran(*stepped(2))
    recorder.end(MODEL, SUCCESS, saving)
    first.close()
    assert list(kept(tmp_path)) == [1]


def test_a_run_that_cannot_begin_is_left_to_others(
    begun: Begun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "describe", lambda *_: nothing(tmp_path))
        begun().ran(*stepped(1))
    second = begun()
    second.ran(*stepped(1))
    second.close()
    assert list(kept(tmp_path)) == [1]


def test_requests_that_run_again_are_kept_once(recorder: FlightRecorder, tmp_path: Path) -> None:
    """A model that was parked between a pass and its update makes the pass again."""
    message = messages().ForwardBackwardRequest(model_id=MODEL, seq_id=1, loss_fn="cross_entropy")
    made = Request(f"{MODEL}:1", MODEL, 1, "s", "ada", "forward_backward", "", message.SerializeToString())
    for _ in range(2):
        recorder.ran(made, b"")
    recorder.ran(*stepped(2))
    assert kept(tmp_path) == {1: [("forward_backward", 1), ("optim_step", 2)]}


def test_a_record_with_a_hole_is_not_continued(
    begun: Begun, records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 2 could not be written, and the next server finds a state after it in which its requests are."""
    first = begun()
    first.ran(*stepped(1))
    with monkeypatch.context() as patch:
        patch.setattr(logbook, "write_step", lambda *_: nothing(tmp_path))
        first.ran(*stepped(2))
    first.close()
    records.models.change(MODEL, state="states/s.train.0/00000002", state_seq=2)
    second = begun()
    second.ran(*stepped(3))
    second.close()
    assert list(kept(tmp_path)) == [1]
    assert events(tmp_path) == [("started", None), ("stopped", "its record could not be written")]


def test_a_server_that_ends_is_not_called_killed(begun: Begun, tmp_path: Path) -> None:
    for seq in (1, 2):
        server = begun()
        server.ran(*stepped(seq))
        server.close()
    last = ("stopped", "the server ended")
    assert events(tmp_path) == [("started", None), last, ("resumed", None), last]


def test_a_loop_whose_last_state_cannot_be_saved_has_ended_all_the_same(begun: Begun, tmp_path: Path) -> None:
    server = begun()
    server.ran(*stepped(1))
    server.end(MODEL, SUCCESS, nothing)
    server.close()
    assert events(tmp_path) == [("started", None), ("finished", None)]


@pytest.mark.parametrize("loads", [False, True])
def test_a_state_that_was_loaded_is_no_checkpoint_of_the_step_before(
    begun: Begun, records: Records, tmp_path: Path, loads: bool
) -> None:
    place = "checkpoints/s.train.0/training/mine-00000003"
    (tmp_path / place / STATE).mkdir(parents=True)
    records.checkpoints.put(
        Checkpoint(f"tinker://{MODEL}/weights/mine", MODEL, "ada", "training", place, NEW, 0.0, 0, {})
    )
    server = begun()
    server.ran(*stepped(1))
    if loads:
        body = {"model_id": MODEL, "seq_id": 2, "path": f"tinker://{MODEL}/weights/mine", "optimizer": True}
        server.ran(request(2, "load_weights", body), b"")
    server.ran(request(3, "save_weights", {"model_id": MODEL, "seq_id": 3, "path": "mine"}), b"")
    server.end(MODEL, SUCCESS, saving)
    server.close()
    found = [each.name for each in (tmp_path / "runs" / "s.train.0").glob("checkpoints/step_*")]
    assert found == ([] if loads else ["step_000001"])


def test_samples_beyond_the_bound_are_left_out_and_updates_are_not(
    begun: Begun, records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bodies of 2 bytes and answers of 0 where 5 bytes are held: two of three."""
    monkeypatch.setattr(loop, "MOST_HELD_BYTES", 5)
    records.samplers.put(Sampler("s:sample:0", "s", "ada", "tiny", None, "snapshots/a-b.train.0/00000012", MODEL))
    server = begun()
    server.ran(*stepped(1))
    for step in (2, 3):
        for seq in range(3):
            server.sampled([(request(seq, "sample", {}, "s:sample:0"), b"")])
        server.ran(*stepped(step))
    server.close()
    held = [("sample", 0), ("sample", 1)]
    assert kept(tmp_path) == {1: [("optim_step", 1)], 2: [*held, ("optim_step", 2)], 3: [*held, ("optim_step", 3)]}
    made = read_step(step_file(tmp_path / "runs" / "s.train.0", 3))
    assert {each.weights for each in made if each.kind == "sample"} == {12}


def test_samplers_that_cannot_be_read_raise_nothing(recorder: FlightRecorder, records: Records) -> None:
    records.samplers.put(Sampler("s:sample:0", "s", "ada", "tiny", None, "snapshots/by_hand", MODEL))
    recorder.ran(*stepped(1))
    recorder.sampled([(request(0, "sample", {}, "s:sample:0"), b"")])


def test_a_client_notices_nothing_of_a_record_that_cannot_be_opened(
    talk: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(RunDirectory, "__init__", refuse)

    async def before() -> str:
        async with talk() as it:
            model = await it.model(await it.session())
            await it.halved(model, 1)
            return str(model)

    async def after(model: str) -> None:
        async with talk(flight=flight()) as it:
            found = await it.halved(model, 2)  # the step before is made again, and told of
            assert found["metrics"] == {"grad_norm": 0.0}
            assert (await it.result("/unload_model", {"model_id": model}))["model_id"] == model
            assert model not in it.models.adapters

    run(after(run(before())))


def test_a_loop_whose_model_was_parked_goes_on_and_ends(talk: Open, tmp_path: Path) -> None:
    """It is parked between two updates, and when its client has been gone for long."""

    async def scene() -> str:
        async with talk(flight=flight()) as it:
            session = await it.session()
            model = await it.model(session)
            for seq in (1, 2):
                await it.halved(model, seq)
                it.service.worker.soon(lambda: it.service.worker.park(model))
            it.service.end_session(it.service.session("ada", session), {"type": "cancelled"})
            await it.model(await it.session())  # what was asked for before has been done
            return str(model)

    folder = tmp_path / "served" / "runs" / run(scene()).replace(":", ".")
    found = [json.loads(line)["event"] for line in (folder / "events.jsonl").read_text().splitlines()]
    assert found == ["started", "client", "stopped"]
    steps = [[each.seq for each in read_step(file)] for file in sorted((folder / "requests").iterdir())]
    assert steps == [[0, 1], [2]]


def test_a_model_that_was_unloaded_does_not_end_again_with_its_session(talk: Open, tmp_path: Path) -> None:
    async def scene() -> str:
        async with talk(flight=flight()) as it:
            session = await it.session()
            model = await it.model(session)
            await it.halved(model, 1)
            await it.result("/unload_model", {"model_id": model})
            it.service.end_session(it.service.session("ada", session), {"type": "success"})
            await it.model(await it.session())  # what was asked for before has been done
            assert [each for each in it.models.calls if each == ("create", model)] == [("create", model)]
            return str(model)

    name = run(scene()).replace(":", ".")
    lines = (tmp_path / "served" / "runs" / name / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["started", "client", "finished"]
