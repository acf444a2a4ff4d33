"""Checks of training backends beyond the log-probs of tokens: values, candidates, pairs, pieces of weights, shared
prefixes, and a gradient of zero.

# N = tokens of all sequences concatenated, G = groups of coupled sequences, K = candidates per token
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from nemorl.contracts import PublishesPieces, TrainingBackend
from nemorl.errors import NemorlError
from nemorl.metrics import Max, Metrics
from nemorl.weights import IN_PROCESS
from nemorl_tensors import TokenBatch, segment_sum
from nemorl_tensors.engines.pieces import SpreadHandle
from torch import Tensor

from nemorl_testing.backends import (
    build_trainer,
    difference,
    expect_close,
    model_folder,
    norm,
    policy_config,
    reference,
    weights_of,
    worker,
)
from nemorl_testing.batches import WeightedNLL, branching_batch, ragged_batch
from nemorl_testing.kit import NotApplicable, Subject, expect

K = 3
"""Candidates per token"""


@dataclass(frozen=True)
class PairLoss:
    """loss = sum over pairs of softplus(second - first), each the sum of its sequence's log-probs.

    Reports ``strangers``: 1 where two neighbours are not of one pair.
    """

    requires: ClassVar[frozenset[str]] = frozenset({"pair"})

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        even = len(batch) % 2 == 0
        together = even and bool((batch["pair"][0::2] == batch["pair"][1::2]).all())
        metrics: Metrics = {"strangers": Max(float(not together))}
        if not together:
            return policy_logprobs.sum() * 0.0, metrics
        sums = segment_sum(policy_logprobs, batch.mask, batch.lengths)
        return torch.nn.functional.softplus(sums[1::2] - sums[0::2]).sum(), metrics


@dataclass(frozen=True)
class CandidateNLL:
    """``WeightedNLL`` read from the first of the candidates."""

    requires: ClassVar[frozenset[str]] = frozenset({"advantages", "candidate_ids"})

    def __call__(self, candidate_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        return WeightedNLL()(candidate_logprobs[:, 0], batch)


@dataclass(frozen=True)
class SquaredError:
    """loss = sum(loss_weights * (value - target)^2)."""

    requires: ClassVar[frozenset[str]] = frozenset({"targets"})

    def __call__(self, values: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        error = torch.where(batch.mask, values - batch["targets"], 0.0)
        return (error.square() * batch.loss_weights).sum(), {}


def check_coupled_sequences_stay_together(subject: Subject) -> None:
    """A loss finds the sequences of a group together and in order, in every microbatch. (DESIGN 7.5)"""
    whole = ragged_batch()
    pairs = replace(whole.select([0, 5, 2, 3, 4, 1, 7, 6]), sequences_per_group=2)
    pairs = pairs.with_sequences(pair=torch.arange(8) // 2)
    updates = []
    for tokens in (100_000, 1):
        backend = build_trainer(
            subject, optimizer={"lr": 1.0, "eps": 1.0, "weight_decay": 0.0}, microbatch_tokens=tokens
        )
        before = weights_of(backend)
        metrics = backend.train_step(pairs, PairLoss())
        expect(metrics["strangers"].value == 0, f"with microbatch_tokens={tokens} a pair was torn apart")
        updates.append(difference(weights_of(backend), before))
    gap, size = norm(difference(*updates)), norm(updates[0])
    expect(size > 0, "the update is zero: this check proves nothing")
    expect(gap <= 2e-5 * size, f"microbatches change the update by {gap:.3g} of {size:.3g}")


def check_likeliest_tokens_are_those_of_transformers(subject: Subject) -> None:
    """get_topk_logprobs gives the K likeliest tokens in order, with log-probs of the whole vocabulary. (DESIGN 5)"""
    _require(subject, "topk_logprobs")
    batch = ragged_batch(temperature=0.7)
    ids, logprobs = (found.cpu() for found in build_trainer(subject).get_topk_logprobs(batch, K))
    expect(tuple(ids.shape) == (batch.num_tokens, K) and ids.dtype == torch.int64, f"ids are {ids.shape} {ids.dtype}")
    expect(not logprobs[~batch.mask].any() and not ids[~batch.mask].any(), "masked-out tokens are not zero")
    plain = vocabulary_logprobs(reference(model_folder(subject)), batch)
    wanted = plain.topk(K, dim=1).values
    expect_close(logprobs[batch.mask], wanted[batch.mask], subject.settings.tolerance, "a log-prob of the likeliest")
    named = plain.gather(1, ids)
    expect_close(named[batch.mask], wanted[batch.mask], subject.settings.tolerance, "the log-prob of a token named")


def check_candidates_are_scored_in_place_of_tokens(subject: Subject) -> None:
    """A loss that reads candidate_ids [N, K] is given their log-probs [N, K], with gradient. (DESIGN 7.4)"""
    _require(subject, "topk_logprobs")
    batch = ragged_batch()
    candidates = torch.stack([batch.token_ids, batch.token_ids.roll(1), batch.token_ids.roll(2)], 1)
    updates = []
    for given, loss in ((batch, WeightedNLL()), (batch.with_tokens(candidate_ids=candidates), CandidateNLL())):
        backend = build_trainer(subject, optimizer={"lr": 1.0, "eps": 1.0, "weight_decay": 0.0})
        before = weights_of(backend)
        backend.train_step(given, loss)
        updates.append(difference(weights_of(backend), before))
    gap, size = norm(difference(*updates)), norm(updates[0])
    expect(gap <= 2e-5 * size, f"the same loss read from candidates gives another update, off by {gap / size:.3g}")


def check_values_are_those_of_the_saved_model(subject: Subject) -> None:
    """With a value head, index t values the state before token t, as transformers does with the export. (DESIGN 7.2)"""
    _require(subject, "value_head")
    backend, batch = _critic(subject), ragged_batch()
    _learn(backend, batch)
    values = backend.get_values(batch).cpu()
    expect(values.dtype == torch.float32 and not values[~batch.mask].any(), "masked-out values are not zero")
    folder = subject.folder / "critic"
    backend.save_pretrained(folder)
    expect_close(values, _plain_values(folder, batch), subject.settings.tolerance * 10, "a value")


def check_values_can_be_learnt(subject: Subject) -> None:
    """train_step fits values to targets, and microbatches do not change it. (DESIGN 7.5)"""
    _require(subject, "value_head")
    batch = ragged_batch()
    targets = torch.linspace(-1, 1, batch.num_tokens)
    losses = []
    for tokens in (100_000, 1):
        critic = _critic(subject, microbatch_tokens=tokens)
        given = batch.with_tokens(targets=targets)
        losses.append([critic.train_step(given, SquaredError())["loss"].value for _ in range(8)])
    expect(losses[0][-1] < 0.8 * losses[0][0], f"eight steps took the error from {losses[0][0]} to {losses[0][-1]}")
    gap = max(abs(one - other) for one, other in zip(*losses, strict=True))
    expect(gap <= 1e-3 * losses[0][0], f"microbatches change the loss by up to {gap}")


def check_each_head_answers_for_itself(subject: Subject) -> None:
    """A language model has no values and a value head no log-probs: asking is an error. (DESIGN 5)"""
    _require(subject, "value_head")
    batch = ragged_batch()
    for backend, method in ((build_trainer(subject), "get_values"), (_critic(subject), "get_logprobs")):
        try:
            getattr(backend, method)(batch)
        except NemorlError:
            continue
        expect(False, f"{method} answered on a model with the other head")


def _critic(subject: Subject, **policy: Any) -> TrainingBackend:
    if subject.settings.policy.get("lora"):
        raise NotApplicable("a value head is trained whole, and these settings train adapters")
    subject.require_modules()
    config = policy_config(subject, **policy)
    built = config.backend.build(config, worker(subject), reference=False, head="value")
    return subject.own(built, "shutdown")


def _learn(backend: TrainingBackend, batch: TokenBatch) -> None:
    backend.train_step(batch.with_tokens(targets=torch.ones(batch.num_tokens)), SquaredError())


def _require(subject: Subject, capability: str) -> None:
    if capability not in subject.config.supports:
        raise NotApplicable(f"the backend does not declare supports={{{capability!r}}}")


@torch.no_grad()
def _plain_values(folder: Path, batch: TokenBatch) -> Tensor:
    """[N] what transformers' sequence classifier says of the text before each token; 0.0 where masked out."""
    from transformers import AutoModelForSequenceClassification

    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    values = []
    for ids in torch.split(batch.token_ids, batch.lengths.tolist()):
        scores = [model(input_ids=ids[None, :end]).logits.flatten()[-1:] for end in range(1, len(ids))]
        values.append(torch.cat([torch.zeros(1), *scores]))
    return torch.where(batch.mask, torch.cat(values), 0.0)


@torch.no_grad()
def vocabulary_logprobs(model: Any, batch: TokenBatch) -> Tensor:
    """[N, V] of plain transformers; index t is what the tokens before t say. First tokens get zeros."""
    results = []
    for ids in torch.split(batch.token_ids, batch.lengths.tolist()):
        logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0].float() / batch.temperature, -1)
        results.append(torch.cat([torch.zeros_like(logprobs[:1]), logprobs[:-1]]))
    return torch.cat(results)


# Ranks that send their own parts of the weights (capability `weight_pieces`)


def check_pieces_make_the_weights(subject: Subject) -> None:
    """What the ranks publish in pieces is what `export_weights` yields, before and after a step. (DESIGN 5)"""
    if "weight_pieces" not in subject.config.supports:
        raise NotApplicable("the backend does not declare supports={'weight_pieces'}")
    backend = build_trainer(subject)
    expect(isinstance(backend, PublishesPieces), "the backend has no publish_pieces")
    for step in range(2):
        found, wanted = _joined(backend), weights_of(backend)
        expect(found.keys() == wanted.keys(), f"names differ: {sorted(found.keys() ^ wanted.keys())[:3]}")
        wrong = [name for name, tensor in wanted.items() if not torch.equal(found[name].float(), tensor)]
        expect(not wrong, f"after {step} steps the pieces of {', '.join(wrong[:3])} make another tensor")
        backend.train_step(ragged_batch(), WeightedNLL())


def _joined(backend: TrainingBackend) -> dict[str, Tensor]:
    assert isinstance(backend, PublishesPieces)
    (bucket,) = SpreadHandle(IN_PROCESS, 1, [backend.publish_pieces(IN_PROCESS)]).buckets()
    return {name: tensor.cpu().clone() for name, tensor in bucket.items()}


# Sequences that begin alike: a backend may compute what they have in common once, or once for each


EXACT = 5e-6
"""Nats of a log-prob, and share of an update's norm: float32 sums in another order."""


def check_sequences_that_begin_alike_are_scored_as_alone(subject: Subject) -> None:
    """Sequences with tokens in common have the log-probs that each has in a batch of its own. (DESIGN 7.1)"""
    backend, batch = build_trainer(subject), branching_batch(temperature=0.8)
    alone = [backend.get_logprobs(batch.select([index])).cpu() for index in range(len(batch))]
    is_float32 = subject.settings.policy.get("precision", "float32") == "float32"
    tolerance = EXACT if is_float32 else subject.settings.tolerance
    expect_close(backend.get_logprobs(batch), torch.cat(alone), tolerance, "a log-prob beside a sequence like it")


def check_sequences_that_begin_alike_teach_as_alone(subject: Subject) -> None:
    """The update from sequences with tokens in common is that of each in a microbatch of its own. (DESIGN 7.5)"""
    if subject.settings.policy.get("precision", "float32") != "float32":
        raise NotApplicable("updates are compared in float32: rounded weights hide their differences")
    together, alone = _update(subject, 100_000), _update(subject, 1)
    gap, size = norm(difference(together, alone)), norm(alone)
    expect(size > 0, "the update is zero: this check proves nothing")
    expect(gap <= EXACT * size, f"the update is off by {gap / size:.3g} of its norm")


def _update(subject: Subject, microbatch_tokens: int) -> dict[str, Tensor]:
    """g / (|g| + 1) of the gradient g of the sum over tokens."""
    settings = {"lr": 1.0, "eps": 1.0, "weight_decay": 0.0}
    backend = build_trainer(subject, optimizer=settings, microbatch_tokens=microbatch_tokens)
    batch, before = branching_batch(), weights_of(backend)
    backend.train_step(replace(batch, loss_weights=batch.mask.float()), WeightedNLL())
    found = difference(weights_of(backend), before)
    backend.shutdown()
    return found


# A gradient that is zero, as where all of a batch's ratios are clipped


LR = 1e-2
BETA_1, BETA_2 = 0.9, 0.999


@dataclass(frozen=True)
class Flat:
    """loss = 0 * sum of log-probs: it has a gradient, which is zero."""

    requires: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, outputs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        return (outputs * 0.0).sum(), {}


def check_a_gradient_of_zero_goes_on_by_momentum(subject: Subject) -> None:
    """After a step, one whose gradient is zero is AdamW's: momentum moves the weights on. (DESIGN 7.5)

    By hand, for a gradient g and then 0: m is b1 (1 - b1) g and v is b2 (1 - b2) g^2 before their corrections by
    1 - b1^2 and 1 - b2^2, so the second step is b1 / (1 + b1) / sqrt(b2 / (1 + b2)) of the first, 0.670 of it.
    """
    if subject.settings.policy.get("lora"):
        raise NotApplicable("what is exported is a product of the adapters that are trained")
    adamw = {"lr": LR, "betas": (BETA_1, BETA_2), "eps": 1e-12, "weight_decay": 0.0}
    backend = build_trainer(subject, optimizer=adamw, max_grad_norm=None)
    at = [weights_of(backend)]
    for loss in (WeightedNLL(), Flat()):
        backend.train_step(ragged_batch(), loss)
        at.append(weights_of(backend))
    first, second = difference(at[1], at[0]), difference(at[2], at[1])
    wanted = BETA_1 / (1 + BETA_1) / (BETA_2 / (1 + BETA_2)) ** 0.5
    ratios = torch.cat([(second[name] / first[name])[first[name].abs() > LR / 2].flatten() for name in first])
    expect(len(ratios) > 0, "the first step moved nothing")
    worst = float((ratios - wanted).abs().max())
    expect(worst < 1e-3, f"the second step is up to {worst:.3g} away from {wanted:.4f} of the first")
