"""Which sequences of a batch get no backward pass, and that a loss is held to what it says about them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from nemorl.errors import ForeignError
from nemorl.metrics import Metrics
from nemorl_grpo.loss_cispo import CappedWeightLoss
from nemorl_grpo.loss_gspo import SequenceRatioLoss
from nemorl_ppo.loss import PPOLoss
from nemorl_rl.policy_gradient.loss import ClippedPolicyGradientLoss
from nemorl_tensors import TokenBatch
from nemorl_tensors.engines.no_gradient import evaluate_without_gradient, split_by_gradient
from nemorl_tensors.engines.rows import fed_lengths
from nemorl_testing.batches import Selective, WeightedNLL
from recorded_messages import Raises
from torch import Tensor


def batch_of(advantages: list[float], lengths: list[int], sequences_per_group: int = 1) -> TokenBatch:
    """Sequence i consists of tokens 10 + i; all tokens but the first are trained on with the same advantage."""
    batch = TokenBatch.from_sequences(
        [[10 + index] * length for index, length in enumerate(lengths)],
        [[True] * length for length in lengths],
        sequences_per_group=sequences_per_group,
    )
    per_token = torch.tensor(advantages).repeat_interleave(batch.lengths)
    garbage = torch.where(batch.mask, per_token, torch.nan)
    return batch.with_tokens(advantages=garbage, generation_logprobs=torch.zeros(batch.num_tokens))


def sequences(batch: TokenBatch) -> list[int]:
    return (batch.token_ids[torch.cumsum(batch.lengths, 0) - 1] - 10).tolist()


def fed(batch: TokenBatch) -> int:
    return int(fed_lengths(batch).sum())


def split(batch: TokenBatch, budget: int, loss: Any = None) -> tuple[list[int], list[int]]:
    trained, measured = split_by_gradient(batch, loss or Selective(), budget, fed)
    return sequences(trained), sequences(measured)


def test_sequences_without_advantage_are_measured_and_keep_their_weight() -> None:
    batch = batch_of([1.0, 0.0, -0.5, 0.0], [5, 5, 3, 3])
    trained, measured = split_by_gradient(batch, Selective(), 8, fed)
    assert (sequences(trained), sequences(measured)) == ([0, 2], [1, 3])
    # 4 + 4 + 2 + 2 trained tokens share the weight 1: 1/12 each, wherever they are
    assert trained.loss_weights[trained.mask].tolist() == pytest.approx([1 / 12] * 6)
    assert measured.loss_weights[measured.mask].tolist() == pytest.approx([1 / 12] * 6)


def test_a_loss_that_says_nothing_has_all_sequences_trained_on() -> None:
    batch = batch_of([1.0, 0.0, 0.0, 0.0], [5, 5, 5, 5])
    trained, measured = split_by_gradient(batch, WeightedNLL(), 4, fed)
    assert trained is batch
    assert len(measured) == 0


def test_where_all_sequences_have_a_gradient_the_batch_is_the_one_given() -> None:
    batch = batch_of([1.0, 2.0], [5, 5])
    assert split_by_gradient(batch, Selective(), 4, fed)[0] is batch


def test_groups_stay_together() -> None:
    batch = batch_of([0.0, 1.0, 0.0, 0.0, 1.0, 1.0], [4] * 6, sequences_per_group=2)
    assert split(batch, 6) == ([0, 1, 4, 5], [2, 3])


def test_something_is_always_trained_on_the_shortest_that_has_a_token_to_train() -> None:
    # A length of 1 has none: its first token is never scored.
    assert split(batch_of([0.0, 0.0, 0.0, 0.0], [9, 4, 1, 9]), 8) == ([1], [0, 2, 3])


def test_a_second_kind_of_microbatch_must_save_more_than_it_costs() -> None:
    # 10 tokens with and 99 without gradient. In one microbatch, a second costs 700 / 3 tokens, and two thirds of 99
    # are 66. At 50 tokens a microbatch there are 3 before, and 1 + 2 / 3 after.
    batch = batch_of([1.0, 0.0], [11, 100])
    assert split(batch, 1000) == ([0, 1], [])
    assert split(batch, 50) == ([0], [1])
    # Two thirds of 351 tokens are 234, more than 700 / 3 = 233.3; of 349 they are 232.7.
    assert split(batch_of([1.0, 0.0], [11, 352]), 1000) == ([0], [1])
    assert split(batch_of([1.0, 0.0], [11, 350]), 1000) == ([0, 1], [])


def test_tokens_that_are_computed_once_save_less() -> None:
    """Two sequences that begin alike: 1000 tokens together, 900 each. Together they cost 1000 + 700, apart 900 + 700
    and a third of that, which is more. With nothing in common, 500 each, they cost 1200 + 400 apart."""
    batch = batch_of([1.0, 0.0], [11, 11])
    alike, strangers = {1: 900, 2: 1000}, {1: 500, 2: 1000}
    assert split_by_gradient(batch, Selective(), 1000, lambda part: alike[len(part)])[0] is batch
    assert len(split_by_gradient(batch, Selective(), 1000, lambda part: strangers[len(part)])[0]) == 1


@pytest.mark.parametrize("kind", [ClippedPolicyGradientLoss, SequenceRatioLoss, CappedWeightLoss, PPOLoss])
def test_losses_of_the_family_say_which_sequences_teach_and_a_kl_penalty_makes_all_teach(kind: Any) -> None:
    batch = batch_of([1.0, 0.0], [3, 3])
    assert kind().has_gradient(batch).tolist() == [True, False]
    assert kind(kl_penalty=0.01).has_gradient(batch).tolist() == [True, True]


def test_a_right_response_is_imitated_whatever_its_advantage() -> None:
    batch = batch_of([0.0, 0.0], [3, 3])
    batch = batch.with_tokens(positive_weights=torch.tensor([0.0, 0.5, 0.5, 0.0, 0.0, 0.0]))
    assert PPOLoss(positive_nll_weight=0.1).has_gradient(batch).tolist() == [True, False]
    assert PPOLoss().has_gradient(batch).tolist() == [False, False]


@dataclass(frozen=True)
class WithEntropy(ClippedPolicyGradientLoss):
    """Somebody's loss: an entropy bonus in the surrogate, and not a word about gradients."""

    def surrogate(self, policy_logprobs: Any, old_logprobs: Any, advantages: Any, batch: TokenBatch) -> Any:
        surrogate, metrics = super().surrogate(policy_logprobs, old_logprobs, advantages, batch)
        return surrogate - 0.01 * torch.where(batch.mask, policy_logprobs.exp() * policy_logprobs, 0.0), metrics


@dataclass(frozen=True)
class WithBonus(ClippedPolicyGradientLoss):
    """The same after the sum."""

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        loss, metrics = super().__call__(policy_logprobs, batch)
        return loss - 0.01 * torch.where(batch.mask, policy_logprobs, 0.0).sum(), metrics


class Renamed(WithEntropy):
    """What derives from such a loss inherits its silence."""


@pytest.mark.parametrize("kind", [WithEntropy, WithBonus, Renamed])
def test_another_objective_does_not_inherit_what_was_said_of_the_old_one(kind: Any) -> None:
    batch = batch_of([1.0, 0.0, 0.0], [3, 3, 3])
    assert kind(on_policy=True).has_gradient(batch).tolist() == [True, True, True]
    assert split(batch, 2, kind(on_policy=True)) == ([0, 1, 2], [])


class Bonus:
    """A mixin, which no subclass hook sees."""

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        loss, metrics = super().__call__(policy_logprobs, batch)  # type: ignore[misc]
        return loss + 0.25 * torch.where(batch.mask, policy_logprobs, 0.0).sum(), metrics


class Mixed(Bonus, ClippedPolicyGradientLoss):
    pass


def test_a_loss_that_is_wrong_about_its_gradient_is_told_so(raises: Raises) -> None:
    batch = batch_of([0.0], [3])
    assert Mixed(on_policy=True).has_gradient(batch).tolist() == [False]
    with raises(ForeignError, "Mixed", "has_gradient", "0.25"):
        evaluate_without_gradient(Mixed(on_policy=True), torch.zeros(3), batch)


def test_loss_and_metrics_are_those_of_a_step_with_gradient() -> None:
    batch, outputs = batch_of([0.0], [3]), torch.tensor([torch.nan, -1.0, -2.0])
    loss = ClippedPolicyGradientLoss(on_policy=True)
    with torch.no_grad():
        value, metrics = evaluate_without_gradient(loss, outputs, batch)
    wanted, others = loss(outputs, batch)
    assert (float(value), dict(metrics)) == (float(wanted), dict(others))
    assert not value.requires_grad


@dataclass(frozen=True)
class Answers:
    """Says ``answer`` when asked for its gradient."""

    answer: Any
    requires: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        return policy_logprobs.sum(), {}

    def has_gradient(self, batch: TokenBatch) -> Any:
        return self.answer


@pytest.mark.parametrize("answer", [True, torch.ones(2), torch.ones(3, dtype=torch.bool)], ids=["one", "float", "many"])
def test_an_answer_that_is_not_a_bool_for_each_sequence_is_refused(answer: Any, raises: Raises) -> None:
    with raises(ForeignError, "Answers", "has_gradient()", 2):
        split_by_gradient(batch_of([1.0, 0.0], [3, 3]), Answers(answer), 8, fed)


def test_an_empty_shard_is_no_mistake() -> None:
    empty = replace(batch_of([1.0], [3]), sequences_per_group=1).select([])
    assert split(empty, 8) == ([], [])
