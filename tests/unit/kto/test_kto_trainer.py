"""KTO's rows, and its runs on a tiny model: where the reference comes from changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from nemorl.config.load import validate
from nemorl.errors import ConfigError, DataError
from nemorl.run import TrainResult
from nemorl_cli.console import Console
from nemorl_preference.kto import KTOConfig
from nemorl_preference.kto.rows import judged
from nemorl_rl.data.tokenizer import Tokenizer
from recorded_messages import Raises

LABELLED = [
    {"prompt": f"{a}+{b}=", "completion": str(a + b if good else 7 * b + 1), "label": good}
    for a in range(3)
    for b in range(2)
    for good in (True, False)
]
PAIRED = [{"prompt": f"{a}-1=", "chosen": str(a - 1), "rejected": "77"} for a in range(1, 5)]


def train(model: Path, run_dir: Path, *, resume: bool = False, **knobs: Any) -> TrainResult:
    config = KTOConfig(**{
        "model": str(model),
        "policy": {"init": "random", "optimizer": {"lr": 1e-2}},
        "batch_size": 4,
        "max_steps": 4,
        "validation": {"every": 1},
        "checkpoint": {"export": False},
        "cluster": {"gpus_per_node": 0},
        "run_dir": run_dir,
        **knobs,
    })  # fmt: skip
    data = {"train": LABELLED[:6] + PAIRED, "validation": LABELLED[6:]}
    result: TrainResult = config.build().fit(dataset=data, resume=resume, console=Console(quiet=True))
    return result


def numbers(result: TrainResult, step: int = 0) -> list[float]:
    names = ("train/loss", "train/reference_point", "validation/loss", "validation/rewards_desirable_mean")
    return [record[name] for record in result.history if record["step"] > step for name in names if name in record]


def test_precomputed_reference_and_reference_model_give_the_same_run(tiny_model: Path, tmp_path: Path) -> None:
    ahead = train(tiny_model, tmp_path / "ahead")
    model = train(tiny_model, tmp_path / "model", reference="model")
    assert numbers(ahead) == pytest.approx(numbers(model), abs=1e-5)
    assert ahead.history[0]["train/loss"] == pytest.approx(0.5, abs=1e-6)  # the policy is the reference
    assert any(record.get("train/reference_point", 0) > 0 for record in ahead.history)


@pytest.mark.slow
def test_a_continued_run_is_the_same_one(tiny_model: Path, tmp_path: Path) -> None:
    whole = train(tiny_model, tmp_path / "whole")
    train(tiny_model, tmp_path / "run", max_steps=2)
    continued = train(tiny_model, tmp_path / "run", resume=True)
    assert numbers(continued, 2) == numbers(whole, 2)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    found = [event for event in events if event["event"] == "reference_logprobs"]
    assert found[0]["read"] == 0
    assert found[1]["read"] == found[0]["computed"]


def test_a_row_is_one_labelled_response_or_a_pair_of_them(tiny_model: Path) -> None:
    tokenizer = Tokenizer.load(str(tiny_model))
    end = sorted(tokenizer.stop_token_ids)
    one, two, three = (tokenizer.encode(text) for text in ("1+1=", "2", "3"))
    expected = [(one, two + end, True), (one, three + end, False)]
    pair = judged({"prompt": "1+1=", "chosen": "2", "rejected": "3"}, tokenizer)
    single = [
        *judged({"prompt": "1+1=", "response": "2", "label": True}, tokenizer),
        *judged({"prompt": "1+1=", "completion": "3", "label": 0}, tokenizer),
    ]
    for found in (pair, single):
        assert [(answer.prompt, answer.response, answer.desirable) for answer in found] == expected


@pytest.mark.parametrize("label", [None, "good", 2, 0.5])
def test_what_is_no_label_is_refused(tiny_model: Path, label: object, raises: Raises) -> None:
    with raises(DataError, repr(label)):
        judged({"prompt": "1+1=", "response": "2", "label": label}, Tokenizer.load(str(tiny_model)))


@pytest.mark.parametrize(
    ("knobs", "path"),
    [
        ({"batch_size": 1}, "batch_size"),
        ({"beta": 0}, "beta"),
        ({"desirable_weight": 0.0, "undesirable_weight": 0.0}, "desirable_weight"),
    ],
)
def test_a_mistake_is_named(knobs: dict[str, Any], path: str, raises: Raises) -> None:
    with raises(ConfigError, path=path):
        validate(KTOConfig, {"model": "m", **knobs})
