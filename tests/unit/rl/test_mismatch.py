"""Trainer against sampler: the distances by hand, when a run warns, and an audit with real engines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.config.load import validate
from nemorl.errors import BackendError, ConfigError
from nemorl.metrics import Histogram, merge, values
from nemorl.plugins import Registry, registry
from nemorl.types import Completion, GenerationRequest
from nemorl.weights import WeightHandle, in_process_handle
from nemorl_cli.console import Console
from nemorl_dtensor import HFGenerationConfig
from nemorl_dtensor.generation import HFGeneration
from nemorl_rl.audit.mismatch import Measurement, MismatchReport, measure_mismatch
from nemorl_rl.config import RolloutRunConfig
from nemorl_tensors.mismatch import mismatch_metrics
from nemorl_testing import models
from nemorl_testing.plugin import use_registry
from recorded_messages import Raises
from watched_run import WatchedRun

NAN = float("nan")


# Distances


def test_the_distances_by_hand() -> None:
    # Gaps 0, 0.2 and -0.5 at the three counted tokens.
    # mean e^|gap| = (1 + 1.221403 + 1.648721) / 3; k3 = e^gap - 1 - gap: 0, 0.021403, 0.106531; mean |gap| = 0.7 / 3.
    old = torch.tensor([NAN, -1.0, -1.0, -2.0, NAN])
    sampled = torch.tensor([NAN, -1.0, -1.2, -1.5, math.inf])
    found = values(mismatch_metrics(old, sampled, torch.tensor([False, True, True, True, False])))
    assert found["token_mult_prob_error"] == pytest.approx(3.870124 / 3, abs=1e-6)
    assert found["gen_kl_error"] == pytest.approx(0.127934 / 3, abs=1e-6)
    assert found["logprob_error/mean"] == pytest.approx(0.7 / 3, abs=1e-6)
    assert found["logprob_error/max"] == pytest.approx(0.5, abs=1e-6)
    assert found["logprob_error/p50"] == pytest.approx(10**-0.7)  # 0.2, rounded down to a power of 10^0.05
    assert found["logprob_error/p999"] == pytest.approx(10**-0.35)  # 0.5


def test_tensors_and_plain_numbers_fall_into_the_same_cells() -> None:
    generator = torch.Generator().manual_seed(0)
    gaps = torch.exp(5 * torch.randn(4000, generator=generator) - 4)
    gaps = torch.cat([gaps, torch.tensor([0.0, 1e-12, 99.0, 100.0, 1e20, math.inf])])
    mask = torch.ones(len(gaps), dtype=torch.bool)
    found = mismatch_metrics(-gaps, torch.zeros(len(gaps)), mask)["logprob_error"]
    assert found == Histogram.of(gaps.tolist())


def test_microbatches_merge_to_the_whole() -> None:
    generator = torch.Generator().manual_seed(1)
    old, sampled = -torch.rand(300, generator=generator), -torch.rand(300, generator=generator)
    mask = torch.rand(300, generator=generator) > 0.3
    parts = [mismatch_metrics(old[i : i + 100], sampled[i : i + 100], mask[i : i + 100]) for i in (0, 100, 200)]
    whole = mismatch_metrics(old, sampled, mask)
    assert merge(parts)["logprob_error"] == whole["logprob_error"]
    assert values(merge(parts)) == pytest.approx(values(whole), rel=1e-6)


@pytest.mark.parametrize("size", [0, 3])
def test_nothing_to_compare_logs_no_extremes(size: int) -> None:
    empty = torch.full((size,), NAN)
    found = values(mismatch_metrics(empty, empty, torch.zeros(size, dtype=torch.bool)))
    names = "token_mult_prob_error", "gen_kl_error", "logprob_error/mean", "nonfinite_sampler_logprobs"
    assert found == dict.fromkeys(names, 0.0)


# Warnings


def watch(**changes: Any) -> WatchedRun:
    return WatchedRun.of(**{"rollouts": {"mismatch_warning": 1.1}, **changes})


def test_a_run_warns_once_until_it_recovers() -> None:
    watcher = watch()
    for step, value in enumerate([1.0, 1.1, 1.2, 1.3, 1.05, 1.11, NAN, 1.0, NAN]):
        watcher.step(step, {"token_mult_prob_error": value})
    assert [text.split(": ")[0] for text in watcher.told] == [
        f"trainer and sampler disagree about the tokens of step {step}" for step in (2, 5, 8)
    ]


def test_only_steps_whose_samples_are_all_fresh_are_judged() -> None:
    watcher = watch()
    # Age of the oldest sample: 1.5 is staleness, then a fault of the engines, which 1.0 of older samples does not end.
    for step, (value, age) in enumerate([(1.0, 0), (1.5, 1), (1.5, 2), (1.5, 0), (1.0, 1), (1.5, 0), (1.0, 0)]):
        watcher.step(step, {"token_mult_prob_error": value, "max_trajectory_age": float(age)})
    assert [text.split(": ")[0] for text in watcher.told] == ["trainer and sampler disagree about the tokens of step 3"]


@pytest.mark.parametrize("value", [1.301, 2.0, math.inf, NAN])
def test_a_first_step_past_the_limit_ends_the_run(value: float, raises: Raises) -> None:
    watcher = watch(rollouts={"mismatch_limit": 1.3})
    watcher.step(1, {"loss": 1.0})  # a step without the metric is not the first that is judged
    watcher.step(2, {"token_mult_prob_error": 9.0, "max_trajectory_age": 1.0})  # nor one with older samples
    with raises(BackendError, "rollouts.mismatch_limit", "1.3", "--model", "some/model"):
        watcher.step(3, {"token_mult_prob_error": value})
    assert [event["rule"] for event in watcher.events] == ["sampler_mismatch_at_start"]


@pytest.mark.parametrize("value", [2.0, NAN])
def test_after_a_sound_first_step_or_without_a_limit_it_only_warns(value: float) -> None:
    for limit, steps in ((1.3, [1.3, value]), (None, [value])):
        watcher = watch(rollouts={"mismatch_limit": limit, "mismatch_warning": 1.3})
        for step, found in enumerate(steps):
            watcher.step(step, {"token_mult_prob_error": found})
        assert len(watcher.told) == 1


def test_a_limit_below_the_warning_is_refused(raises: Raises) -> None:
    rollouts = {"mismatch_warning": 1.5, "mismatch_limit": 1.4}
    with raises(ConfigError, "mismatch_limit", path="rollouts.mismatch_limit"):
        validate(RolloutRunConfig, {"model": "some/model", "rollouts": rollouts})


def test_steps_without_the_metric_say_nothing() -> None:
    watcher = watch()
    watcher.step(1, {"loss": 1.0})
    assert watcher.told == []


def test_the_warning_names_causes_and_the_command_that_measures() -> None:
    generation = {"temperature": 0.7}
    policy = {"precision": "bfloat16"}
    watcher = watch(generation=generation, policy=policy)
    watcher.step(3, {"token_mult_prob_error": 1.25})
    (text,) = watcher.told
    assert "token_mult_prob_error is 1.25, above rollouts.mismatch_warning = 1.1" in text
    for cause in ("precision", "did not reach", "output head", "temperature", "top-p", "tokenizer"):
        assert cause in text
    assert (
        "nemorl doctor --model some/model --training dtensor --generation hf --precision bfloat16 "
        "generation.temperature=0.7"
    ) in text


@pytest.mark.parametrize("threshold", [1.0, 0.5])
def test_a_threshold_that_always_warns_is_refused(threshold: float, raises: Raises) -> None:
    with raises(ConfigError, "mismatch_warning", path="rollouts.mismatch_warning"):
        validate(RolloutRunConfig, {"model": "some/model", "rollouts": {"mismatch_warning": threshold}})


# Real engines, sound and faulty


class FaultyGeneration(HFGenerationConfig):
    """The embedded engine with one fault."""

    fault: str = "none"
    """Name of a class of this module."""

    def build(self, generation: Any, policy: Any, worker: Any, weights: Any) -> Any:
        engine = {kind.__name__: kind for kind in (MissesUpdates, StaleHead, SamplesAtOne)}[self.fault]
        return engine(generation, policy, worker, weights, self)


def frozen(handle: WeightHandle, version: int) -> WeightHandle:
    """A handle to copies of the weights as they are now."""
    buckets = [{name: tensor.detach().clone() for name, tensor in bucket.items()} for bucket in handle.buckets()]
    return in_process_handle(lambda: iter(buckets), version)


class MissesUpdates(HFGeneration):
    """Keeps a copy of its first weights."""

    def __init__(self, generation: Any, policy: Any, worker: Any, weights: WeightHandle, options: Any) -> None:
        super().__init__(generation, policy, worker, frozen(weights, weights.version), options)

    def update_weights(self, handle: WeightHandle, version: int) -> int:
        return 0


class StaleHead(HFGeneration):
    """Takes every update, but for its output head, of which it keeps the first copy."""

    def __init__(self, generation: Any, policy: Any, worker: Any, weights: WeightHandle, options: Any) -> None:
        first = frozen(weights, weights.version)
        (self.head,) = [bucket["lm_head.weight"] for bucket in first.buckets()]
        super().__init__(generation, policy, worker, first, options)

    def update_weights(self, handle: WeightHandle, version: int) -> int:
        (bucket,) = [dict(bucket) for bucket in frozen(handle, version).buckets()]
        weights = {**bucket, "lm_head.weight": self.head}
        return super().update_weights(in_process_handle(lambda: iter([weights]), version), version)


class SamplesAtOne(HFGeneration):
    """Ignores the temperature."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        return super().generate([replace(r, sampling=replace(r.sampling, temperature=1.0)) for r in requests])


@pytest.fixture
def faulty() -> Iterator[None]:
    """The faulty engine is installed as generation backend ``faulty``."""
    scoped = Registry(registry().index)
    scoped.register("generation_backends", "faulty", FaultyGeneration)
    with use_registry(scoped):
        yield


def audited(backend: Any, **changes: Any) -> RolloutRunConfig:
    """A config of the tiny model, whose log-probs are far from uniform; input and output embeddings are apart."""
    generation = {"backend": backend, "max_new_tokens": 8, "temperature": 0.7}
    model = str(models.tiny_model(tie_word_embeddings=False))
    return validate(RolloutRunConfig, {"model": model, "generation": generation, **changes})


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_sound_engines_agree_before_and_after_an_update(precision: str, tolerance: float) -> None:
    report = measure_mismatch(audited("hf", policy={"precision": precision}), samples_per_prompt=2)
    assert report.ok
    assert report.shift > 0.05  # the update did something
    for part in (report.before, report.after):
        assert part.tokens > 8
        assert part.mean_error <= part.max_error < 4 * tolerance
        assert 1.0 <= part.token_mult_prob_error < 1 + tolerance
        assert part.gen_kl_error < tolerance


def test_an_audit_replays_routes_where_the_run_does() -> None:
    backend = {"name": "dtensor", "router": {"replay": True}}
    mixture = {"model_name": str(models.tiny_mixture()), "backend": backend}
    config = audited("hf", policy=mixture, model=mixture["model_name"])
    report = measure_mismatch(config, samples_per_prompt=2)
    assert report.ok
    assert report.shift > 0.05
    assert report.after.max_error < 1e-4


@pytest.mark.parametrize(("rounding", "is_fault"), [(None, True), (0.024, True), (0.026, False), (NAN, True)])
def test_what_rounding_explains_is_a_note(rounding: float | None, is_fault: bool) -> None:
    # 0.05 nats apart: engines that are 0.025 from float32 can be that far from each other, no more.
    fine = Measurement(9, 0.01, 0.1, 1.01, 0.001)
    apart = Measurement(9, 0.05, 0.3, 1.06, 0.003, rounding)
    report = MismatchReport(fine, apart, shift=1.0, threshold=1.05)
    assert report.ok is not is_fault
    assert [len(report.findings), len(report.notes)] == ([1, 0] if is_fault else [0, 1])
    (said,) = report.findings + report.notes
    assert "1.06" in said
    assert report.as_dict()["notes"] == report.notes


def test_rounding_is_measured_where_engines_disagree_in_a_lower_precision() -> None:
    # Any disagreement is past this threshold, which no config may have.
    for precision in ("float32", "bfloat16"):
        config = audited("hf", policy={"precision": precision})
        rollouts = config.rollouts.model_copy(update={"mismatch_warning": 0.0})
        report = measure_mismatch(config.model_copy(update={"rollouts": rollouts}), samples_per_prompt=2)
        if precision == "float32":
            assert report.before.rounding is None
            assert len(report.findings) == 2
        else:
            for part in (report.before, report.after):
                assert part.rounding is not None
                assert 1e-4 < part.rounding < 0.1
                assert part.is_rounding
            assert (report.ok, len(report.notes)) == (True, 2)


MISSED = ["the engines disagree after the update", "the weight update made the mean"]
PART = "after the update, the engines part at"


@pytest.mark.usefixtures("faulty")
@pytest.mark.parametrize(
    ("precision", "fault", "findings"),
    [
        ("float32", "MissesUpdates", [*MISSED, f"{PART} the norm before attention of layer 0"]),
        ("bfloat16", "MissesUpdates", [MISSED[0], PART]),
        # 1.02: plausible, and wrong
        ("float32", "StaleHead", ["the weight update made the mean error", f"{PART} the logits"]),
        ("float32", "SamplesAtOne", ["the engines disagree from the start", "the engines disagree after the update"]),
        ("bfloat16", "SamplesAtOne", ["the engines disagree from the start", "the engines disagree after the update"]),
    ],
)
def test_a_fault_of_the_sampler_is_found_and_told_apart(precision: str, fault: str, findings: list[str]) -> None:
    config = audited({"name": "faulty", "fault": fault}, policy={"precision": precision})
    report = measure_mismatch(config, samples_per_prompt=2)
    assert not report.ok
    # Of bfloat16 the rounding before is a tenth of what a missed update makes: a little more, or a little less.
    found = [text for text in report.findings if precision == "float32" or not text.startswith(MISSED[1])]
    assert len(found) == len(findings)
    assert all(text.startswith(start) for text, start in zip(found, findings, strict=True))


def run_with_a_faulty_sampler(folder: Path, **rollouts: Any) -> list[dict[str, Any]]:
    """The events of two steps, or of fewer."""
    from nemorl_grpo import GRPOConfig

    data = {
        "model": str(models.tiny_model(tie_word_embeddings=False)),
        "max_steps": 2,
        "num_prompts_per_step": 2,
        "num_generations_per_prompt": 2,
        "generation": {"backend": {"name": "faulty", "fault": "SamplesAtOne"}, "temperature": 0.7, "max_new_tokens": 8},
        "rollouts": rollouts,
        "run_dir": folder,
    }
    trainer = validate(GRPOConfig, data).build()
    rows = [{"prompt": "1+1="}, {"prompt": "2+2="}]
    with suppress(BackendError):
        trainer.fit(rows, lambda prompt, response: float(len(response)), console=Console(quiet=True))
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("faulty")
@pytest.mark.slow
def test_a_run_with_a_faulty_sampler_warns_or_ends(tmp_path: Path) -> None:
    warned = run_with_a_faulty_sampler(tmp_path / "warned", mismatch_limit=None)
    warnings = [event["text"] for event in warned if event.get("rule") == "sampler_mismatch"]
    assert len(warnings) == 1  # it never recovered
    assert "trainer and sampler disagree about the tokens of step 1" in warnings[0]
    assert "--generation faulty" in warnings[0]
    assert warned[-1]["event"] == "finished"

    ended = run_with_a_faulty_sampler(tmp_path / "ended", mismatch_warning=1.01, mismatch_limit=1.02)
    assert (ended[-1]["event"], ended[-1]["step"]) == ("failed", 1)
    assert "BackendError: trainer and sampler disagree about the tokens of step 1" in ended[-1]["error"]
    assert not (tmp_path / "ended/checkpoints").exists() or not [*(tmp_path / "ended/checkpoints").iterdir()]
