"""Rollout records of whole runs: what is in them, when they are on disk, and runs that go back."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import nemorl
import pytest
from nemorl.errors import DataError
from nemorl_cli.console import Console
from nemorl_cli.report.records import writing
from nemorl_cli.report.records.reading import FOLDER, read_records, record_files
from nemorl_cli.report.records.table import table_of
from nemorl_cli.report.records.tokens import token_texts
from nemorl_rl.callbacks import Callback
from record_files import rows_of

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(6)]


class StopAfterTwo(Callback):
    def on_step_end(self, trainer: Any, step: int) -> None:
        if step == 2:
            trainer.stop("for the test")


def reward(prompt: str, response: str) -> float:
    return float(sum(map(ord, response)) % 7)


def fit(
    model: Path,
    run_dir: Path,
    grade: Any = reward,
    *,
    from_step: int | None = None,
    callbacks: Any = (),
    **options: Any,
) -> None:
    data = {
        "algorithm": "grpo",
        "model": str(model),
        "run_dir": str(run_dir),
        "num_prompts_per_step": 2,
        "num_generations_per_prompt": 4,
        "max_steps": 3,
        "kl_penalty": 0.1,
        "validation": {"every": 2},
        "checkpoint": {"every": 1, "keep_last": 9},
        "generation": {"max_new_tokens": 4},
        "policy": {"init": "random", "max_sequence_tokens": 32, "optimizer": {"lr": 1e-3}},
        **options,
    }
    trainer = nemorl.load_config(data).build()
    console = Console(quiet=True)
    trainer.fit(ROWS, grade, val_dataset=ROWS[:3], console=console, from_step=from_step, callbacks=callbacks)


TIMES = ("run", "time", "step_time", "began_s", "ended_s", "weights_proven")
"""Columns in which two equal runs differ: when a receipt is due depends on the clock, too."""


def told(run_dir: Path) -> list[dict[str, Any]]:
    return [{name: row[name] for name in row if name not in TIMES} for row in read_records(run_dir)]


@pytest.mark.slow
def test_a_run_that_goes_back_records_no_step_twice(tiny_model: Path, tmp_path: Path) -> None:
    fit(tiny_model, tmp_path / "whole")
    fit(tiny_model, tmp_path / "again")
    fit(tiny_model, tmp_path / "again", from_step=1, callbacks=[StopAfterTwo()])
    whole = told(tmp_path / "whole")
    assert {(row["split"], row["step"]) for row in whole} == {
        ("train", 1), ("train", 2), ("train", 3), ("validation", 2), ("validation", 3)
    }  # fmt: skip
    assert told(tmp_path / "again") == [row for row in whole if row["step"] <= 2]
    texts = token_texts(tmp_path / "again/records")
    for row in read_records(tmp_path / "again", columns=["turns", "sequences", "began_s", "ended_s"]):
        for turn in row["turns"]:
            tokens = row["sequences"][turn["sequence"]]["token_ids"][turn["start"] : turn["stop"]]
            assert turn["text"] in "".join(texts[token] for token in tokens)  # which has what ends a response, too
        moments = [at for turn in row["turns"] for at in (turn["began_s"], turn["ended_s"]) if at is not None]
        assert moments == sorted([row["began_s"], *moments, row["ended_s"]])[1:-1]
        assert len(moments) == 2
    (aside,) = (tmp_path / "again/set_aside").iterdir()
    assert told(aside) == whole


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.slow
def test_the_trainers_logprobs_are_measured_where_asked_for(minibatches: int, tiny_model: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"max_steps": 2, "num_minibatches": minibatches}
    fit(tiny_model, tmp_path / "plain", **changes)
    fit(tiny_model, tmp_path / "measured", records={"trainer_logprobs": True}, **changes)
    measured, plain = ([{**row, "kl": None} for row in told(tmp_path / name)] for name in ("measured", "plain"))
    assert measured == plain  # to be looked at changes nothing; but the KL is against the trainer's log-probs then
    for row in rows_of(tmp_path / "measured", step=2):
        (one,) = row["sequences"]
        chosen = [place for place, keep in enumerate(one["mask"]) if keep]
        # The sampler has the trainer's weights: before the update they agree, after it they do not.
        sampled, old, policy = ([one[name][place] for place in chosen] for name in
                                ("generation_logprobs", "old_logprobs", "policy_logprobs"))  # fmt: skip
        assert old == pytest.approx(sampled, abs=1e-4)
        assert policy != pytest.approx(old, abs=1e-4)


def test_a_checkpoint_comes_after_the_records_of_its_step(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Look(Callback):
        def __init__(self) -> None:
            self.seen: list[list[int]] = []

        def on_checkpoint_saved(self, trainer: Any, step: int, path: Path) -> None:
            self.seen.append([file.step for file in record_files(trainer.directory.path / FOLDER, split="train")])

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.5)  # longer than such a step
        return table_of(*arguments)

    monkeypatch.setattr(writing, "table_of", slowly)
    look = Look()
    fit(tiny_model, tmp_path / "run", callbacks=[look], max_steps=2, validation={"every": 0}, kl_penalty=0.0)
    assert look.seen == [[1], [1, 2]]


def test_without_a_budget_nothing_is_recorded(tiny_model: Path, tmp_path: Path) -> None:
    fit(tiny_model, tmp_path / "run", records={"max_gib": 0}, max_steps=1)
    assert not (tmp_path / "run" / FOLDER).exists()


@pytest.mark.slow
def test_groups_of_equal_rewards_are_recorded_as_such(tiny_model: Path, tmp_path: Path) -> None:
    def grade(prompt: str, response: str) -> float:
        return float(ord(response[:1] or "0") % 2) if prompt.startswith(("0", "1", "2")) else 0.0

    data = {"dynamic_sampling": True, "rollouts": {"max_batches_per_step": 9}, "num_generations_per_prompt": 8}
    fit(tiny_model, tmp_path / "run", grade, max_steps=2, **data)
    why = [(record["filtered"], record["reward"]) for record in read_records(tmp_path / "run", split="train")]
    assert {reason for reason, _ in why} == {None, "equal_rewards"}
    assert {value for reason, value in why if reason == "equal_rewards"} == {0.0}


@pytest.mark.slow
def test_a_run_that_fails_for_want_of_groups_records_those_that_nobody_wanted(tiny_model: Path, tmp_path: Path) -> None:
    rollouts = {"mode": "async", "max_staleness": 0, "max_batches_per_step": 2}
    data = {"dynamic_sampling": True, "rollouts": rollouts}
    with pytest.raises(DataError):
        fit(tiny_model, tmp_path / "run", lambda prompt, response: 0.0, **data)
    rows = list(read_records(tmp_path / "run", split="train"))
    assert {(row["step"], row["filtered"], row["reward"]) for row in rows} == {(1, "equal_rewards", 0.0)}
    assert len(rows) == 2 * 2 * 4  # the two batches that the step may begin, each of two groups of four responses
