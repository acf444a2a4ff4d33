"""A client's loop as a run: what a step is said to have learned, alerts, and a disk that refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nemorl.config import GenerationConfig, PolicyConfig
from nemorl.config.load import validate
from nemorl.metrics import values
from nemorl_agents.tinker.flight import logbook
from nemorl_agents.tinker.flight.config import ClientLoopConfig
from nemorl_agents.tinker.flight.learned import learned
from nemorl_agents.tinker.flight.logbook import Logbook
from nemorl_agents.tinker.flight.operations import FOLDER, Operation, last_uses, read_step, step_file, write_step
from nemorl_agents.tinker.flight.recorder import FlightRecorder, log
from nemorl_agents.tinker.journal import Journal
from nemorl_agents.tinker.models import Passed
from nemorl_agents.tinker.records import Model, Records, Request
from nemorl_agents.tinker.wire.messages import messages
from nemorl_agents.tinker.wire.outputs import decoded_pass, encoded_pass

POLICY = PolicyConfig(model_name="tiny", lora={"rank": 8})  # type: ignore[arg-type]
NEW = {"base_model": "tiny", "rank": 4, "seed": 1, "train_mlp": True, "train_attn": True, "train_unembed": True}


def text(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def passed(loss: str, *data: dict[str, list[float]], logprobs: list[list[float]]) -> Operation:
    """A pass over data given by ``ids`` and the loss's fields."""
    pb = messages()
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn=loss)
    for each in data:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(each["ids"][:-1], dtype=np.int32).tobytes()
        for name, numbers in {**each, "target_tokens": each["ids"][1:]}.items():
            if name == "ids":
                continue
            whole = name == "target_tokens"
            field = datum.loss_fn_inputs[name]
            field.dense = np.array(numbers, dtype=np.int64 if whole else np.float32).tobytes()
            field.dtype = pb.DTYPE_INT64 if whole else pb.DTYPE_FLOAT32
            field.shape.append(len(numbers))
    answer = encoded_pass(Passed([torch.tensor(each) for each in logprobs], {"loss:sum": 2.5}))
    return Operation("forward_backward", "m:1", 1, message.SerializeToString(), answer)


def stepped(seq: int = 2, **metrics: float) -> Operation:
    body = {"model_id": "m", "seq_id": seq, "adam_params": {"learning_rate": 0.25}, "type": "optim_step"}
    return Operation(
        "optim_step", f"m:{seq}", seq, json.dumps(body).encode(), json.dumps({"metrics": metrics}).encode()
    )


def test_answers_of_passes_are_read_back() -> None:
    """[n] and [n, K] log-probs, in the order in which they were sent."""
    logprobs = [torch.tensor([-1.0, -2.0]), torch.tensor([[-3.0, -4.0]]), torch.tensor([-5.0])]
    found = decoded_pass(encoded_pass(Passed(logprobs, {"loss:sum": 1.5})))
    assert found.metrics == {"loss:sum": 1.5}
    assert all(torch.equal(*pair) for pair in zip(found.logprobs, logprobs, strict=True))


def test_a_step_in_numbers() -> None:
    """Two answers to 5 6 with advantages 1 and -1, one to 5. The trainer is 0.5 nats above the client's number once."""
    data = [
        {"ids": [5, 6, 7], "logprobs": [0.0, -1.0], "advantages": [0.0, 1.0]},
        {"ids": [5, 8], "logprobs": [-2.0], "advantages": [3.0]},
        {"ids": [5, 6, 9], "logprobs": [0.0, -4.0], "advantages": [0.0, -1.0]},
    ]
    logprobs = [[-0.25, -0.5], [-2.0], [-0.25, -4.0]]
    made = [passed("importance_sampling", *data, logprobs=logprobs), stepped(grad_norm=2.0)]
    found = learned(made, step=3, decode=text)
    assert [sample.prompt.token_ids for sample in found.samples] == [(5, 6), (5, 6), (5,)]  # one prompt is one group
    assert [sample.response for sample in found.samples] == ["7", "9", "8"]
    assert [sample.score.reward for sample in found.samples] == [1.0, -1.0, 3.0]
    assert found.samples[0].weight_versions == (2,)
    assert found.batch["old_logprobs"].tolist() == [0, -0.25, -0.5, 0, -0.25, -4.0, 0, -2.0]
    assert found.batch.loss_weights.tolist() == [0, 0, 1, 0, 0, 1, 0, 1]
    numbers = values(found.metrics)
    assert numbers["loss"] == 2.5
    assert numbers["lr"] == 0.25
    assert numbers["grad_norm"] == 2.0
    assert (numbers["num_samples"], numbers["total_num_tokens"], numbers["passes"]) == (3, 8, 1)
    assert numbers["advantages/mean"] == 1.0
    assert numbers["token_mult_prob_error"] == pytest.approx((np.exp(0.5) + 2) / 3)


def test_weights_of_cross_entropy_say_what_is_learnt() -> None:
    """The reward is the mean log-prob of learnt tokens, here -1 and -3."""
    datum = {"ids": [5, 6, 7, 8], "weights": [0.0, 0.5, -2.0]}
    found = learned([passed("cross_entropy", datum, logprobs=[[-9.0, -1.0, -3.0]]), stepped()], 1, text)
    assert found.batch.mask.tolist() == [False, False, True, True]
    assert found.batch.loss_weights.tolist() == [0, 0, 0.5, -2.0]
    assert found.samples[0].score.reward == -2.0
    assert "token_mult_prob_error" not in values(found.metrics)


def test_a_position_with_several_targets_is_learnt_where_any_is() -> None:
    """[2, 2] targets. At the first position the weight is on the second target alone."""
    pb = messages()
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([5, 6], dtype=np.int32).tobytes()
    targets, weights = np.array([[6, 1], [7, 1]]), np.array([[0, 1], [0.25, 0.75]], dtype=np.float32)
    for name, numbers, kind in (("target_tokens", targets, pb.DTYPE_INT64), ("weights", weights, pb.DTYPE_FLOAT32)):
        field = datum.loss_fn_inputs[name]
        field.dense, field.dtype = numbers.tobytes(), kind
        field.shape.extend([2, 2])
    answer = encoded_pass(Passed([torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])], {"loss:sum": 2.5}))
    made = Operation("forward_backward", "m:1", 1, message.SerializeToString(), answer)
    batch = learned([made, stepped()], 1, text).batch
    assert batch.mask.tolist() == [False, True, True]
    assert batch.loss_weights.tolist() == [0, 0, 0.25]
    assert batch["old_logprobs"].tolist() == [0, -1, -3]


def test_a_step_without_a_pass_is_a_step() -> None:
    found = learned([stepped(grad_norm=0.0)], 1, text)
    assert len(found.samples) == 0
    assert values(found.metrics)["loss"] == 0


def test_files_of_steps_hold_bytes(tmp_path: Path) -> None:
    made = [Operation("sample", "s:0", 0, b"\x00\xff", b"", call=2, weights=7), stepped()]
    write_step(step_file(tmp_path, 1), made)
    assert read_step(step_file(tmp_path, 1)) == made


def test_weights_are_known_by_the_last_step_that_sampled_from_them(tmp_path: Path) -> None:
    """A replay needs them no longer. 0 is of what is no sample."""
    drawn = [Operation("sample", f"s:{number}", number, b"", b"", call=1, weights=3 + number) for number in range(2)]
    for step, made in enumerate([drawn, drawn[:1], []], start=1):
        write_step(step_file(tmp_path, step), [*made, stepped()])
    assert last_uses(tmp_path / FOLDER) == {3: 2, 4: 1}


def config(folder: Path) -> ClientLoopConfig:
    fields = {
        "policy": POLICY.model_dump(mode="json"),
        "generation": GenerationConfig().model_dump(mode="json"),
        "adapter": {"rank": 4},
        "data": {"name": "client_requests", "path": str(folder / "requests")},
    }
    return validate(ClientLoopConfig, fields, source="test")


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_alerts_watch_a_clients_loop_too(tmp_path: Path) -> None:
    """``updates_skipped`` holds after three steps whose update was skipped; only the client can end its loop."""
    folder = tmp_path / "run"
    book = Logbook(folder, config(folder), text, lambda _: None)
    for number in range(3):
        made = [
            passed("cross_entropy", {"ids": [5, 6], "weights": [1.0]}, logprobs=[[-1.0]]),
            stepped(2 * number + 2, skipped_updates=1.0),
        ]
        book.tell(book.keep(made))
    book.end({"type": "client_finished", "reason": {"type": "errored"}})
    alerts = [event for event in events(folder) if event["event"] == "alert"]
    assert [(event["rule"], event["step"]) for event in alerts] == [("updates_skipped", 3)]
    assert events(folder)[-1] | {"time": 0} == {"time": 0, "event": "stopped", "step": 3, "reason": "errored"}


def test_what_a_kill_kept_from_the_logs_is_made_up(tmp_path: Path) -> None:
    """Two steps were kept, and one was told."""
    folder = tmp_path / "run"
    book = Logbook(folder, config(folder), text, lambda _: None)
    steps = [[stepped(1, grad_norm=1.0)], [stepped(2, grad_norm=2.0)]]
    for made in steps:
        book.keep(made)
    book.tell(1)
    book.close("the server ended")
    book = Logbook(folder, config(folder), text, lambda _: None)
    assert book.step == 2
    book.close("the server ended")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["train/grad_norm"]) for line in lines] == [(1, 1.0), (2, 2.0)]
    assert ["timing/train/total_step_time" in line for line in lines] == [True, False]  # nobody knows how long it took


def test_a_disk_that_refuses_costs_the_record_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = Records(Journal(tmp_path))
    for name in ("a", "b"):
        records.models.put(Model(f"s:train:{name}", "s", "ada", NEW, {}, 0.0))
    recorder = FlightRecorder(POLICY, GenerationConfig(), text)
    recorder.open(tmp_path, records)

    def ran(model: str, seq: int) -> None:
        made = stepped(seq)
        scope = f"s:train:{model}"
        recorder.ran(Request(f"{scope}:{seq}", scope, seq, "s", "ada", "optim_step", "", made.body), made.answer)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    warnings: list[str] = []
    monkeypatch.setattr(log, "warning", lambda text, *about: warnings.append(text % about))
    ran("a", 1)
    with monkeypatch.context() as patch:
        patch.setattr(logbook, "write_step", refuse)
        ran("a", 2)
    ran("a", 3)
    ran("b", 1)
    recorder.close()
    kept = {
        (folder.name[-1], *(file.name for file in (folder / "requests").iterdir()))
        for folder in (tmp_path / "runs").iterdir()
    }
    assert kept == {("a", "step_000001.parquet"), ("b", "step_000001.parquet")}
    assert [said for said in warnings if "s:train:a" in said] == warnings[:1]
