"""Rates of a step and shares of a run, with numbers worked out by hand, and what a run shows of them."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from nemorl.config import load_config
from nemorl.run import TrainResult
from nemorl_cli.console import Console
from nemorl_cli.report.efficiency.rates import Devices, rates
from nemorl_cli.report.efficiency.totals import Totals, percent

STEP = {
    "timing/train/total_step_time": 10.0,
    "timing/train/generation": 4.0,
    "timing/train/reward_calculation": 1.0,
    "timing/train/policy_and_reference_logprobs": 1.0,
    "timing/train/policy_training": 3.0,
    "timing/train/weight_sync": 0.5,
    "timing/train/prepare_for_generation/total": 0.25,
    "train/total_num_tokens": 1200.0,
    "performance/samples_per_sec": 3.2,
}
ASYNC = {
    "timing/train/total_step_time": 10.0,
    "timing/train/exposed_generation": 4.0,
    "timing/train/policy_and_reference_logprobs": 1.0,
    "timing/train/policy_training": 5.0,
    "train/total_num_tokens": 1200.0,
}


def test_rates_are_nemo_rls_quotients() -> None:
    found = rates(STEP, Devices(4, 4, 4, are_shared=True), [[100, 50], [50, 200]])
    assert found == pytest.approx(
        {
            "tokens_per_sec_per_gpu": 1200 / 10 / 4,
            "samples_per_sec_per_gpu": 3.2 / 4,
            "policy_training_tokens_per_sec_per_gpu": 1200 / 3 / 4,
            "policy_and_reference_logprobs_tokens_per_sec_per_gpu": 1200 / 1 / 4,
            "training_worker_group_tokens_per_sec_per_gpu": 1200 / (3 + 1) / 4,
            "training_worker_group_tokens_per_sec": 1200 / (3 + 1),
            "generation_tokens_per_sec_per_gpu": 1200 / 4 / 4,
            "generation_tokens_per_sec": 1200 / 4,
            "generated_tokens_per_sec_per_gpu": 400 / 4 / 4,
            "training_worker_idle_time_ratio": 1 / 10,  # rewards; generation is on the same devices
            "generation_tail_frac": 1 - 100 / 200,  # mean and longest response
        }
    )


def test_trainers_with_devices_of_their_own_idle_while_others_generate() -> None:
    found = rates(STEP, Devices(4, 3, 1, are_shared=False), [])
    assert found["training_worker_idle_time_ratio"] == pytest.approx((1 + 4) / 10)
    assert found["policy_training_tokens_per_sec_per_gpu"] == pytest.approx(1200 / 3 / 3)
    assert found["generation_tokens_per_sec_per_gpu"] == pytest.approx(1200 / 4 / 1)


def test_with_asynchronous_rollouts_generation_takes_what_hides_behind_training_too() -> None:
    found = rates(ASYNC, Devices(2, 1, 1, are_shared=False), [[300]])
    assert found["generation_tokens_per_sec"] == pytest.approx(1200 / (4 + 5 + 1))
    assert found["generated_tokens_per_sec_per_gpu"] == pytest.approx(300 / 10)
    assert found["training_worker_idle_time_ratio"] == pytest.approx(4 / 10)


def test_engines_that_got_shorter_responses_wait_for_the_fullest() -> None:
    groups = [[10, 20], [5, 5], [30, 40], [60, 30]]  # 30, 10, 70 and 90 tokens; engines have 30 + 70 and 10 + 90
    devices, record = Devices(2, 2, 2, are_shared=True, engines=2), {**STEP, "train/avg_turns_per_sample": 1.0}
    assert rates(record, devices, groups)["average_token_imbalance"] == 0.0
    groups[3] = [20, 20]  # 100 and 50: the second waits half of its time, the two a quarter
    assert rates(record, devices, groups)["average_token_imbalance"] == pytest.approx(1 - 75 / 100)
    # Where turns or batches are spread anew, nobody knows who made what.
    assert "average_token_imbalance" not in rates(record | {"train/avg_turns_per_sample": 1.5}, devices, groups)
    assert "average_token_imbalance" not in rates(ASYNC, devices, groups)


def test_a_step_without_a_phase_has_no_rate_of_it() -> None:
    found = rates({"timing/train/total_step_time": 2.0, "train/total_num_tokens": 8.0}, Devices(1, 1, 1, True), [])
    assert set(found) == {"tokens_per_sec_per_gpu", "samples_per_sec_per_gpu", "training_worker_idle_time_ratio"}


def test_the_devices_of_a_run_are_those_of_its_cluster() -> None:
    base = {"algorithm": "grpo", "model": "some/model", "data": "arithmetic", "environment": "math"}
    local = load_config(base)
    apart = load_config(
        {**base, "cluster": {"launcher": "ray", "workers_per_node": 4, "colocated": False, "generation_workers": 1}}
    )
    assert Devices.of(local) == Devices(1, 1, 1, are_shared=True)
    assert Devices.of(apart, 1) == Devices(4, 3, 1, are_shared=False)


def test_a_run_is_summed_up_by_time_and_by_tokens() -> None:
    totals = Totals()
    one = {"performance/padding_frac": 0.1, "performance/computed_tokens": 100.0, "performance/rank_wait_frac": 0.2}
    two = {"performance/padding_frac": 0.3, "performance/computed_tokens": 300.0, "performance/rank_wait_frac": 0.4}
    totals.add({**STEP, **one})
    totals.add({"timing/validation/total_validation_time": 4.0})
    totals.add({**STEP, **two, "timing/train/policy_training": 1.0, "timing/train/checkpointing": 2.0})
    # 10 + 4 + 10 s of steps and validation, and 2 s between the steps; of each step 0.5 s and 2.5 s belong to nothing.
    assert totals.seconds == pytest.approx(
        {
            **{"generated": 8, "trained": 4, "reward_wait": 2, "logprobs": 2, "weight_sync": 1},
            **{"validated": 4, "saved": 2, "other": 0.5 + 2.5},
        }
    )
    figures = totals.figures
    assert figures["trained_frac"] == pytest.approx(4 / 26)
    assert figures["padding_frac"] == pytest.approx((0.1 * 100 + 0.3 * 300) / 400)
    assert figures["rank_wait_frac"] == pytest.approx((0.2 * 3 + 0.4 * 1) / 4)
    assert totals.line == (
        "Efficiency: generated 31 % of the time, trained 15 %, validated 15 %, did other things 12 %, "
        "computed log-probs 8 %, waited for rewards 8 %, saved 8 %, synchronised weights 4 %; "
        "25 % of computed tokens were padding; ranks waited 25 % of training for the fullest"
    )


def test_a_speed_beyond_the_peak_is_explained() -> None:
    def ending(needed: float, computed: float) -> str:
        totals, work = Totals(), {"train_fp_utilization": needed, "computed_fp_utilization": computed}
        work["train_flops_per_gpu"] = 0.1 * needed  # of a device of 100 GFLOP/s
        totals.add({**STEP, **{f"performance/{name}": value for name, value in work.items()}})
        return totals.line.rpartition("; ")[2]

    assert ending(0.5, 0.4) == "training at 50 GFLOP/s per device, 50 % of its peak"
    why = "nothing was computed twice, or for rows that teach nothing"
    assert ending(1.8, 0.6).endswith(
        f"60 % of its peak, and 1.80 times its peak in what it would take otherwise, as {why}"
    )
    # The peak was measured too low, on a busy machine.
    assert ending(0.9, 1.1) == "training at 90 GFLOP/s per device, as fast as was measured"
    assert "% of its peak" not in ending(1.1, 1.2), "no device does more than it can"


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "0 %"), (0.0001, "less than 0.1 %"), (0.004, "0.4 %"), (0.5, "50 %")]
)
def test_small_shares_keep_a_digit(share: float, text: str) -> None:
    assert percent(share) == text


class Listener:
    """Keeps what is shown and what is logged."""

    def __init__(self) -> None:
        self.logged: list[Mapping[str, float]] = []
        self.shown = io.StringIO()

    def on_log(self, metrics: Mapping[str, float]) -> None:
        self.logged.append(dict(metrics))


def run(model: Path, folder: Path, listener: Listener, **hook: Any) -> TrainResult:
    settings: dict[str, Any] = {
        "algorithm": "grpo",
        "model": str(model),
        "policy": {"init": "random", "max_sequence_tokens": 32},
        "num_prompts_per_step": 2,
        "num_generations_per_prompt": 2,
        "generation": {"max_new_tokens": 4},
        "validation": {"every": 0, "at_end": False},
        "max_steps": 2,
        "run_dir": str(folder),
        "plugins": {"hooks": [{"name": "efficiency", **hook}] if hook else []},
    }
    rows = [{"prompt": f"{n}+1="} for n in range(4)]
    trainer, console = load_config(settings).build(), Console(file=listener.shown)
    result: TrainResult = trainer.fit(rows, lengths, callbacks=[listener], console=console)
    return result


def lengths(prompt: str, response: str) -> float:
    return float(len(response) % 3)


@pytest.fixture(scope="module")
def seen(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainResult, Listener]:
    listener = Listener()
    return run(tiny_model, tmp_path_factory.mktemp("seen") / "run", listener), listener


def test_every_run_logs_its_rates_in_the_steps_own_record(seen: tuple[TrainResult, Listener]) -> None:
    result, listener = seen
    records = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2]
    for record, logged in zip(records, listener.logged, strict=True):
        tokens, seconds = record["train/total_num_tokens"], record["timing/train/policy_training"]
        assert record["performance/policy_training_tokens_per_sec_per_gpu"] == pytest.approx(tokens / seconds)
        assert record["performance/computed_fp_utilization"] > 0
        assert logged.items() <= record.items()


def test_a_run_ends_with_one_line_about_its_efficiency(seen: tuple[TrainResult, Listener]) -> None:
    result, listener = seen
    (line,) = [text for text in listener.shown.getvalue().splitlines() if text.startswith("Efficiency: ")]
    assert f"trained {percent(result.metrics['efficiency/trained_frac'])}" in line
    shares = sum(value for name, value in result.metrics.items() if _is_share_of_time(name))
    assert shares == pytest.approx(1.0)
    report = (result.run_dir / "report.html").read_text()
    assert line in report
    assert '"title":"Tokens per second and device"' in report


def _is_share_of_time(name: str) -> bool:
    rates_of_tokens = ("padding_frac", "rank_wait_frac", "generation_tail_frac")
    return name.startswith("efficiency/") and name.endswith("_frac") and not name.endswith(rates_of_tokens)


def test_it_can_be_switched_off(tiny_model: Path, tmp_path: Path) -> None:
    result = run(tiny_model, tmp_path / "run", Listener(), enabled=False)
    assert not [name for name in result.metrics if name.startswith(("efficiency/", "system/"))]
    assert "performance/tokens_per_sec_per_gpu" not in result.metrics
    assert "performance/padding_frac" in result.metrics  # the backend's own


@pytest.mark.slow
def test_it_does_not_change_what_is_computed(
    seen: tuple[TrainResult, Listener], tiny_model: Path, tmp_path: Path
) -> None:
    without = run(tiny_model, tmp_path / "run", Listener(), enabled=False).run_dir
    weights = "model/model.safetensors"
    assert (seen[0].run_dir / weights).read_bytes() == (without / weights).read_bytes()
