"""Checks of a training backend whose steps are available in halves (capability ``halved_steps``).

# N = tokens of all sequences concatenated
"""

from __future__ import annotations

from typing import Any

import torch
from nemorl.contracts import AdamStep, HalvedSteps, TrainingBackend
from nemorl.errors import NemorlError
from nemorl.metrics import Metrics
from nemorl_tensors import TokenBatch
from torch import Tensor

from nemorl_testing.backends import build_trainer, difference, expect_close, norm, weights_of
from nemorl_testing.batches import Counted, Selective, WeightedNLL, ragged_batch
from nemorl_testing.kit import NotApplicable, Subject, expect

SHARP = AdamStep(lr=1e-2, betas=(0.0, 0.0), eps=1.0)
"""Its update is g / (|g| + 1) / 100 at every step: it shows the gradient."""
TOLERANCE = 2e-5
"""Largest allowed error of an update, relative to its norm: float32 sums in another order."""


class _Backend(TrainingBackend, HalvedSteps):
    """A backend with both protocols."""


def check_two_halves_are_a_train_step(subject: Subject) -> None:
    """forward_backward and optimizer_step leave the weights and say the metrics that train_step does. (DESIGN 9)"""
    whole, halves, batch = _backend(subject), _backend(subject), ragged_batch()
    for _ in range(2):
        once = whole.train_step(batch, Counted())
        passed, _ = halves.forward_backward(batch, Counted())
        twice = {**passed, **halves.optimizer_step()}
        expect(_told(once) == _told(twice), f"train_step says {_told(once)}, its halves {_told(twice)}")
    error = norm(difference(weights_of(halves), weights_of(whole)))
    expect(error == 0.0, f"after two steps the weights are {error:.3g} apart")


def check_gradients_of_several_calls_add_up(subject: Subject) -> None:
    """Two calls with a part of a batch each, and one update: that of the batch. What is measured between them adds
    nothing. (DESIGN 9)"""
    whole, parts, batch = _backend(subject), _backend(subject), ragged_batch()
    before = weights_of(whole)
    whole.forward_backward(batch, WeightedNLL())
    whole.optimizer_step(SHARP)
    half = len(batch) // 2
    parts.forward_backward(batch.select(range(half)), WeightedNLL())
    parts.forward(batch, WeightedNLL())
    parts.get_logprobs(batch)
    parts.forward_backward(batch.select(range(half, len(batch))), WeightedNLL())
    parts.optimizer_step(SHARP)
    update, error = difference(weights_of(whole), before), difference(weights_of(parts), weights_of(whole))
    expect(norm(error) <= TOLERANCE * norm(update), f"the update is {norm(error) / norm(update):.3g} off")


def check_a_pass_says_what_its_loss_was_given(subject: Subject) -> None:
    """Both passes return the log-probs before the update, each at its place, of all sequences. (DESIGN 9)"""
    backend, batch = _backend(subject), ragged_batch()
    expected = backend.get_logprobs(batch)
    for loss in (WeightedNLL(), Selective()):
        _, trained = backend.forward_backward(batch, loss)
        _, measured = backend.forward(batch, loss)
        for found in (trained, measured):
            expect(found.dtype == torch.float32 and not found.requires_grad, f"got {found.dtype}")
            expect_close(found, expected, subject.settings.tolerance, "a log-prob of the pass")


def check_a_step_takes_the_adam_it_is_given(subject: Subject) -> None:
    """lr, weight decay, eps and clipping of an ``AdamStep`` are those of this update alone. (DESIGN 9)"""
    first = _sharp_update(subject, SHARP)
    doubled = _sharp_update(subject, AdamStep(2 * SHARP.lr, SHARP.betas, SHARP.eps))
    expect_close(doubled / first, torch.tensor(2.0), 1e-3, "the update at twice the rate, to that at the rate,")
    # With an eps far above the gradient the update is proportional to it, and so to what clipping leaves of it.
    backend = _backend(subject)
    backend.forward_backward(ragged_batch(), WeightedNLL())
    grad_norm = float(backend.optimizer_step(AdamStep(0.0))["grad_norm"].value)
    blunt = AdamStep(1e5, SHARP.betas, 1e5)
    clipped = AdamStep(1e5, SHARP.betas, 1e5, max_grad_norm=grad_norm / 4)
    ratio = _sharp_update(subject, clipped) / _sharp_update(subject, blunt)
    expect_close(ratio, torch.tensor(0.25), 1e-3, "a gradient clipped to a quarter of its norm, to the whole,")
    _expect_the_next_step_is_usual(subject)


def check_a_pass_that_failed_midway_is_not_applied(subject: Subject) -> None:
    """After a loss that raised nothing is updated until the gradients are cleared; then all is well. (DESIGN 9)"""
    backend, other, batch = (
        _backend(subject, microbatch_tokens=8),
        _backend(subject, microbatch_tokens=8),
        ragged_batch(),
    )
    try:
        backend.forward_backward(batch, _FailsLater())
    except NemorlError:
        pass
    else:
        expect(False, "a loss that raises is not reported")
    try:
        backend.optimizer_step()
    except NemorlError:
        pass
    else:
        expect(False, "a part of a gradient was applied")
    backend.clear_gradients()
    for each in (backend, other):
        each.forward_backward(batch, WeightedNLL())
        each.optimizer_step()
    error = norm(difference(weights_of(backend), weights_of(other)))
    expect(error == 0.0, f"after the failure the weights are {error:.3g} off")


class _FailsLater(WeightedNLL):
    """Raises at its second microbatch."""

    calls = 0

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        type(self).calls += 1
        if type(self).calls > 1:
            raise ValueError("raised on purpose")
        return super().__call__(logprobs, batch)


def _backend(subject: Subject, **policy: Any) -> _Backend:
    if "halved_steps" not in subject.config.supports:
        raise NotApplicable("the backend does not declare supports={'halved_steps'}")
    if subject.settings.policy.get("precision", "float32") != "float32":
        raise NotApplicable("updates are compared in float32: rounded weights hide their differences")
    backend: Any = build_trainer(subject, **policy)
    return backend  # type: ignore[no-any-return]


def _sharp_update(subject: Subject, adam: AdamStep) -> Tensor:
    """The size of a fresh backend's first update."""
    backend = _backend(subject)
    before = weights_of(backend)
    backend.forward_backward(ragged_batch(), WeightedNLL())
    lr = float(backend.optimizer_step(adam)["lr"].value)
    expect(abs(lr - adam.lr) <= 1e-9 * adam.lr, f"lr is reported as {lr}, not {adam.lr}")
    return torch.tensor(norm(difference(weights_of(backend), before)))


def _expect_the_next_step_is_usual(subject: Subject) -> None:
    """Weight decay of one step, and then a step as the config says."""
    usual, decayed = _backend(subject), _backend(subject)
    for backend, adam in ((usual, AdamStep(0.0, weight_decay=0.0)), (decayed, AdamStep(0.0, weight_decay=0.5))):
        backend.forward_backward(ragged_batch(), WeightedNLL())
        backend.optimizer_step(adam)  # at rate 0 nothing moves, and nothing decays
        backend.train_step(ragged_batch(), WeightedNLL())
    error = norm(difference(weights_of(decayed), weights_of(usual)))
    expect(error == 0.0, f"the values of one step are still used in the next: {error:.3g} apart")


def _told(metrics: Metrics) -> dict[str, Any]:
    """What is said of the batch and the update, not of the time that it took."""
    return {name: metric for name, metric in sorted(metrics.items()) if not name.startswith("performance/")}
