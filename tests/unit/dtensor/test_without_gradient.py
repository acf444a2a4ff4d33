"""Sequences that a loss has no gradient for get no backward pass, and nobody can tell from what comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from batch_metrics import of_the_batch
from nemorl.errors import ForeignError
from nemorl.metrics import Metrics, values
from nemorl_dtensor.training import DTensorBackend
from nemorl_grpo.loss_cispo import CappedWeightLoss
from nemorl_grpo.loss_gspo import SequenceRatioLoss
from nemorl_rl.policy_gradient.correction import SequenceMask, Truncated
from nemorl_rl.policy_gradient.loss import ClippedPolicyGradientLoss
from nemorl_tensors import TokenBatch
from recorded_messages import Raises
from torch import Tensor
from transformers import AutoModelForCausalLM

from .conftest import Build
from .test_train_step import assert_same_gradients, gradients

STILL = {"lr": 1e-30, "weight_decay": 0.0}
"""AdamW that moves nothing: float32 weights are the same after its steps."""
LOSSES = {
    "on policy": ClippedPolicyGradientLoss(on_policy=True),
    "off policy": ClippedPolicyGradientLoss(dual_clip=3.0, correction=Truncated()),
    "per sequence": SequenceRatioLoss(correction=SequenceMask(0.0, 9.0)),
    "capped": CappedWeightLoss(),
}


class Hides:
    """A loss without ``has_gradient``: all its sequences get a backward pass."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @property
    def requires(self) -> frozenset[str]:
        return self.inner.requires

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> Any:
        return self.inner(policy_logprobs, batch)


def told(metrics: Metrics) -> dict[str, float]:
    """What a step says of the batch, not of its own time and work."""
    return values(of_the_batch(metrics))


def with_zeros(batch: TokenBatch, backend: DTensorBackend, seed: int) -> TokenBatch:
    """About half of the sequences without an advantage, and log-probs near those of the policy."""
    draw = torch.Generator().manual_seed(seed)
    teaches = torch.rand(len(batch), generator=draw) < 0.5
    near = [backend.get_logprobs(batch) + 0.1 * torch.randn(batch.num_tokens, generator=draw) for _ in range(2)]
    return batch.with_tokens(
        advantages=torch.where(teaches[batch.sequence_ids], batch["advantages"], 0.0),
        old_logprobs=near[0],
        generation_logprobs=near[1],
    )


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.slow
def test_gradients_and_metrics_are_those_of_a_step_that_goes_back_through_all(
    name: str, layout: str, build: Build, batch: TokenBatch
) -> None:
    shares = []
    for seed in range(4):
        backend = build(microbatch_tokens=40, options={"layout": layout}, optimizer=STILL)
        some = with_zeros(batch, backend, seed)
        assert_same_gradients(gradients(backend, some, LOSSES[name]), gradients(backend, some, Hides(LOSSES[name])))
        found = told(backend.train_step(some, LOSSES[name]))
        shares.append(found.pop("skipped_backward_frac"))
        assert found == pytest.approx(told(backend.train_step(some, Hides(LOSSES[name]))), rel=1e-5, abs=1e-6)
    assert max(shares) > 0.3


def test_a_step_in_which_every_sequence_teaches_is_the_same_bit_for_bit(build: Build, batch: TokenBatch) -> None:
    loss = LOSSES["on policy"]
    batch = batch.with_tokens(generation_logprobs=batch["advantages"])
    one, other = (gradients(build(microbatch_tokens=40), batch, each) for each in (loss, Hides(loss)))
    assert all(bool((one[name] == other[name]).all()) for name in one)


def test_where_nothing_teaches_momentum_and_decay_move_the_weights_as_ever(build: Build, batch: TokenBatch) -> None:
    """AdamW leaves a parameter without gradient alone, and moves one whose gradient is 0."""
    found = []
    for loss in (LOSSES["on policy"], Hides(LOSSES["on policy"])):
        backend = build(microbatch_tokens=40, optimizer={"lr": 1e-2, "weight_decay": 0.1})
        full = batch.with_tokens(generation_logprobs=batch["advantages"])
        backend.train_step(full, loss)
        metrics = backend.train_step(full.with_tokens(advantages=torch.zeros(batch.num_tokens)), loss)
        assert metrics["grad_norm"].value == 0.0
        found.append({name: p.detach().clone() for name, p in backend._trainable.items()})
    assert_same_gradients(found[0], found[1])


def test_the_gradient_is_that_of_plain_transformers_over_all_sequences(
    pretrained: Path, build: Build, batch: TokenBatch
) -> None:
    """On policy d loss / d theta = -sum over ALL trained tokens' weights of A * d logprob; zeros add nothing to it."""
    backend = build(microbatch_tokens=40)
    some = with_zeros(batch, backend, seed=1)
    found = gradients(backend, some, LOSSES["on policy"])

    model = AutoModelForCausalLM.from_pretrained(pretrained)
    trained = int(some.mask.sum())  # the mean is over all of them, also those that teach nothing
    start = 0
    for length in some.lengths.tolist():
        ids, keep = some.token_ids[start : start + length], some.mask[start : start + length][1:]
        logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0]
        advantages = some["advantages"][start + 1 : start + length]
        if length > 1:
            (-(logprobs * advantages)[keep].sum() / trained).backward()
        start += length
    assert_same_gradients(found, {name: p.grad for name, p in model.named_parameters()}, 1e-5)


def test_an_objective_that_hides_its_bonus_from_has_gradient_ends_the_step(
    build: Build, batch: TokenBatch, raises: Raises
) -> None:
    class Bonus:
        def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> Any:
            loss, metrics = super().__call__(policy_logprobs, batch)  # type: ignore[misc]
            return loss + 0.5 * torch.where(batch.mask, policy_logprobs, 0.0).sum(), metrics

    class Mixed(Bonus, ClippedPolicyGradientLoss):
        pass

    backend = build(microbatch_tokens=40)
    some = with_zeros(batch, backend, seed=1)
    with raises(ForeignError, "Mixed", "has_gradient"):
        backend.train_step(some, Mixed(on_policy=True))


def test_resuming_in_the_middle_is_exact(build: Build, batch: TokenBatch, tmp_path: Path) -> None:
    straight = build(microbatch_tokens=40)
    steps = [with_zeros(batch, straight, seed) for seed in range(4)]
    for some in steps[:2]:
        straight.train_step(some, LOSSES["off policy"])
    straight.save_checkpoint(tmp_path)
    resumed = build(microbatch_tokens=40, seed=7)
    resumed.load_checkpoint(tmp_path)
    for some in steps[2:]:
        one, other = (backend.train_step(some, LOSSES["off policy"]) for backend in (straight, resumed))
        assert told(one) == told(other)
    for name, parameter in straight._trainable.items():
        assert bool((parameter == resumed._trainable[name]).all())
