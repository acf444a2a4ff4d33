"""Receipts say what has happened to which tensor, and a run does not learn from weights that nobody was sent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nemorl
import pyarrow.parquet as pq
import pytest
from nemorl.errors import WeightsUnprovenError
from nemorl.weights import Digest, Digests, WeightHandle
from nemorl_dtensor.generation import HFGeneration
from nemorl_rl.config import WeightsConfig
from nemorl_rl.serving.proving import WeightReceipts
from nemorl_rl.serving.receipts import PROBE, Probe, Receipt, Sent, compare
from nemorl_testing.models import tiny_model
from pydantic import ValidationError
from recorded_messages import Raises


def of(value: int, dtype: str = "float32") -> Digest:
    return Digest(dtype, (2, 2), value)


OLD = Sent(3, {"q": of(1), "k": of(2), "expert": of(3), "head": of(4)})
NEW = Sent(4, {"q": of(11), "k": of(12), "expert": of(13), "head": of(14)})


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ({"k": None}, {"k": "dropped"}),
        ({"expert": of(3)}, {"expert": "stale: it is as in version 3"}),
        ({"q": of(12), "k": of(11)}, {"q": "swapped with k", "k": "swapped with q"}),
        ({"head": of(12)}, {"head": "it holds what was sent as k"}),
        ({"q": of(99)}, {"q": "truncated"}),
        ({"q": of(11, "bfloat16")}, {"q": "held as bfloat16 [2, 2]"}),
        ({}, {}),
    ],
)
def test_a_fault_is_named_for_what_it_likely_is(held: Mapping[str, Digest | None], said: Mapping[str, str]) -> None:
    answer = {name: found for name, found in {**NEW.digests, **held}.items() if found is not None}
    receipt = compare(NEW, [answer], [OLD])
    assert receipt.faults.keys() == said.keys()
    assert all(receipt.faults[name].startswith(words) for name, words in said.items())
    assert receipt.proven == 4 - len(said)
    assert receipt.is_proven is (not said)


def test_one_replica_that_missed_the_update_is_enough() -> None:
    receipt = compare(NEW, [NEW.digests, OLD.digests], [OLD])
    assert receipt.proven == 0
    assert all(what.endswith("(replica 1)") for what in receipt.faults.values())


def test_what_cannot_be_compared_proves_nothing() -> None:
    rounded = {**NEW.digests, "q": "not comparable: quantised"}
    receipt = compare(NEW, [rounded])
    assert (receipt.is_proven, receipt.proven, dict(receipt.incomparable)) == (None, 3, {"q": rounded["q"]})
    assert compare(NEW, []).is_proven is None
    assert Receipt(4, incomparable={"q": "not comparable: quantised"}, probe_gap=0.1).is_proven is True


def test_a_message_names_five_and_counts_the_others() -> None:
    sent = Sent(1, {f"layer.{number}": of(number) for number in range(8)})
    told = compare(sent, [{}]).complaint()
    assert [name for name in sent.digests if name in told] == [f"layer.{number}" for number in range(5)]
    assert told.endswith("3 more")


def test_a_probe_is_stuck_when_only_the_trainer_has_moved() -> None:
    before = Probe((-1.0, -2.0), (-1.1, -2.0))
    assert before.gap == pytest.approx(0.05)  # (0.1 + 0) / 2
    assert Probe((-1.5, -2.0), (-1.1, -2.0)).is_stuck(before)
    assert not Probe((-1.5, -2.0), (-1.4, -2.0)).is_stuck(before)
    assert not Probe((-1.0, -2.0), (-1.1, -2.0)).is_stuck(before), "nothing was learnt"
    assert Probe((-1.0,), (float("nan"),)).gap == float("inf")


@dataclass
class Engines:
    """What the driver knows of engines."""

    answers: Any = ()
    answered_s: float = 1.0
    lives: int = 0
    asked: list[bool] = field(default_factory=list)

    def update_weights(self, handle: WeightHandle) -> int:
        self.asked.append(handle.digests is not None)
        self.answers = [dict(handle.digests)] if handle.digests is not None else ()
        return 1


def test_receipts_take_no_more_than_their_share_of_the_time() -> None:
    engines = Engines()
    receipts = WeightReceipts(
        WeightsConfig(share=0.5), engines, None, None, can_answer=True, precision="float32", warn=print  # type: ignore[arg-type]
    )  # fmt: skip

    def sync(version: int) -> Receipt | None:
        digests = Digests(NEW.digests)
        digests.seconds = 1.0
        return receipts.update(lambda asked: WeightHandle("t", version, None, digests=digests if asked else None))[1]

    def spent() -> float:
        return receipts._receipt_s / receipts._sync_s

    assert sync(1) is not None, "the first always has one"
    receipts._sync_s = 3.0
    assert spent() > 0.5  # (1 + 1) / 3
    assert sync(2) is None
    receipts._sync_s = 5.0
    assert sync(3) is not None  # 2 / 5
    engines.lives += 1
    assert sync(4) is not None, "an engine was replaced"
    assert engines.asked == [True, False, True, True]
    assert (receipts.verdict((1, 3)), receipts.verdict((1, 2)), receipts.verdict(())) == (True, None, None)


def run(folder: Path, **weights: Any) -> Path:
    config = nemorl.GRPOConfig(
        model=str(tiny_model()),
        num_prompts_per_step=2,
        num_generations_per_prompt=2,
        max_steps=2,
        generation={"max_new_tokens": 4},
        run_dir=folder / "run",
        policy={"optimizer": {"lr": 1e-2}},
        weights={"share": 1.0, **weights},
    )
    rows = [{"prompt": "1+1=", "answer": "2"}] * 8
    nemorl.GRPOTrainer(config).fit(rows, reward_fn=lambda prompt, response: float(len(set(response))))
    return folder / "run"


def events(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["event"] == "weight_receipt"]


def proven(path: Path) -> set[bool | None]:
    files = sorted((path / "records").glob("train/*.parquet"))
    return {row for file in files for row in pq.read_table(file)["weights_proven"].to_pylist()}


@pytest.mark.slow
def test_a_run_proves_each_sync_in_its_log_its_metrics_and_its_records(tmp_path: Path) -> None:
    path = run(tmp_path, receipts="probe")
    assert [(event["version"], event["is_proven"]) for event in events(path)] == [(0, True), (1, True), (2, True)]
    assert all(event["proven"] == 26 and event["probe_gap"] < 1e-4 for event in events(path))
    logged = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/weights_proven"] for row in logged if "train/weights_proven" in row] == [1.0, 1.0]
    assert proven(path) == {True}


class KeepsItsFirstHead(HFGeneration):
    """Its last layer's output matrix stays as it was first."""

    kept: Any = None

    def update_weights(self, handle: WeightHandle, version: int) -> int:
        read = super().update_weights(handle, version)
        parameter = self._versions.newest.model._model.get_parameter(STALE)
        if self.kept is None:
            self.kept = parameter.detach().clone()
        self._versions.newest.model._model.get_submodule(STALE.rpartition(".")[0]).weight.data = self.kept
        return read


STALE = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.slow
@pytest.mark.parametrize("on_unproven", ["refuse", "warn"])
def test_weights_that_are_not_what_was_sent_are_refused_or_flagged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: Raises, on_unproven: str
) -> None:
    monkeypatch.setattr("nemorl_dtensor.generation.HFGeneration", KeepsItsFirstHead)
    if on_unproven == "refuse":
        with raises(WeightsUnprovenError, STALE, 1):
            run(tmp_path, on_unproven=on_unproven)
        assert proven(tmp_path / "run") == {True}, "nothing of version 1 was learnt from"
        return
    path = run(tmp_path, on_unproven=on_unproven)
    assert [event["is_proven"] for event in events(path)] == [True, False, False]
    assert [event["faults"] for event in events(path)[1:]] == [{STALE: "stale: it is as in version 0"}] * 2
    assert proven(path) == {True, False}


@pytest.mark.slow
def test_a_probe_finds_what_no_digest_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: Raises) -> None:
    class Silent(KeepsItsFirstHead):
        def held_digests(self, names: Any) -> Any:
            return dict.fromkeys(names, "not comparable: quantised")

    monkeypatch.setattr("nemorl_dtensor.generation.HFGeneration", Silent)
    with raises(WeightsUnprovenError, PROBE):
        run(tmp_path, probe_tolerance=1e-5)


def test_an_engine_that_cannot_answer_is_not_asked_for_digests(raises: Raises) -> None:
    server = {"name": "server", "urls": ["http://127.0.0.1:1"]}
    with raises(ValidationError, "weights.receipts"):
        nemorl.GRPOConfig(model="m", generation={"backend": server}, weights={"receipts": "digests"})
