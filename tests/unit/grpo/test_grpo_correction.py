"""Importance corrections by hand: what each kind makes of the same disagreement between trainer and sampler.

# N = tokens of all sequences concatenated
"""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.config import PolicyConfig
from nemorl.config.load import load_config
from nemorl.errors import ConfigError
from nemorl.metrics import merge, values
from nemorl.resources.worker import WorkerContext
from nemorl_dtensor import DTensorConfig
from nemorl_grpo import GRPOConfig
from nemorl_rl.policy_gradient.config import CORRECTION_BOUNDS, ImportanceCorrection
from nemorl_rl.policy_gradient.correction import Correction, IcePop, Plain, SequenceMask, Truncated, build_correction
from nemorl_rl.policy_gradient.loss import ClippedPolicyGradientLoss
from nemorl_tensors import TokenBatch
from nemorl_testing.batches import ragged_batch
from nemorl_testing.models import tiny_model
from torch import Tensor

NAN = float("nan")
KINDS: list[Correction] = [Plain(), Truncated(), IcePop(), SequenceMask()]
RATIOS = (1.0, 0.25, 4.0, 8.0, 1.0, 1.001)
"""exp(old - generation) of the six trained tokens: four of one response, two of another.

Geometric means: (1 * 1/4 * 4 * 8)^(1/4) = 8^(1/4) = 1.681793, and sqrt(1.001) = 1.000500."""


def disagreement(fill: float = NAN) -> TokenBatch:
    """Two responses whose tokens the trainer finds ``RATIOS`` times as likely as the sampler did; old is -1."""
    shape = TokenBatch.from_sequences(
        [[5, 6, 7, 8, 9], [5, 6, 7]], [[False, True, True, True, True], [False, True, True]]
    )
    generation = torch.full((8,), fill)
    generation[shape.mask] = -1.0 - torch.tensor(RATIOS).log()
    return shape.with_tokens(
        advantages=torch.where(shape.mask, torch.tensor([0, 1, 1, 1, 1, 0, -2, -2.0]), fill),
        old_logprobs=torch.where(shape.mask, -1.0, fill),
        reference_logprobs=torch.where(shape.mask, -1.5, fill),
        generation_logprobs=generation,
    )


def log_ratio(batch: TokenBatch) -> Tensor:
    return torch.where(batch.mask, batch["old_logprobs"] - batch["generation_logprobs"], 0.0)


@pytest.mark.parametrize(
    ("correction", "weights", "out_of_bounds"),
    [
        (Plain(), [1, 0.25, 4, 8, 1, 1.001], None),
        (Truncated(), [1, 0.25, 2, 2, 1, 1.001], 2 / 6),
        (Truncated(cap=5.0), [1, 0.25, 4, 5, 1, 1.001], 1 / 6),
        (IcePop(), [1, 0, 4, 0, 1, 1.001], 2 / 6),  # 0.25 < 0.5 and 8 > 5
        (IcePop(low=0.2, high=4.5), [1, 0.25, 4, 0, 1, 1.001], 1 / 6),
        (SequenceMask(), [0, 0, 0, 0, 1, 1.001], 1 / 2),  # 1.6818 > 1.002 drops the first response
        (SequenceMask(low=0.5, high=2.0), [1, 0.25, 4, 8, 1, 1.001], 0.0),  # kept whole, its weights as they are
        (SequenceMask(low=0.9999, high=1.0001), [0, 0, 0, 0, 0, 0], 1.0),
    ],
)
def test_the_weights_by_hand(correction: Correction, weights: list[float], out_of_bounds: float | None) -> None:
    batch = disagreement()
    found, metrics = correction(log_ratio(batch), batch)
    assert found[batch.mask].tolist() == pytest.approx(weights, rel=1e-6)
    numbers = values(metrics)
    assert numbers["sampling_importance_ratio"] == pytest.approx(sum(weights) / 6, rel=1e-6)
    assert numbers.get("is_oob_ratio") == (None if out_of_bounds is None else pytest.approx(out_of_bounds))


def test_the_loss_by_hand() -> None:
    # On policy: every surrogate is its advantage, every loss weight 1/6; capped at 2 the weights are
    # 1, 0.25, 2, 2 at A = 1 and 1, 1.001 at A = -2: loss = -(1 + 0.25 + 2 + 2 - 2 - 2.002) / 6 = -0.208.
    # KL k3 of policy -1 and reference -1.5: e^-0.5 - 1 + 0.5 = 0.106531, weighed by 0.1 and by no correction.
    loss = ClippedPolicyGradientLoss(kl_penalty=0.1, on_policy=True, correction=Truncated())
    policy = torch.full((8,), -1.0, requires_grad=True)
    value, metrics = loss(policy, disagreement())
    value.backward()
    assert float(value.detach()) == pytest.approx(-0.208 + 0.0106531, abs=1e-6)
    assert policy.grad is not None
    # d/d policy of the surrogate is w * A / 6, that of k3 with its score-function term is -1 - -1.5 = 0.5.
    slope = 0.05 / 6
    expected = [0, *(slope - w / 6 for w in (1, 0.25, 2, 2)), 0, *(slope + 2 * w / 6 for w in (1, 1.001))]
    assert policy.grad.tolist() == pytest.approx(expected, abs=1e-6)
    assert values(metrics)["is_oob_ratio"] == pytest.approx(2 / 6)


def test_the_correction_uses_the_old_policy_not_the_current_one() -> None:
    loss = ClippedPolicyGradientLoss(clip_high=10.0, correction=Plain())
    policy = torch.full((8,), -0.5)
    value, _ = loss(policy, disagreement())
    # ratio e^0.5 times weight times advantage: -(13.25 - 2 * 2.001) * 1.648721 / 6; e^0.5 at A < 0 is not clipped.
    assert float(value) == pytest.approx(-(13.25 - 4.002) * 1.648721 / 6, abs=1e-5)


@pytest.mark.parametrize("correction", KINDS, ids=lambda kind: type(kind).__name__)
def test_engines_that_agree_need_no_correction(correction: Correction) -> None:
    batch = disagreement().with_tokens(generation_logprobs=disagreement()["old_logprobs"])
    weights, metrics = correction(log_ratio(batch), batch)
    assert weights[batch.mask].tolist() == [1.0] * 6
    assert values(metrics)["sampling_importance_ratio"] == 1.0
    assert values(metrics).get("is_oob_ratio", 0.0) == 0.0
    policy = torch.full((8,), -1.0)
    plain, _ = ClippedPolicyGradientLoss()(policy, batch)
    corrected, _ = ClippedPolicyGradientLoss(correction=correction)(policy, batch)
    assert torch.equal(corrected, plain)


@pytest.mark.parametrize("correction", KINDS, ids=lambda kind: type(kind).__name__)
@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("fill", [NAN, math.inf, -math.inf])
def test_masked_slots_may_hold_anything(correction: Correction, on_policy: bool, fill: float) -> None:
    loss = ClippedPolicyGradientLoss(kl_penalty=0.1, on_policy=on_policy, correction=correction)
    results = []
    for held in (0.0, fill):
        batch = disagreement(held)
        policy = torch.where(batch.mask, -1.2, held).requires_grad_()
        value, metrics = loss(policy, batch)
        value.backward()
        assert policy.grad is not None
        results.append((value.detach(), policy.grad, values(metrics)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]


@pytest.mark.parametrize("correction", KINDS, ids=lambda kind: type(kind).__name__)
def test_absurd_disagreement_stays_finite(correction: Correction) -> None:
    batch = disagreement()
    for far in (-1000.0, -math.inf):
        sampled = torch.where(batch.mask, far, NAN)
        weights, _ = correction(log_ratio(batch.with_tokens(generation_logprobs=sampled)), batch)
        assert weights.isfinite().all()


def test_a_batch_with_nothing_to_train_has_no_metrics_to_mislead() -> None:
    batch = TokenBatch.from_sequences([[1, 2, 3]], [[False, False, False]])
    weights, metrics = SequenceMask()(torch.zeros(3), batch)
    assert weights.tolist() == [1.0, 1.0, 1.0]
    assert values(metrics) == {"sampling_importance_ratio": 0.0, "is_oob_ratio": 0.0}


def test_a_correction_travels_by_value() -> None:
    for kind in KINDS:
        loss = ClippedPolicyGradientLoss(correction=kind)
        assert pickle.loads(pickle.dumps(loss)) == loss


# Over microbatches and ranks


def drifted() -> TokenBatch:
    """The ragged batch with log-probs of both engines, responses off by up to 1 % and single tokens by far more."""
    batch = ragged_batch()
    generator = torch.Generator().manual_seed(5)
    per_sequence = torch.repeat_interleave(0.01 * torch.randn(len(batch), generator=generator), batch.lengths)
    sampled = torch.randn(batch.num_tokens, generator=generator) - 3
    gap = per_sequence + 2.0 * (torch.rand(batch.num_tokens, generator=generator) > 0.9)
    fields = {"generation_logprobs": sampled, "old_logprobs": sampled + gap}
    return batch.with_tokens(**{name: torch.where(batch.mask, field, NAN) for name, field in fields.items()})


@pytest.mark.parametrize("correction", [*KINDS, SequenceMask(0.9, 1.2)], ids=lambda kind: type(kind).__name__)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sharding_changes_neither_loss_nor_metrics(correction: Correction, ranks: int) -> None:
    batch = drifted()
    loss = ClippedPolicyGradientLoss(correction=correction)
    policy = torch.where(batch.mask, batch["old_logprobs"] + 0.05, NAN)
    whole, metrics = loss(policy, batch)
    shards = [batch.with_tokens(policy=policy).select(shard) for shard in batch.shards(ranks)]
    parts = [loss(shard["policy"], shard) for shard in shards]
    assert float(sum(value for value, _ in parts)) == pytest.approx(float(whole), rel=1e-5)
    expected, found = values(metrics), values(merge([part for _, part in parts]))
    assert found == pytest.approx(expected, rel=1e-5)
    for name in ("logprob_error/p50", "logprob_error/p999", "logprob_error/max"):
        assert found[name] == expected[name]


@pytest.mark.parametrize("on_policy", [False, True])
def test_microbatching_does_not_change_a_corrected_step(on_policy: bool) -> None:
    loss = ClippedPolicyGradientLoss(correction=SequenceMask(0.9, 1.2), on_policy=on_policy)
    found = []
    for budget in (10_000, 40, 1):
        policy = PolicyConfig(model_name=str(tiny_model()), microbatch_tokens=budget)
        backend = DTensorConfig().build(policy, WorkerContext(), reference=False)
        batch = drifted()
        gap = log_ratio(batch)
        old = backend.get_logprobs(batch)
        metrics = backend.train_step(batch.with_tokens(old_logprobs=old, generation_logprobs=old - gap), loss)
        found.append(values(metrics))
    assert 0 < found[0]["is_oob_ratio"] < 1
    for other in found[1:]:
        assert other["is_oob_ratio"] == found[0]["is_oob_ratio"]
        assert other["loss"] == pytest.approx(found[0]["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(found[0]["grad_norm"], rel=1e-5)


# In a config

BASE = {"algorithm": "grpo", "model": "some/model", "data": "arithmetic", "environment": "math"}


def corrected(value: Any) -> ImportanceCorrection | None:
    config = load_config({**BASE, "importance_correction": value})
    assert isinstance(config, GRPOConfig)
    return config.importance_correction


@pytest.mark.parametrize(
    ("written", "built"),
    [
        (None, None),
        ("plain", Plain()),
        ("truncated", Truncated(cap=2.0)),
        ("icepop", IcePop(low=0.5, high=5.0)),
        ("sequence_mask", SequenceMask(low=0.999, high=1.002)),
        ({"cap": 3}, Truncated(cap=3.0)),
        ({"kind": "sequence_mask", "high": 1.01}, SequenceMask(low=0.999, high=1.01)),
    ],
)
def test_a_correction_is_named_or_spelled_out(written: Any, built: Correction | None) -> None:
    assert build_correction(corrected(written)) == built


@pytest.mark.parametrize("kind", CORRECTION_BOUNDS)
def test_a_resolved_correction_loads_to_the_same(kind: str) -> None:
    config = corrected(kind)
    assert config is not None
    assert corrected(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("written", "path", "words"),
    [
        ("trunc", "importance_correction.kind", "Did you mean 'truncated'?"),
        ({"kind": "icepop", "cap": 2.0}, "importance_correction.cap", "icepop has no cap"),
        ({"kind": "plain", "low": 0.5}, "importance_correction.low", "plain has no low"),
        ({"kind": "icepop", "low": 1.5}, "importance_correction.low", "at most 1"),
        ({"cap": 0.0}, "importance_correction.cap", "greater than 0"),
        ({"cpa": 2.0}, "importance_correction.cpa", "Did you mean 'cap'?"),
        (3, "importance_correction", "expected a mapping"),
    ],
)
def test_a_mistake_in_a_correction_is_named(written: Any, path: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        corrected(written)
    (problem,) = caught.value.problems
    assert problem.path == path
    assert words in str(problem)


def test_a_run_applies_the_correction_it_is_told_to(tiny_model: Path, tmp_path: Path) -> None:
    from nemorl_cli.console import Console

    config = GRPOConfig(
        model=str(tiny_model),
        max_steps=1,
        num_prompts_per_step=2,
        num_generations_per_prompt=2,
        importance_correction="icepop",  # type: ignore[arg-type]
        policy={"init": "random", "max_sequence_tokens": 32},  # type: ignore[arg-type]
        generation={"max_new_tokens": 3},  # type: ignore[arg-type]
        run_dir=tmp_path / "run",
    )
    result = config.build().fit(
        [{"prompt": "1+1="}, {"prompt": "2+2="}], lambda prompt, response: len(response), console=Console(quiet=True)
    )
    assert result.metrics["train/is_oob_ratio"] == 0.0
    assert result.metrics["train/sampling_importance_ratio"] == pytest.approx(1.0, abs=1e-4)
    assert result.metrics["train/logprob_error/max"] < 1e-4
