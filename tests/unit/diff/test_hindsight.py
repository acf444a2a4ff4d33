"""``nemorl compare hindsight``: its gradients are the steps that runs really took with those losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Command
from made_runs import changed, make_run, with_record
from nemorl.config.load import load_config
from nemorl.types import Prompt, Sample, Samples, Score
from nemorl_cli.console import Console
from nemorl_grpo.config import GRPOConfig
from nemorl_grpo.loss_cispo import CappedWeightLoss
from nemorl_insight.diff.gradients import cosine, reward_coefficients, token_coefficients, weights_of
from nemorl_insight.diff.halves import StopAfter, learning_from
from nemorl_insight.diff.hindsight import Hindsight, StepBefore, look_back
from nemorl_insight.diff.hindsight_variants import Asked, Variant, config_of
from nemorl_insight.diff.recorded import RecordedStep
from nemorl_insight.diff.run_files import RunFiles
from nemorl_rl.policy_gradient.loss import ClippedPolicyGradientLoss
from nemorl_tensors import TokenBatch
from real_runs import fingerprint, real_run
from safetensors.torch import load_file

MODEL = "policy/model/shard-00001-model-00001-of-00001.safetensors"
PLAIN_STEPS: dict[str, Any] = {
    # AdamW with eps = 1 far above all gradients: lr * g / (|g| + 1) is nearly lr * g, a plain gradient step.
    "optimizer": {"lr": 1.0, "eps": 1.0, "weight_decay": 0.0, "betas": (0.0, 0.0)},
    "schedule": {"kind": "constant"},
    "max_grad_norm": 0.02,
    "max_sequence_tokens": 48,
}
"""``betas`` of 0: no step remembers the one before."""
OPTIONS: dict[str, Any] = {"generation": {"max_new_tokens": 24}, "environment": {"pattern": r".*\d.*\d.*\d.*"}}


def batch_of_two(old: list[float]) -> TokenBatch:
    """A prompt token and two response tokens of advantage 1."""
    batch = TokenBatch.from_sequences([[5, 6, 7]], [[False, True, True]])
    logprobs = torch.tensor([0.0, *old])
    return batch.with_tokens(advantages=torch.ones(3), old_logprobs=logprobs, generation_logprobs=logprobs)


def test_the_cosine_of_a_clipped_and_a_capped_token_is_the_one_worked_by_hand() -> None:
    # Ratios e^0.5 = 1.6487 and 1, weights 1/2. Clip at 1.2: (0, -0.5). Cap at 5: (-0.8244, -0.5).
    # Cosine = 0.25 / (0.5 * sqrt(0.6796 + 0.25)) = 0.25 / (0.5 * 0.9641) = 0.5186
    policy, batch = torch.tensor([0.0, -1.0, -2.0]), batch_of_two([-1.5, -2.0])
    clipped, capped = ClippedPolicyGradientLoss(), CappedWeightLoss()
    found = [token_coefficients(loss, policy, batch) for loss in (clipped, capped)]
    assert found[0].tolist() == pytest.approx([0.0, 0.0, -0.5])
    assert found[1].tolist() == pytest.approx([0.0, -0.8244, -0.5], abs=1e-4)
    assert cosine([found[0]], [found[1]]) == pytest.approx(0.5186, abs=1e-4)
    # (1.6487 + 1)^2 / (2.7183 + 1) = 7.0157 / 3.7183 = 1.8868 tokens; of the clipped loss one of two carries.
    of_clipped, of_capped = (weights_of(loss, policy, batch, 2) for loss in (clipped, capped))
    assert (of_clipped.effective_tokens, of_clipped.carrying_frac) == (1.0, 0.5)
    assert (of_capped.effective_tokens, of_capped.carrying_frac) == (pytest.approx(1.8868, abs=1e-4), 1.0)


def sample(index: int, reward: float, version: int) -> Sample:
    tokens, mask = (5, 6), (False, True)
    return Sample(Prompt(index, "?", (5,)), tokens, mask, (0.0, -1.0), Score(reward), "a", "stop", 1, (version,))


def test_a_filter_leaves_out_stale_responses_and_groups_of_equal_rewards() -> None:
    config = GRPOConfig(model="org/model")
    samples = Samples([sample(0, 1.0, 3), sample(0, 0.0, 2), sample(1, 1.0, 4), sample(1, 1.0, 4)])
    # Step 5 learns with the weights of step 4: staleness 1, 2, 0, 0.
    assert Variant("a", config, max_staleness=1).kept(samples, 5).group_ids == [0, 1, 1]
    assert Variant("b", config, only_mixed=True).kept(samples, 5).group_ids == [0, 0]
    assert Variant("c", config).kept(samples, 5).group_ids == [0, 0, 1, 1]


@pytest.fixture(scope="module")
def runs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs that took their first step from the same weights on the same samples, each in its own way."""
    folder = tmp_path_factory.mktemp("runs")
    ways: dict[str, dict[str, Any]] = {
        "grpo": {},
        "gspo": {"algorithm": "gspo", "leave_one_out": True},
        "grpo, drop truncated": {"overlong_filtering": True},
    }
    return {
        name: real_run(tiny_model, folder / str(place), policy=PLAIN_STEPS, max_steps=2, **OPTIONS, **way)
        for place, (name, way) in enumerate(ways.items())
    }


def looked_back(run: Path, step: int, scratch: Path, losses: list[str]) -> tuple[StepBefore, Hindsight]:
    files = RunFiles.of(run)
    before = StepBefore.load(files, step, scratch)
    variants = list(Asked(losses).variants(before.config, files.data.config))
    return before, look_back(before, variants, keep=True)


def step_taken(before: StepBefore, run: Path, step: int) -> list[torch.Tensor]:
    """Minus what the run added to the weights, in the model's order: the direction of its gradient."""
    after = load_file(run / f"checkpoints/step_{step:06}" / MODEL)
    return [value.detach().float() - after[name].float() for name, value in before.model.named_parameters()]


def tokens_of(run: Path) -> list[tuple[int, ...]]:
    """Of the first step."""
    recorded = RecordedStep.read(RunFiles.of(run), 1, load_config(run / "config.yaml").build())
    return [part.token_ids for part in recorded.samples.sequences]


def test_the_gradients_are_the_steps_that_runs_took_with_these_losses(runs: dict[str, Path], tmp_path: Path) -> None:
    tokens = [tokens_of(run) for run in runs.values()]
    assert tokens[0] == tokens[1] == tokens[2], "the first step of all runs learns from the same samples"
    before, found = looked_back(runs["grpo"], 1, tmp_path, ["gspo"])
    gradients = dict(zip([row.name for row in found.rows], found.gradients, strict=True))
    taken = {name: step_taken(before, run, 1) for name, run in runs.items()}
    for name in runs:
        assert cosine(gradients[name], taken[name]) > 0.999, name
    # They are different directions: a test that confused them would not pass.
    assert cosine(taken["grpo"], taken["gspo"]) < 0.99
    assert cosine(taken["grpo"], taken["grpo, drop truncated"]) < 0.9


def test_a_loss_that_weighs_tokens_by_their_ratio_takes_the_step_that_hindsight_says(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    """The record says that the sampler found every third token likelier, every third less likely: ratios far from 1."""

    def other_sampler(row: dict[str, Any]) -> None:
        for sequence in row["sequences"]:
            sampled = sequence["generation_logprobs"]
            shifts = [(-2.0, 0.0, 1.0)[place % 3] for place in range(len(sampled))]
            sequence["generation_logprobs"] = [value + shift for value, shift in zip(sampled, shifts, strict=True)]

    places = [(group, place) for group in range(4) for place in range(8)]
    plants = [with_record(f"1-{group}-{place}", other_sampler) for group, place in places]
    run = changed(runs["grpo"], tmp_path / "run", *plants)
    files = RunFiles.of(run)
    before = StepBefore.load(files, 1, tmp_path / "scratch")
    own, others = before.config, Asked(["cispo", "dppo"]).variants(before.config, files.data.config)
    variants = [one for one in others if one.name in ("grpo", "dppo", "grpo, clip to sampler 0.2:0.2")]
    found = look_back(before, variants, keep=True)

    data = {**files.data.config, "run_dir": str(tmp_path / "taken"), "max_steps": 1}
    data["rollouts"] = {**data["rollouts"], "mismatch_limit": None}  # else the run ends: no sampler is that far off
    taught = config_of("dppo", own, data)
    recorded = {1: RecordedStep.read(files, 1, taught.build())}
    learning_from(type(taught.build()), taught, recorded).fit(console=Console(quiet=True), callbacks=[StopAfter(1)])
    taken = step_taken(before, tmp_path / "taken", 1)
    assert cosine(found.gradients[1], taken) > 0.999
    assert cosine(found.gradients[0], taken) < 0.9
    own_row, dppo, clipped = found.rows
    assert own_row.carrying_frac == 1.0
    assert dppo.effective_tokens < own_row.effective_tokens
    assert 0 < clipped.carrying_frac < 1


def test_the_reward_rises_by_each_response_s_lead_weighed_by_its_ratio() -> None:
    # Ratio e^0.5 with a lead of 1, ratio 1 with -1, two responses: 1.6487 / 2 and -1 / 2.
    batch = TokenBatch.from_sequences([[5, 6], [5, 7]], [[False, True]] * 2)
    sampled, leads = torch.tensor([0.0, -1.5, 0.0, -2.0]), torch.tensor([0.0, 1.0, 0.0, -1.0])
    batch = batch.with_tokens(generation_logprobs=sampled, advantages=leads)
    found = reward_coefficients(torch.tensor([0.0, -1.0, 0.0, -2.0]), batch, 2)
    assert found.tolist() == pytest.approx([0.0, 0.8244, 0.0, -0.5], abs=1e-4)


def test_a_later_step_is_taken_from_its_checkpoint_and_the_log_probs_say_so(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    run = runs["grpo"]
    before, found = looked_back(run, 2, tmp_path, ["gspo"])
    after = load_file(run / f"checkpoints/step_000002/{MODEL}")
    earlier = load_file(run / f"checkpoints/step_000001/{MODEL}")
    names = [name for name, _ in before.model.named_parameters()]
    assert cosine(found.gradients[0], [earlier[name].float() - after[name].float() for name in names]) > 0.999
    assert found.logprob_gap == pytest.approx(0.0, abs=1e-4)


def test_the_command_tabulates_the_variants_and_leaves_the_run_alone(
    runs: dict[str, Path], nemorl: Command, tmp_path: Path
) -> None:
    run, page = runs["grpo"], tmp_path / "step.html"
    prints = fingerprint(run)
    asked = ["--losses", "cispo,dppo", "--clip", "0.1:0.3", "--html", page, "--json"]
    done = nemorl("compare", "hindsight", run, "--step", 2, *asked)
    assert done.code == 0, done.err + done.out
    rows = {row["name"]: row for row in done.json["variants"]}
    assert list(rows) == [
        "grpo", "cispo", "dppo", "grpo, clip to sampler 0.1:0.3", "grpo, drop equal_rewards", "grpo, drop truncated",
    ]  # fmt: skip
    assert rows["grpo"]["cosine"] == pytest.approx(1.0)
    # On policy, REINFORCE with weights of 1 is GRPO's gradient: the sampler is the trainer's own model.
    assert rows["cispo"]["cosine"] == pytest.approx(1.0, abs=1e-4)
    assert rows["grpo"]["effective_tokens"] == pytest.approx(done.json["response_tokens"], rel=1e-3)
    assert page.read_text().count("<rect") == len(rows)
    assert fingerprint(run) == prints


def test_a_run_without_the_checkpoint_or_the_records_is_told_what_keeps_them(tmp_path: Path, nemorl: Command) -> None:
    run = make_run(tmp_path / "a")
    (run / "checkpoints/step_000001/manifest.json").unlink()
    lacks = nemorl("compare", "hindsight", run, "--step", 2)
    assert lacks.code == 2
    assert "checkpoint: {every: 1, keep_every: 1}" in " ".join(lacks.err.split())
    few = nemorl("compare", "hindsight", run, "--step", 1)  # the default is 32 prompts a step
    assert few.code == 2
    assert "`records: {every: 1, groups: 32}`" in " ".join(few.err.split())
    foreign = nemorl("compare", "hindsight", run, "--step", 3, "--clip", "2")
    assert (foreign.code, "0.2:0.28" in foreign.err) == (2, True)
