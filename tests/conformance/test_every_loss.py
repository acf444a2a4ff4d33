"""Every loss of every installed algorithm, on log ratios that no sane run has: loss and gradient stay finite.

# N = tokens of all sequences concatenated, B = sequences, K = candidates

One token whose gradient is NaN costs the whole optimizer step, so this holds for whatever a batch may contain.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import math
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from nemorl.contracts import SelectiveLoss
from nemorl.metrics import merge, values
from nemorl.plugins import registry
from nemorl_distillation.loss import TopKDistillationLoss
from nemorl_distillation.reverse_kl import SampledReverseKLLoss
from nemorl_grpo.loss_cispo import CappedWeightLoss
from nemorl_grpo.loss_clip_cov import ClipCovLoss
from nemorl_grpo.loss_dppo import DivergenceMaskLoss
from nemorl_grpo.loss_dro import QuadraticDriftLoss
from nemorl_grpo.loss_gmpo import GeometricMeanLoss
from nemorl_grpo.loss_gspo import SequenceRatioLoss
from nemorl_grpo.loss_kl_cov import KLCovLoss
from nemorl_grpo.loss_sapo import SoftGateLoss
from nemorl_grpo.loss_vespo import GammaWeightLoss
from nemorl_ppo.loss import PPOLoss
from nemorl_ppo.value_loss import ValueLoss
from nemorl_preference.dpo.hinge import HingeLoss
from nemorl_preference.dpo.ipo import IPOLoss
from nemorl_preference.dpo.preference import PreferenceLoss
from nemorl_preference.dpo.sigmoid import SigmoidLoss
from nemorl_preference.kto.loss import KTOLoss
from nemorl_preference.likelihood import LikelihoodPairLoss
from nemorl_preference.orpo.loss import ORPOLoss
from nemorl_preference.rm.loss import BradleyTerryLoss
from nemorl_preference.simpo.loss import SimPOLoss
from nemorl_rl.policy_gradient.correction import IcePop, KPop, OfSequences, Plain, SequenceMask, Truncated
from nemorl_rl.policy_gradient.loss import ClippedPolicyGradientLoss, PolicyGradientLoss
from nemorl_rl.policy_gradient.token_masks import HighEntropyMask, OffPolicyMask, StaleTokenMask
from nemorl_sft.loss import NLLLoss
from nemorl_tensors import KLTerm, TokenBatch
from torch import Tensor

NAN, INF = math.nan, math.inf
LOG_RATIOS = (0.0, 0.3, -0.3, 19.0, 20.0, 21.0, -21.0, 87.0, 88.0, 89.0, 90.0, 200.0, 1e3, -90.0, -200.0, -1e3)
"""Nats. ``exp`` overflows float32 at 88.7, and in the gradient of a square or a product earlier."""
NEAR = (0.0, 0.3, -0.3, 1.0, -2.0)
ADVANTAGES = (0.0, 1.0, -1.0, 5.0, -5.0)
SAMPLER = (-1.0, -50.0, -1e3, INF, -INF)

CORRECTIONS = (
    None,
    Plain(),
    Truncated(),
    Truncated(low=0.5),
    IcePop(),
    SequenceMask(),
    SequenceMask(0.0, 1e30),
    KPop(),
    OfSequences(Plain()),
)
TERMS = tuple(
    itertools.starmap(
        KLTerm,
        itertools.product(
            ("k1", "k2", "k3"),
            (20.0, 40.0),
            (10.0, None),
            ("unbiased", "expectation", "estimator"),
            (None, "generation"),
        ),
    )
)
FAMILY: tuple[type[PolicyGradientLoss], ...] = (
    ClippedPolicyGradientLoss,
    SequenceRatioLoss,
    CappedWeightLoss,
    SoftGateLoss,
    GeometricMeanLoss,
    ClipCovLoss,
)
HELD_BACK: tuple[type[PolicyGradientLoss], ...] = (QuadraticDriftLoss, KLCovLoss)
"""Losses with a penalty of their own: a token without an advantage has a gradient, too."""
OF_THE_SAMPLER = (DivergenceMaskLoss(), DivergenceMaskLoss("kl", 0.05, 0.05), GammaWeightLoss())
"""Losses whose ratio is that to the sampler: nothing corrects them."""
DRIFTING = DivergenceMaskLoss(drift_penalty=1e-3)
LOSSES: list[Any] = [
    *(kind(kl_penalty=0.1, correction=correction) for kind in (*FAMILY, *HELD_BACK) for correction in CORRECTIONS),
    *(ClippedPolicyGradientLoss(kl_penalty=0.1, kl=term) for term in TERMS),
    *(kind(kl_penalty=0.1, kl=KLTerm(weighted_by="generation")) for kind in FAMILY[1:]),
    *(kind(kl_penalty=0.1, on_policy=True, correction=Plain()) for kind in FAMILY),
    *OF_THE_SAMPLER,
    QuadraticDriftLoss(on_policy=True),
    DRIFTING,
    ClippedPolicyGradientLoss(token_masks=(OffPolicyMask(0.5), HighEntropyMask(), StaleTokenMask(1))),
    ClippedPolicyGradientLoss(dual_clip=3.0),
    PPOLoss(dual_clip=3.0, kl_penalty=0.1, positive_nll_weight=0.1),
    PPOLoss(kl_penalty=0.1, kl=KLTerm("k2", weighted_by="old")),
    ValueLoss(),
    ValueLoss(clip=0.2),
    SampledReverseKLLoss(),
    SampledReverseKLLoss(on_policy=False),
    SampledReverseKLLoss(on_policy=False, is_weighted=True),
    *(
        TopKDistillationLoss(kind, 0.5, outside)  # type: ignore[arg-type]
        for kind in ("forward", "reverse", "mixed", "jsd")
        for outside in ("tail", "renormalize", "zero")
    ),
    TopKDistillationLoss(teachers=(("a", 1.0), ("b", 2.0), ("c", 0.5))),
    TopKDistillationLoss(uncommon_weight=0.5),
    TopKDistillationLoss("jsd", jsd_beta=0.1, uncommon_weight=0.5, sft_weight=0.5),
    SigmoidLoss(beta=0.1, label_smoothing=0.1, sft_weight=1.0),
    SigmoidLoss(beta=10.0, average=True),
    HingeLoss(beta=0.1),
    IPOLoss(beta=0.1, average=True),
    KTOLoss(beta=0.1, desirable_weight=2.0),
    ORPOLoss(beta=0.1),
    SimPOLoss(beta=2.0, sft_weight=0.5, label_smoothing=0.1),
    BradleyTerryLoss(center_weight=0.1),
    NLLLoss(),
]
ABSTRACT = {PolicyGradientLoss, PreferenceLoss, LikelihoodPairLoss}
MASKS = "nemorl_rl.policy_gradient.token_masks"
"""Parts of losses, which read fields too."""


def shipped_losses() -> Iterator[type]:
    """Every class that reads batch fields and is no transform, in the packages of algorithms and what these share."""
    names = dict.fromkeys(entry.name for entry in registry().index.of_kind("algorithms"))
    del names["client_loop"]  # its losses are formulas of the Tinker API, in a client's own fields (test_tinker_losses)
    packages = [registry().load("algorithms", name).trainer.partition(".")[0] for name in names]
    for package in dict.fromkeys([*packages, "nemorl_rl.policy_gradient"]):
        root = importlib.import_module(package)
        for module in pkgutil.walk_packages(root.__path__, f"{package}."):
            for _, found in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
                if found.__module__ == module.name != MASKS and "requires" in dir(found) and not is_transform(found):
                    yield found


def is_transform(found: Any) -> bool:
    """A batch transform, which reads fields too."""
    return "samples" in inspect.signature(found.__call__).parameters


def test_every_shipped_loss_is_tried_here() -> None:
    shipped = set(shipped_losses()) - ABSTRACT
    assert shipped
    assert shipped == {type(loss) for loss in LOSSES}


def picked(choices: tuple[float, ...], shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.tensor(choices)[torch.randint(len(choices), shape, generator=generator)]


def drawn_batch(
    seed: int, level: Any = "token", log_ratios: tuple[float, ...] = LOG_RATIOS, sampler: tuple[float, ...] = SAMPLER
) -> tuple[Tensor, TokenBatch]:
    """Policy log-probs [N] and a batch of 4 pairs whose fields are that far from them; masked slots hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 7, (8,), generator=generator).tolist()
    shape = TokenBatch.from_sequences(
        [[1] * n for n in lengths],
        [[t > 0 and t % 3 != 0 for t in range(n)] for n in lengths],
        loss_aggregation=level,
        sequences_per_group=2,
    )
    size = (shape.num_tokens,)
    policy = -torch.rand(size, generator=generator) - 0.1

    def away() -> Tensor:
        return policy - picked(log_ratios, size, generator)

    fields = {
        "advantages": picked(ADVANTAGES, size, generator),
        "old_logprobs": away(),
        "reference_logprobs": away(),
        "generation_logprobs": picked(sampler, size, generator),
        "teacher_logprobs": torch.where(picked((0.0, 1.0), size, generator) > 0, away(), -INF),
        "teacher_weights": picked((0.5, 3.0), size, generator),
        "returns": picked(log_ratios, size, generator),
        "old_values": picked(log_ratios, size, generator),
        "positive_weights": shape.loss_weights,
        "nll_weights": shape.loss_weights,
        "staleness": picked((0.0, 1.0, 3.0), size, generator),
    }
    batch = shape.with_tokens(
        response_mask=shape.mask, **{name: torch.where(shape.mask, field, NAN) for name, field in fields.items()}
    )
    marks = {name: picked((0.0, 1.0), size, generator) > 0 for name in ("covariant", "high_entropy")}
    batch = batch.with_tokens(**marks)
    of_sequences = {
        "reference_response_logprobs": picked((0.0, -1e3, -1e5, 1e4), (8,), generator),
        "reference_points": picked((0.0, 1.0, 1e3), (1,), generator).expand(8),
        "is_given": picked((0.0, 1.0), (8,), generator) > 0,
        "desirable": picked((0.0, 1.0), (8,), generator) > 0,
        "margins": picked((0.0, 1.0, -1e3), (4,), generator).repeat_interleave(2),
    }
    return torch.where(shape.mask, policy, NAN), batch.with_sequences(**of_sequences)


def with_candidates(batch: TokenBatch, seed: int) -> tuple[Tensor, TokenBatch]:
    """Log-probs of the student for 3 candidates [N, K]; the teacher knows some of them not at all."""
    generator, shape = torch.Generator().manual_seed(seed), (batch.num_tokens, 3)
    student, teacher = (
        torch.log_softmax(picked((0.0, 1.0, 5.0, 90.0, -200.0, -1e3), (*shape[:1], 5), generator), 1)[:, :3]
        for _ in range(2)
    )
    teacher = torch.where(picked((0.0, 0.0, 1.0), shape, generator) > 0, -INF, teacher)
    mask = batch.mask[:, None]
    ids = torch.zeros(shape, dtype=torch.int64)
    numbers = picked((0.0, 1.0, 2.0), shape, generator).long()
    batch = batch.with_tokens(candidate_ids=ids, teacher_logprobs=torch.where(mask, teacher, NAN), teacher_ids=numbers)
    return torch.where(mask, student, NAN), batch


def with_own_candidates(outputs: Tensor, batch: TokenBatch, seed: int) -> tuple[Tensor, TokenBatch]:
    """As many candidates of the student's own, some of which the teacher lacks, and what the student lacks."""
    generator, mask = torch.Generator().manual_seed(seed), batch.mask[:, None]
    own, theirs = (torch.log_softmax(picked((0.0, 5.0, -1e3), outputs.shape, generator), 1) for _ in range(2))
    theirs = torch.where(picked((0.0, 1.0), outputs.shape, generator) > 0, theirs, -INF)
    batch = batch.with_tokens(
        teacher_uncommon=torch.where(mask, theirs, NAN),
        student_uncommon=picked((0.0, 1.0), outputs.shape, generator) > 0,
    )
    return torch.cat([outputs, torch.where(mask, own, NAN)], 1), batch


def batch_for(loss: Any, seed: int, *drawn: Any, **named: Any) -> tuple[Tensor, TokenBatch]:
    """What the model says, and a batch with all that the loss reads."""
    policy, batch = drawn_batch(seed, *drawn, **named)
    outputs = policy
    if "candidate_ids" in loss.requires:
        outputs, batch = with_candidates(batch, seed)
    if "student_uncommon" in loss.requires:
        outputs, batch = with_own_candidates(outputs, batch, seed)
    if "is_given" in loss.requires:
        outputs = torch.cat([outputs, policy[:, None]], 1)
    return outputs, batch


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
@pytest.mark.parametrize("level", ["token", "sequence", "sequence_sum"])
def test_no_log_ratio_makes_a_loss_or_its_gradient_nan(loss: Any, level: str) -> None:
    for seed in range(5):
        outputs, batch = batch_for(loss, seed, level)
        outputs = outputs.requires_grad_()
        value, metrics = loss(outputs, batch)
        value.backward()
        assert outputs.grad is not None
        assert math.isfinite(float(value.detach()))
        assert bool(outputs.grad.isfinite().all())
        assert bool((outputs.grad[~batch.mask] == 0).all())
        assert not any(math.isnan(number) for number in values(metrics).values())


SELECTIVE = [
    *(kind(correction=correction) for kind in FAMILY for correction in CORRECTIONS),
    *(kind(on_policy=True) for kind in FAMILY),
    *(loss for loss in LOSSES if isinstance(loss, SelectiveLoss)),
    PPOLoss(positive_nll_weight=0.1),
]


@pytest.mark.parametrize("loss", SELECTIVE, ids=lambda loss: type(loss).__name__)
def test_what_a_loss_says_has_no_gradient_has_none_whatever_the_log_ratios(loss: SelectiveLoss) -> None:
    seen: set[bool] = set()
    for seed in range(8):
        outputs, batch = drawn_batch(seed)
        generator = torch.Generator().manual_seed(seed)
        teaches, is_right = (torch.rand((2, 8), generator=generator) < 0.5)[:, batch.sequence_ids]
        fields = {"advantages": torch.where(teaches, batch["advantages"], 0.0)}
        batch = batch.with_tokens(**fields, positive_weights=torch.where(is_right, batch.loss_weights, 0.0))
        outputs.requires_grad_()
        loss(outputs, batch)[0].backward()  # type: ignore[no-untyped-call]
        assert outputs.grad is not None
        has_gradient = loss.has_gradient(batch)
        assert bool((outputs.grad[~has_gradient[batch.sequence_ids]] == 0).all())
        seen |= set(has_gradient.tolist())
    everywhere = getattr(loss, "kl_penalty", 0.0) or loss == DRIFTING
    assert seen == ({True} if everywhere else {True, False})


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_loss_and_metrics_of_parts_are_those_of_the_whole(loss: Any) -> None:
    """Microbatches and ranks see parts; whatever is logged must not depend on the cut."""
    for seed in range(3):
        outputs, batch = batch_for(loss, seed, "sequence", NEAR, (-0.5, -1.0, -2.0))
        whole, metrics = loss(outputs, batch)
        ends = torch.cumsum(batch.lengths, 0).tolist()
        parts = []
        for first, last in ((0, 2), (2, 8)):
            start, end = 0 if first == 0 else ends[first - 1], ends[last - 1]
            parts.append(loss(outputs[start:end], batch.select(range(first, last))))
        assert float(sum(value for value, _ in parts)) == pytest.approx(float(whole), rel=1e-4, abs=1e-5)
        expected, found = values(metrics), values(merge([part for _, part in parts]))
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


def one_token(advantage: float, log_ratio: float, **fields: float) -> tuple[Tensor, TokenBatch]:
    """A prompt token and a response token whose policy log-prob is -1."""
    shape = TokenBatch.from_sequences([[5, 6]], [[False, True]])
    held = {"advantages": advantage, "old_logprobs": -1.0 - log_ratio, "generation_logprobs": -1.0, **fields}
    batch = shape.with_tokens(**{name: torch.tensor([NAN, value]) for name, value in held.items()})
    batch = batch.with_tokens(covariant=torch.tensor([True, False]))
    return torch.tensor([NAN, -1.0], requires_grad=True), batch


@pytest.mark.parametrize(
    ("loss", "advantage", "log_ratio", "expected"),
    [
        (ClippedPolicyGradientLoss(), 1.0, 90.0, -1.2),  # clipped at 1 + 0.2
        (ClippedPolicyGradientLoss(dual_clip=3.0), -1.0, 90.0, 3.0),
        (ClippedPolicyGradientLoss(), 0.0, 200.0, 0.0),
        (SequenceRatioLoss(), 1.0, 89.0, -1.0004),
        (CappedWeightLoss(), 1.0, 200.0, 5.0),  # -cap * A * policy
        (PPOLoss(), 1.0, 90.0, -1.2),
        (ClippedPolicyGradientLoss(), -1.0, 90.0, math.exp(20.0)),  # pushed back with the largest ratio there is
    ],
)
def test_a_token_beyond_the_range_of_exp_is_clipped_like_any_other(
    loss: Any, advantage: float, log_ratio: float, expected: float
) -> None:
    policy, batch = one_token(advantage, log_ratio)
    value, _ = loss(policy, batch)
    value.backward()
    assert float(value.detach()) == pytest.approx(expected, rel=1e-6)
    assert policy.grad is not None
    slope = -5.0 if isinstance(loss, CappedWeightLoss) else 0.0
    assert policy.grad.tolist() == [0.0, slope]


@pytest.mark.parametrize("correction", CORRECTIONS[1:], ids=lambda kind: type(kind).__name__)
@pytest.mark.parametrize("kind", FAMILY)
@pytest.mark.parametrize("sampled", [-INF, INF])
def test_a_token_that_the_sampler_cannot_have_drawn_weighs_nothing_and_is_counted(
    correction: Any, kind: type[PolicyGradientLoss], sampled: float
) -> None:
    policy, batch = one_token(1.0, 0.0, generation_logprobs=sampled)
    value, metrics = kind(correction=correction)(policy, batch)
    value.backward()
    assert float(value.detach()) == 0.0
    assert policy.grad is not None
    assert policy.grad.tolist() == [0.0, 0.0]
    assert values(metrics)["nonfinite_sampler_logprobs"] == 1.0
    assert values(metrics)["sampling_importance_ratio"] == 0.0


def test_one_token_far_from_the_reference_does_not_decide_the_step() -> None:
    # k3 at 18 nats is e^18 = 65,659,969: its slope, times 0.1 and a weight of 1/2, was 3.3e6. Bounded: none.
    shape = TokenBatch.from_sequences([[5, 6, 7]], [[False, True, True]])
    batch = shape.with_tokens(
        advantages=torch.zeros(3),
        generation_logprobs=torch.full((3,), -1.0),
        reference_logprobs=torch.tensor([NAN, 17.0, -1.5]),
    )
    norms = {}
    for bound in (10.0, None):
        policy = torch.tensor([NAN, -1.0, -1.0], requires_grad=True)
        term = KLTerm(output_clamp=bound, gradient="estimator")
        loss = ClippedPolicyGradientLoss(kl_penalty=0.1, kl=term, on_policy=True)
        value, metrics = loss(policy, batch)
        value.backward()
        assert policy.grad is not None
        norms[bound] = policy.grad.tolist()
        if bound:
            # (10 + k3(-0.5)) / 2, and k3 = e^-0.5 - 1 + 0.5 = 0.106531
            assert values(metrics)["kl_penalty"] == pytest.approx(5.053265, abs=1e-5)
    assert norms[10.0][1] == 0.0
    assert norms[10.0][2] == norms[None][2] != 0.0
    assert abs(norms[None][1]) > 3e6


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_within_the_bounds_nothing_changes_by_a_bit(level: str) -> None:
    """The equations as they are printed, without any bound."""
    for seed in range(20):
        outputs, batch = drawn_batch(seed, level)
        mask, generator = batch.mask, torch.Generator().manual_seed(100 + seed)
        near = {
            name: torch.where(mask, outputs + torch.randn(outputs.shape, generator=generator), NAN)
            for name in ("old_logprobs", "generation_logprobs")
        }
        batch = batch.with_tokens(**near)
        for loss in (ClippedPolicyGradientLoss(), ClippedPolicyGradientLoss(correction=Plain())):
            found, plain = outputs.clone().requires_grad_(), outputs.clone().requires_grad_()
            loss(found, batch)[0].backward()
            ratio = torch.exp(torch.where(mask, plain - batch["old_logprobs"], 0.0))
            advantages = torch.where(mask, batch["advantages"], 0.0)
            per_token = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            if loss.correction is not None:
                gap = torch.where(mask, batch["old_logprobs"] - batch["generation_logprobs"], 0.0)
                per_token = torch.exp(gap) * per_token
            (per_token * batch.loss_weights).sum().backward()
            assert found.grad is not None
            assert plain.grad is not None
            assert torch.equal(found.grad, plain.grad)
