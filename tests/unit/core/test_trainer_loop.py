"""The loop on a tiny model: what a run leaves behind, how it stops, and that a continued run equals an unbroken one."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nemorl
import numpy as np
import pytest
import torch
from nemorl.base.files.checkpoints import Checkpoint
from nemorl.errors import CheckpointError, ConfigError, ForeignError, UsageError
from nemorl.storage.checkpoints import CheckpointManager
from nemorl.trainer import BaseTrainer, TrainResult
from nemorl_cli.console import Console
from nemorl_cli.report.records.reading import read_records
from nemorl_rl.callbacks import Callback
from nemorl_rl.data.mixtures import Mixture
from recorded_messages import Raises
from safetensors.torch import load_file

ROWS = [{"prompt": f"{i}+1=", "response": str(i + 1), "answer": str(i + 1)} for i in range(6)]
ALGORITHMS = {
    "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "generation": {"max_new_tokens": 3}},
    "grpo off-policy": {
        "num_prompts_per_step": 2,
        "num_generations_per_prompt": 2,
        "num_minibatches": 2,
        "num_epochs_per_rollout": 2,
        "generation": {"max_new_tokens": 3},
    },
    "sft": {"batch_size": 2, "policy": {"schedule": {"kind": "cosine", "warmup_steps": 1}}},
}


def reward(prompt: str, response: str) -> float:
    return float(sum(map(ord, response)) % 7)


def config(name: str, model: Path, run_dir: Path, **changes: Any) -> Any:
    base = ALGORITHMS[name]
    return nemorl.load_config(
        {
            "algorithm": name.partition(" ")[0],
            "model": str(model),
            "run_dir": str(run_dir),
            "max_steps": 3,
            "checkpoint": {"every": 0},
            "validation": {"every": 0, "max_samples": 3},
            **base,
            "policy": {
                "init": "random",
                "max_sequence_tokens": 32,
                "optimizer": {"lr": 1e-3},
                **base.get("policy", {}),
            },
            **changes,
        }
    )


def fit(settings: Any, **options: Any) -> TrainResult:
    trainer = settings.build()
    given = {"reward_fn": reward} if settings.sampler is not None else {}
    return trainer.fit(ROWS, console=Console(quiet=True), **{"val_dataset": ROWS, **given, **options})


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def measured(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    return [
        {
            name: value
            for name, value in record.items()
            if not name.startswith(("time", "timing", "performance", "system"))
        }
        for record in lines(run_dir / "metrics.jsonl")
    ]


@pytest.mark.slow
def test_a_checkpoint_without_optimizer_is_smaller_and_says_so_when_it_is_resumed(
    tiny_model: Path, tmp_path: Path
) -> None:
    def run(folder: str, whole: bool, **options: Any) -> TrainResult:
        checkpoint = {"every": 0, "save_optimizer": whole, "export": False}
        return fit(config("sft", tiny_model, tmp_path / folder, checkpoint=checkpoint, **options), resume=True)

    run("whole", True)
    run("bare", False)
    sizes = [
        sum(file.stat().st_size for file in (tmp_path / name / "checkpoints").rglob("policy/model/*"))
        for name in ("whole", "bare")
    ]
    assert sizes[0] == sizes[1] > 0
    assert any((tmp_path / "whole/checkpoints/step_000003/policy/optimizer").iterdir())
    assert not (tmp_path / "bare/checkpoints/step_000003/policy/optimizer").exists()

    assert run("whole", True, max_steps=4).steps == run("bare", False, max_steps=4).steps == 4
    said = {name: (tmp_path / name / "events.jsonl").read_text() for name in ("whole", "bare")}
    assert "the optimizer starts anew" in said["bare"]
    assert "the optimizer starts anew" not in said["whole"]


class StopAfter(Callback):
    def __init__(self, step: int) -> None:
        self.at = step

    def on_step_end(self, trainer: BaseTrainer[Any], step: int) -> None:
        if step == self.at:
            trainer.stop("for the test")


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.slow
def test_a_resumed_run_equals_the_uninterrupted_one(name: str, tiny_model: Path, tmp_path: Path) -> None:
    whole = fit(config(name, tiny_model, tmp_path / "whole"))
    broken = config(name, tiny_model, tmp_path / "broken")
    first = fit(broken, callbacks=[StopAfter(1)])
    assert (first.steps, first.stopped) == (1, "for the test")
    second = fit(broken, resume=True)
    assert (second.steps, second.stopped) == (3, None)
    assert measured(tmp_path / "broken") == measured(tmp_path / "whole")
    weights = [load_file(result.run_dir / "model/model.safetensors") for result in (whole, second)]
    assert all(weights[0][key].equal(weights[1][key]) for key in weights[0])
    receipt = ["weight_receipt"] if name.startswith("grpo") else []  # of the first sync of each process
    assert [line["event"] for line in lines(tmp_path / "broken/events.jsonl")] == [
        *("started", *receipt, "checkpoint", "stopped"),
        *("resumed", *receipt, "checkpoint", "finished"),
    ]


@pytest.mark.slow
def test_a_resumed_run_of_a_mixture_equals_the_uninterrupted_one(tiny_model: Path, tmp_path: Path) -> None:
    data = Mixture([ROWS[:2], ROWS[2:]], [2, 1])
    runs = {name: config("sft", tiny_model, tmp_path / name, max_steps=5) for name in ("whole", "broken")}
    trainers = [runs[name].build() for name in ("whole", "broken", "broken")]
    options: list[dict[str, Any]] = [{}, {"callbacks": [StopAfter(2)]}, {"resume": True}]
    for trainer, given in zip(trainers, options, strict=True):
        trainer.fit(data, console=Console(quiet=True), **given)
    assert measured(tmp_path / "broken") == measured(tmp_path / "whole")
    assert [trainer.data.state_dict()["position"] for trainer in trainers] == [10, 4, 10]


@pytest.mark.slow
def test_steps_after_the_last_checkpoint_are_done_again(tiny_model: Path, tmp_path: Path, raises: Raises) -> None:
    class Crash(StopAfter):
        essential = True

        def on_step_end(self, trainer: BaseTrainer[Any], step: int) -> None:
            if step == self.at:
                raise MemoryError("gone")

    fit(config("sft", tiny_model, tmp_path / "whole", checkpoint={"every": 1}))
    broken = config("sft", tiny_model, tmp_path / "broken", checkpoint={"every": 1})
    with raises(ForeignError, "MemoryError"):
        fit(broken, callbacks=[Crash(2)])
    assert [record["step"] for record in measured(tmp_path / "broken")] == [1, 2]
    fit(broken, resume=True)
    assert measured(tmp_path / "broken") == measured(tmp_path / "whole")


@pytest.mark.slow
def test_a_finished_run_can_be_prolonged(tiny_model: Path, tmp_path: Path) -> None:
    fit(config("sft", tiny_model, tmp_path / "run", max_steps=1))
    result = fit(config("sft", tiny_model, tmp_path / "run", max_steps=2), resume=True)
    assert result.steps == 2


def test_resuming_a_finished_run_changes_nothing(tiny_model: Path, tmp_path: Path) -> None:
    settings = config("sft", tiny_model, tmp_path / "run")
    fit(settings)
    before = measured(tmp_path / "run")
    assert fit(settings, resume=True).steps == 3
    assert measured(tmp_path / "run") == before


@pytest.mark.slow
def test_a_run_continues_from_the_newest_checkpoint_that_is_sound(tiny_model: Path, tmp_path: Path) -> None:
    settings = config("sft", tiny_model, tmp_path / "run", checkpoint={"every": 1, "keep_last": 9})
    fit(settings)
    whole = load_file(tmp_path / "run/model/model.safetensors")
    records = measured(tmp_path / "run")
    newest = tmp_path / "run/checkpoints/step_000003"
    (newest / "trainer.json").write_text((newest / "trainer.json").read_text().replace('"step": 3', '"step": 2'))
    oldest = tmp_path / "run/checkpoints/step_000001/manifest.json"
    oldest.write_text(oldest.read_text()[:40])

    assert fit(settings, resume=True).steps == 3
    events = lines(tmp_path / "run/events.jsonl")
    resumed = [event["event"] for event in events].index("resumed")
    warnings = [event["message"] for event in events[resumed:] if event["event"] == "warning"]
    assert "step_000001 has no readable manifest" in warnings[0]
    assert "trainer.json does not match its checksum" in warnings[1]
    aside = tmp_path / "run/set_aside/001_from_step_2"
    assert warnings[2].endswith(f"from step 2; step_000001, step_000003 and the logs so far are in {aside}")
    assert sorted(path.name for path in (aside / "checkpoints").iterdir()) == ["step_000001", "step_000003"]
    assert measured(aside) == measured(tmp_path / "run") == records
    again = load_file(tmp_path / "run/model/model.safetensors")
    assert all(again[name].equal(whole[name]) for name in whole)
    fit(settings, resume=True)  # all is well: nothing more is set aside
    assert [path.name for path in aside.parent.iterdir()] == [aside.name]


def test_a_run_without_a_sound_checkpoint_is_not_started_again(
    tiny_model: Path, tmp_path: Path, raises: Raises
) -> None:
    settings = config("sft", tiny_model, tmp_path / "run")
    fit(settings, callbacks=[StopAfter(1)])
    before = measured(tmp_path / "run")
    (tmp_path / "run/checkpoints/step_000001/manifest.json").unlink()
    with raises(CheckpointError):
        fit(settings, resume=True)
    assert measured(tmp_path / "run") == before


class Odd(Callback):
    """Logs what is no number of Python's, under names that a record has itself."""

    def on_log(self, metrics: dict[str, Any]) -> None:
        metrics |= {"train/odd": np.float32(0.5), "train/count": np.int64(3), "train/flag": True, "step": 99, "time": 0}
        metrics |= {"train/none": None, "train/text": "much", "train/many": torch.ones(2), "train/huge": 10**400}


def test_what_hooks_log_ends_no_run_and_hides_no_step(tiny_model: Path, tmp_path: Path) -> None:
    settings = config("sft", tiny_model, tmp_path / "run", checkpoint={"every": 1})
    fit(settings, callbacks=[Odd(), StopAfter(2)])
    assert fit(settings, callbacks=[Odd()], resume=True).steps == 3
    records = [record for record in lines(tmp_path / "run/metrics.jsonl") if "train/loss" in record]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert all(record["time"] > 0 for record in records)
    assert {(record["train/odd"], record["train/count"], record["train/flag"]) for record in records} == {
        (0.5, 3.0, 1.0)
    }
    assert not {"train/none", "train/text", "train/many", "train/huge"} & records[0].keys()


def test_what_a_run_without_its_checkpoints_has_logged_is_kept(tiny_model: Path, tmp_path: Path) -> None:
    settings = config("sft", tiny_model, tmp_path / "run", checkpoint={"every": 1})
    fit(settings)
    before = measured(tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints")  # as a purge of a scratch disk does
    assert fit(settings, resume=True).steps == 3
    assert measured(tmp_path / "run") == measured(tmp_path / "run/set_aside/001_from_step_0") == before


def test_checkpoints_on_a_disk_that_is_not_mounted_start_no_run_anew(
    tiny_model: Path, tmp_path: Path, raises: Raises
) -> None:
    settings = config("sft", tiny_model, tmp_path / "run", max_steps=1)
    fit(settings)
    before = measured(tmp_path / "run")
    (tmp_path / "run/checkpoints").rename(tmp_path / "scratch")
    (tmp_path / "run/checkpoints").symlink_to(tmp_path / "not-mounted")
    with raises(CheckpointError, tmp_path / "run/checkpoints"):
        fit(settings, resume=True)
    assert measured(tmp_path / "run") == before


def test_checkpoints_may_be_on_another_file_system(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config("sft", tiny_model, tmp_path / "run", checkpoint={"every": 1, "keep_last": 9})
    fit(settings)
    rename = os.rename

    def across(source: Any, target: Any, **options: Any) -> None:
        if "set_aside" in str(target) and "/checkpoints/" in str(source):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        rename(source, target, **options)

    monkeypatch.setattr(os, "rename", across)
    fit(settings, from_step=1, callbacks=[StopAfter(2)])
    aside = tmp_path / "run/set_aside/001_from_step_1/checkpoints"
    assert sorted(path.name for path in aside.iterdir()) == ["step_000002", "step_000003"]
    Checkpoint.read(aside / "step_000003").verify()


@pytest.mark.slow
def test_a_checkpoint_of_another_run_is_not_taken_for_ones_own(tiny_model: Path, tmp_path: Path) -> None:
    fit(config("grpo", tiny_model, tmp_path / "other", max_steps=2))
    settings = config("sft", tiny_model, tmp_path / "run")
    fit(settings, callbacks=[StopAfter(1)])
    shutil.copytree(tmp_path / "other/checkpoints/step_000002", tmp_path / "run/checkpoints/step_000002")
    assert fit(settings, resume=True).steps == 3
    assert [record["step"] for record in measured(tmp_path / "run")] == [1, 2, 3, 3]
    (warning,) = [line for line in lines(tmp_path / "run/events.jsonl") if "GRPOConfig" in str(line.get("message"))]
    assert "the checkpoint belongs to GRPOConfig, this run is SFTConfig" in warning["message"]


@pytest.mark.slow
def test_a_state_of_another_shape_is_told_as_such(tiny_model: Path, tmp_path: Path, raises: Raises) -> None:
    settings = config("sft", tiny_model, tmp_path / "run")
    fit(settings, callbacks=[StopAfter(1)])
    manager = CheckpointManager.of_run(tmp_path / "run", settings)
    for state in ({}, {"algorithm": "SFTConfig", "step": "x"}, {"algorithm": "SFTConfig", "step": 0, "latest": []}):
        manager.begin(1, {}, state, {})
        manager.publish(wait=True)
        with raises(CheckpointError, "trainer.json"):
            fit(settings, resume=True)


@pytest.mark.slow
def test_one_may_go_back_to_a_step_and_loses_nothing(tiny_model: Path, tmp_path: Path, raises: Raises) -> None:
    settings = config("sft", tiny_model, tmp_path / "run", checkpoint={"every": 1, "keep_last": 9})
    fit(settings)
    records = measured(tmp_path / "run")
    with raises(CheckpointError, 7, 1, 2, 3):
        fit(settings, from_step=7)
    fit(settings, from_step=1, callbacks=[StopAfter(2)])
    aside = tmp_path / "run/set_aside/001_from_step_1"
    assert sorted(path.name for path in (aside / "checkpoints").iterdir()) == ["step_000002", "step_000003"]
    assert measured(aside) == records
    assert (aside / "model/model.safetensors").is_file()
    assert not (tmp_path / "run/model").exists()
    assert measured(tmp_path / "run") == records[:2]
    assert fit(settings, resume=True).steps == 3
    assert measured(tmp_path / "run") == records
    whole, again = (load_file(folder / "model/model.safetensors") for folder in (aside, tmp_path / "run"))
    assert all(again[name].equal(whole[name]) for name in whole)


def test_a_run_directory_holds_everything(tiny_model: Path, tmp_path: Path) -> None:
    result = fit(config("grpo", tiny_model, tmp_path / "run", max_steps=1))
    names = {path.name for path in result.run_dir.iterdir()}
    assert {"config.yaml", "environment.json", "metrics.jsonl", "records", "events.jsonl"} <= names
    assert {"checkpoints", "report.html", "model"} <= names
    assert {record["split"] for record in read_records(result.run_dir)} == {"train", "validation"}
    assert result.best_checkpoint == result.run_dir / "checkpoints/step_000001"
    assert set(result.history[-1]) <= set(result.metrics) | {"step"}


def test_grpo_reports_what_dashboards_ask_for(tiny_model: Path, tmp_path: Path) -> None:
    record = lines(fit(config("grpo", tiny_model, tmp_path / "run", max_steps=1)).run_dir / "metrics.jsonl")[0]
    for name in ("loss", "reward", "grad_norm", "lr", "kl_penalty", "probs_ratio", "token_mult_prob_error", "accuracy"):
        assert f"train/{name}" in record
    assert record["train/probs_ratio"] == 1.0
    assert record["train/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-3)
    assert record["train/kl_penalty"] == pytest.approx(0.0, abs=1e-6)
    for phase in ("generation", "reward_calculation", "policy_training", "weight_sync", "total_step_time"):
        assert record[f"timing/train/{phase}"] > 0


def test_epochs_decide_the_end_without_max_steps(tiny_model: Path, tmp_path: Path) -> None:
    result = fit(config("sft", tiny_model, tmp_path / "run", max_steps=None, max_epochs=2))
    assert result.steps == 6  # 6 rows in batches of 2, twice


def test_validation_happens_at_the_start_when_due_and_at_the_end(tiny_model: Path, tmp_path: Path) -> None:
    settings = config("sft", tiny_model, tmp_path / "run", validation={"every": 2, "at_start": True, "max_samples": 2})
    steps = [record["step"] for record in measured(fit(settings).run_dir) if "validation/val_loss" in record]
    assert steps == [0, 2, 3]


def test_a_run_that_ended_before_its_first_step_starts_again_in_its_directory(
    tiny_model: Path, tmp_path: Path, raises: Raises
) -> None:
    class Fails(Callback):
        essential = True

        def on_step_begin(self) -> None:
            raise MemoryError("gone")

    wanted = {"validation": {"every": 2, "at_start": True, "max_samples": 2}, "max_steps": 1}
    with raises(ForeignError, "MemoryError"):
        fit(config("sft", tiny_model, tmp_path / "run", seed=1, **wanted), callbacks=[Fails()])
    assert [record["step"] for record in measured(tmp_path / "run")] == [0]
    fit(config("sft", tiny_model, tmp_path / "run", seed=2, **wanted))
    assert [record["step"] for record in measured(tmp_path / "run")] == [0, 1, 1]


def test_several_validation_sets_are_measured_each_and_together(tiny_model: Path, tmp_path: Path) -> None:
    validation = {"every": 0, "at_start": True, "max_samples": 2}
    settings = config("sft", tiny_model, tmp_path / "run", validation=validation, max_steps=1)
    records = measured(fit(settings, val_dataset={"first": ROWS[:1], "rest": ROWS[1:]}).run_dir)
    loss, first, rest = (
        next(record[f"validation/{name}val_loss"] for record in records if f"validation/{name}val_loss" in record)
        for name in ("", "first/", "rest/")
    )
    assert first != rest
    assert loss == pytest.approx((1 * first + 2 * rest) / 3)  # one row, and two of the others


def test_no_held_out_rows_are_no_validation(tiny_model: Path, tmp_path: Path) -> None:
    result = fit(config("sft", tiny_model, tmp_path / "run", max_steps=1), val_dataset=None)
    assert not any(name.startswith("validation/") for name in result.metrics)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_saves_and_returns(tiny_model: Path, tmp_path: Path, number: signal.Signals) -> None:
    class Interrupt(Callback):
        def on_step_begin(self, step: int) -> None:
            if step == 2:
                signal.raise_signal(number)

    before = signal.getsignal(number)
    result = fit(config("sft", tiny_model, tmp_path / "run"), callbacks=[Interrupt()])
    assert (result.steps, result.stopped) == (2, f"received {number.name}")
    assert (result.run_dir / "checkpoints/step_000002/manifest.json").is_file()
    assert not (result.run_dir / "model").exists()
    assert signal.getsignal(number) is before


def test_a_second_signal_acts_at_once(tiny_model: Path, tmp_path: Path) -> None:
    class Twice(Callback):
        def on_step_begin(self) -> None:
            signal.raise_signal(signal.SIGINT)  # acts before it returns: two that are pending would be one
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell runs us in the background
    try:
        with pytest.raises(KeyboardInterrupt):
            fit(config("sft", tiny_model, tmp_path / "run"), callbacks=[Twice()])
    finally:
        signal.signal(signal.SIGINT, before)
    assert lines(tmp_path / "run/events.jsonl")[-1]["event"] == "failed"


def test_everything_a_run_lacks_is_said_at_once(tiny_model: Path, tmp_path: Path) -> None:
    trainer = config("grpo", tiny_model, tmp_path / "run").build()
    with pytest.raises(ConfigError) as caught:
        trainer.fit()
    assert [problem.path for problem in caught.value.problems] == ["data", "environment"]
    assert not (tmp_path / "run").exists()


def test_a_reward_function_that_raises_is_named_and_closes_the_run(
    tiny_model: Path, tmp_path: Path, raises: Raises
) -> None:
    def grade(prompt: str, response: str) -> float:
        raise ValueError("no number")  # it may be the response's fault, so it passes the checks before the run

    with raises(ForeignError, "grade", "ValueError"):
        fit(config("grpo", tiny_model, tmp_path / "run"), reward_fn=grade)
    assert lines(tmp_path / "run/events.jsonl")[-1]["event"] == "failed"


class Endless:
    """A data module of the user's own."""

    epoch = 0

    def __init__(self) -> None:
        self.count = 0

    def next_batch(self) -> list[dict[str, Any]]:
        self.count += 1
        return ROWS[:2]

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


def test_a_data_module_of_ones_own_is_used_and_restored(tiny_model: Path, tmp_path: Path) -> None:
    settings = config("sft", tiny_model, tmp_path / "run")
    first, second = Endless(), Endless()
    settings.build().fit(first, callbacks=[StopAfter(1)], console=Console(quiet=True))
    settings.build().fit(second, resume=True, console=Console(quiet=True))
    assert (first.count, second.count) == (1, 3)


def test_a_data_module_without_an_end_needs_max_steps(tiny_model: Path, tmp_path: Path, raises: Raises) -> None:
    with raises(UsageError, "max_steps"):
        config("sft", tiny_model, tmp_path / "run", max_steps=None).build().fit(Endless(), console=Console(quiet=True))


def test_a_checkpoint_of_another_algorithm_is_refused(tiny_model: Path, tmp_path: Path, raises: Raises) -> None:
    trainer = config("sft", tiny_model, tmp_path / "run").build()
    with raises(CheckpointError, "GRPOConfig", "SFTConfig"):
        trainer.load_state_dict({"algorithm": "GRPOConfig"})


def test_train_is_one_call(tiny_model: Path, tmp_path: Path) -> None:
    result = nemorl.train(
        str(tiny_model),
        ROWS,
        reward,
        run_dir=tmp_path / "run",
        max_steps=1,
        num_prompts_per_step=2,
        num_generations_per_prompt=2,
        policy={"init": "random", "max_sequence_tokens": 32},
        generation={"max_new_tokens": 3},
    )
    assert result.steps == 1
    assert 0 <= result.metrics["train/reward"] < 7


def test_train_reports_wrong_knobs_all_at_once(tiny_model: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        nemorl.train(str(tiny_model), ROWS, reward, max_step=1, seed=-1)
    assert {problem.path for problem in caught.value.problems} == {"max_step", "seed"}


def test_a_trainer_from_pretrained(tiny_model: Path, tmp_path: Path) -> None:
    trainer = nemorl.SFTTrainer.from_pretrained(
        str(tiny_model), run_dir=tmp_path / "run", batch_size=2, max_steps=1, policy={"init": "random"}
    )
    assert trainer.fit(train_dataset=ROWS, console=Console(quiet=True)).steps == 1
    assert trainer.step == 1


@pytest.mark.slow
def test_a_continued_run_explains_the_process_that_ended_without_a_word(tiny_model: Path, tmp_path: Path) -> None:
    settings = config("sft", tiny_model, tmp_path / "run")
    fit(settings, callbacks=[StopAfter(2)])
    file = tmp_path / "run/events.jsonl"
    kept = [event for event in lines(file) if event["event"] != "stopped"]  # as if it had been killed
    file.write_text("".join(f"{json.dumps(event)}\n" for event in kept))
    assert fit(settings, resume=True).steps == 3
    events = [(event["event"], event.get("step"), event.get("error")) for event in lines(file)][len(kept) :]
    assert events[0][:2] == ("failed", 2)
    assert "ended without a word after step 2" in str(events[0][2])
    assert [name for name, *_ in events[1:]] == ["resumed", "checkpoint", "finished"]
