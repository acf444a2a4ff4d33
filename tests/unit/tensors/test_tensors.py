"""The ragged batch, masked reductions, KL estimators and chunked log-probs, against numbers worked out by hand.

The legend of most tests, two sequences laid end to end (P prompt, A answer):

    sequence   0  0  0  0  1  1  1
    role       P  A  A  A  P  P  A
    index      0  1  2  3  4  5  6
"""

from __future__ import annotations

import math

import pytest
import torch
from nemorl.errors import DataError, UsageError
from nemorl.types import Prompt, Sample, Samples, Score
from nemorl_tensors import (
    KL_ESTIMATORS,
    TokenBatch,
    kl_k1,
    kl_k2,
    kl_k3,
    linear_logprobs,
    loss_weights,
    masked_max,
    masked_mean,
    masked_min,
    next_token_targets,
    segment_ids,
    segment_mean,
    segment_sum,
)
from recorded_messages import Raises
from torch import Tensor

NAN = float("nan")
IDS = [[10, 11, 12, 13], [20, 21, 22]]
MASKS = [[False, True, True, True], [False, False, True]]


def two_sequences(level: str = "token") -> TokenBatch:
    return TokenBatch.from_sequences(IDS, MASKS, loss_aggregation=level)  # type: ignore[arg-type]


# TokenBatch


def test_sequences_lie_end_to_end_without_padding() -> None:
    batch = two_sequences()
    assert batch.token_ids.tolist() == [10, 11, 12, 13, 20, 21, 22]
    assert batch.lengths.tolist() == [4, 3]
    assert batch.sequence_ids.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert batch.mask.tolist() == [False, True, True, True, False, False, True]
    assert (len(batch), batch.num_tokens) == (2, 7)
    assert (batch.token_ids.dtype, batch.mask.dtype, batch.loss_weights.dtype) == (
        torch.int64,
        torch.bool,
        torch.float32,
    )


def test_the_first_token_of_a_sequence_is_never_trained() -> None:
    # Nothing stands before it that could predict it.
    batch = TokenBatch.from_sequences([[1, 2], [3, 4]], [[True, True], [True, True]])
    assert batch.mask.tolist() == [False, True, False, True]


def test_an_empty_sequence_leaves_its_neighbours_alone() -> None:
    batch = TokenBatch.from_sequences([[], [1, 2], []], [[], [True, True], []])
    assert batch.mask.tolist() == [False, True]
    assert batch.sequence_ids.tolist() == [1, 1]


def test_masks_of_another_length_are_refused(raises: Raises) -> None:
    with raises(DataError):
        TokenBatch.from_sequences([[1, 2]], [[True]])


def test_a_field_of_another_shape_is_refused(raises: Raises) -> None:
    batch = two_sequences()
    with raises(UsageError, "advantages", 2, 7):
        batch.with_tokens(advantages=torch.zeros(2))
    with raises(UsageError, "reward", 7, 2):
        batch.with_sequences(reward=torch.zeros(7))


def test_a_field_that_is_not_there_is_named_with_those_that_are(raises: Raises) -> None:
    batch = two_sequences().with_tokens(advantages=torch.zeros(7)).with_sequences(reward=torch.zeros(2))
    assert "advantages" in batch
    assert "reward" in batch
    assert "old_logprobs" not in batch
    with raises(UsageError, "old_logprobs", "advantages"):
        _ = batch["old_logprobs"]


def test_select_takes_sequences_with_all_their_fields_in_the_given_order() -> None:
    batch = two_sequences().with_tokens(old_logprobs=torch.arange(7.0)).with_sequences(reward=torch.tensor([0.5, 2.0]))
    picked = batch.select([1, 0])
    assert picked.token_ids.tolist() == [20, 21, 22, 10, 11, 12, 13]
    assert picked.lengths.tolist() == [3, 4]
    assert picked["old_logprobs"].tolist() == [4, 5, 6, 0, 1, 2, 3]
    assert picked["reward"].tolist() == [2.0, 0.5]
    assert picked.mask.tolist() == [False, False, True, False, True, True, True]
    # Weights are those of the whole step (4 trained tokens), so that shards of it add up.
    assert picked.loss_weights.tolist() == [0, 0, 0.25, 0, 0.25, 0.25, 0.25]


def test_select_of_nothing_is_an_empty_batch() -> None:
    empty = two_sequences().select([])
    assert (len(empty), empty.num_tokens) == (0, 0)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_every_minibatch_weighs_one(level: str) -> None:
    lengths = [2, 5, 3, 4, 6, 2, 7]
    batch = TokenBatch.from_sequences([[1] * n for n in lengths], [[True] * n for n in lengths], loss_aggregation=level)  # type: ignore[arg-type]
    for count in range(1, 8):
        parts = batch.minibatches(count)
        assert [float(part.loss_weights.sum()) for part in parts] == pytest.approx([1.0] * count)
        assert torch.equal(torch.cat([part.lengths for part in parts]), batch.lengths)
        assert all(part.loss_aggregation == level for part in parts)


@pytest.mark.parametrize("count", [0, 3])
def test_minibatches_without_a_sequence_are_refused(count: int, raises: Raises) -> None:
    with raises(UsageError, 2, count):
        two_sequences().minibatches(count)


def test_shards_balance_tokens_and_cover_every_sequence_once() -> None:
    # Longest first, to the emptiest rank: 9 -> a, 7 -> b, 5 -> b (7 < 9), 4 -> a (9 < 12), 2 -> b (12 < 13), 1 -> a.
    lengths = [4, 9, 2, 7, 1, 5]
    batch = TokenBatch.from_sequences([[0] * n for n in lengths], [[True] * n for n in lengths])
    shards = batch.shards(2)
    assert shards == [[0, 1, 4], [2, 3, 5]]
    assert [sum(lengths[index] for index in shard) for shard in shards] == [14, 14]


def test_more_shards_than_sequences_leaves_some_empty() -> None:
    assert sorted(map(len, two_sequences().shards(4))) == [0, 0, 1, 1]


def test_the_loss_is_the_same_whole_and_in_shards() -> None:
    batch = two_sequences("sequence").with_tokens(values=torch.tensor([9.0, 1, 2, 3, 9, 9, 4]))
    whole = float((batch["values"] * batch.loss_weights).sum())
    parts = [batch.select(shard) for shard in batch.shards(2)]
    assert sum(float((part["values"] * part.loss_weights).sum()) for part in parts) == pytest.approx(whole)
    assert whole == pytest.approx((2.0 + 4.0) / 2)  # mean of (1 + 2 + 3) / 3 and 4 / 1


def sample(index: int, prompt: list[int], answer: list[int], reward: float) -> Sample:
    task = Prompt(index, "?", tuple(prompt))
    return Sample(
        prompt=task,
        token_ids=(*prompt, *answer),
        response_mask=(*[False] * len(prompt), *[True] * len(answer)),
        generation_logprobs=(*[0.0] * len(prompt), *[-0.5] * len(answer)),
        score=Score(reward),
        response="",
        finish_reason="stop",
    )


def test_samples_become_a_batch_with_one_advantage_on_all_their_tokens() -> None:
    samples = Samples([sample(0, [10], [11, 12, 13], 1.0), sample(0, [20, 21], [22], 0.0)])
    batch = TokenBatch.from_samples(samples, [0.75, -0.75], temperature=0.7)
    assert batch["advantages"].tolist() == [0.75] * 4 + [-0.75] * 3
    assert batch["generation_logprobs"].tolist() == [0, -0.5, -0.5, -0.5, 0, 0, -0.5]
    assert batch.mask.tolist() == [False, True, True, True, False, False, True]
    assert batch.temperature == 0.7


def test_a_dropped_sample_keeps_its_place_and_trains_nothing() -> None:
    samples = Samples([sample(0, [10], [11, 12, 13], 1.0), sample(0, [20, 21], [22], 0.0)])
    batch = TokenBatch.from_samples(samples, [0.75, -0.75], drop=[True, False])
    assert batch.lengths.tolist() == [4, 3]
    assert batch.loss_weights.tolist() == [0, 0, 0, 0, 0, 0, 1.0]


# Loss weights


def test_token_level_weighs_every_trained_token_alike() -> None:
    # 3 + 1 trained tokens: 1/4 each.
    assert two_sequences("token").loss_weights.tolist() == [0, 0.25, 0.25, 0.25, 0, 0, 0.25]


def test_sequence_level_weighs_every_sequence_alike() -> None:
    # 2 sequences of 3 and 1 trained tokens: 1/(2*3) and 1/(2*1).
    assert two_sequences("sequence").loss_weights.tolist() == pytest.approx([0, 1 / 6, 1 / 6, 1 / 6, 0, 0, 1 / 2])


def test_a_sequence_that_trains_nothing_takes_no_share() -> None:
    mask = torch.tensor([False, True, True, False, False, False])
    weights = loss_weights(mask, torch.tensor([3, 3]), "sequence")
    assert weights.tolist() == [0, 0.5, 0.5, 0, 0, 0]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_no_trained_token_at_all_gives_zeros_not_nan(level: str) -> None:
    assert loss_weights(torch.zeros(4, dtype=torch.bool), torch.tensor([1, 3]), level).tolist() == [0, 0, 0, 0]  # type: ignore[arg-type]


# Segments and masked reductions

VALUES = torch.tensor([NAN, 1.0, 2.0, 6.0, NAN, NAN, -4.0])
MASK = torch.tensor([False, True, True, True, False, False, True])
LENGTHS = torch.tensor([4, 3])


def test_segments_are_reduced_without_their_masked_slots() -> None:
    assert segment_ids(LENGTHS).tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert segment_sum(VALUES, MASK, LENGTHS).tolist() == [9.0, -4.0]
    assert segment_mean(VALUES, MASK, LENGTHS).tolist() == [3.0, -4.0]


def test_a_segment_with_nothing_in_it_is_zero() -> None:
    nothing = torch.zeros(7, dtype=torch.bool)
    assert segment_mean(VALUES, nothing, LENGTHS).tolist() == [0.0, 0.0]
    assert segment_sum(torch.tensor([5.0]), torch.tensor([True]), torch.tensor([0, 1, 0])).tolist() == [0.0, 5.0, 0.0]


def test_no_gradient_reaches_a_masked_slot() -> None:
    values = VALUES.clone().requires_grad_()
    segment_mean(values, MASK, LENGTHS).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3, 0, 0, 1])


def test_masked_metrics_see_trained_tokens_only() -> None:
    assert masked_mean(VALUES, MASK).value == pytest.approx(5.0 / 4)
    assert masked_min(VALUES, MASK).value == -4.0
    assert masked_max(VALUES, MASK).value == 6.0


def test_masked_metrics_of_nothing_never_win_a_merge() -> None:
    nothing = torch.zeros(7, dtype=torch.bool)
    assert masked_min(VALUES, nothing).merge(masked_min(VALUES, MASK)).value == -4.0
    assert masked_max(VALUES, nothing).merge(masked_max(VALUES, MASK)).value == 6.0
    assert masked_mean(VALUES, nothing).merge(masked_mean(VALUES, MASK)).value == pytest.approx(1.25)
    empty = torch.zeros(0)
    assert (masked_min(empty, empty.bool()).value, masked_max(empty, empty.bool()).value) == (math.inf, -math.inf)


# KL


def test_kl_estimators_by_hand() -> None:
    # p(token) = 1/2 under the policy, 1/4 under the reference: r = 1/2, log r = -0.693147.
    policy, reference = torch.tensor([math.log(1 / 2)]), torch.tensor([math.log(1 / 4)])
    assert kl_k1(policy, reference).item() == pytest.approx(0.693147, abs=1e-6)
    assert kl_k2(policy, reference).item() == pytest.approx(0.240227, abs=1e-6)  # 0.693147^2 / 2
    assert kl_k3(policy, reference).item() == pytest.approx(0.193147, abs=1e-6)  # 0.5 - 1 + 0.693147


@pytest.mark.parametrize("kind", list(KL_ESTIMATORS))
def test_kl_is_zero_between_equal_policies(kind: str) -> None:
    logprobs = torch.tensor([-0.1, -3.0])
    assert KL_ESTIMATORS[kind](logprobs, logprobs).tolist() == [0.0, 0.0]  # type: ignore[index]


def test_k1_and_k3_are_unbiased_over_the_vocabulary() -> None:
    policy, reference = torch.tensor([0.7, 0.2, 0.1]).log(), torch.tensor([0.3, 0.3, 0.4]).log()
    exact = float((policy.exp() * (policy - reference)).sum())
    for estimator in (kl_k1, kl_k3):
        assert float((policy.exp() * estimator(policy, reference)).sum()) == pytest.approx(exact, abs=1e-6)


def test_one_absurd_token_does_not_overflow() -> None:
    policy = torch.tensor([-1000.0], requires_grad=True)
    kl = kl_k3(policy, torch.tensor([0.0]))
    kl.sum().backward()
    assert kl.isfinite().all()
    assert policy.grad is not None
    assert policy.grad.isfinite().all()


# Log-probs


def test_targets_are_masked_in_and_never_first() -> None:
    mask = torch.tensor([True, True, False, True, True, False, True])
    assert next_token_targets(mask, LENGTHS).tolist() == [1, 3, 6]


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden [M, D], weight [V, D], bias [V], targets [M] with M = 5, D = 4, V = 7."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return draw(5, 4), draw(7, 4), draw(7), torch.tensor([0, 6, 3, 3, 1])


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, t: float, cap: float | None) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    return torch.log_softmax(logits / t, dim=-1).gather(1, targets[:, None]).squeeze(1)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 2, 5, None])
def test_chunked_logprobs_equal_log_softmax_forward_and_backward(
    softcap: float | None, temperature: float, with_bias: bool, chunk_tokens: int | None
) -> None:
    grad = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0])
    results = []
    for chunked in (False, True):
        hidden, weight, bias, targets = inputs()
        used = bias if with_bias else None
        if chunked:
            logprobs = linear_logprobs(
                hidden, weight, targets, bias=used, temperature=temperature, softcap=softcap, chunk_tokens=chunk_tokens
            )
        else:
            logprobs = plain(hidden, weight, targets, used, temperature, softcap)
        logprobs.backward(grad)
        results.append([logprobs.detach(), hidden.grad, weight.grad, *([bias.grad] if with_bias else [])])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_chunked_logprobs_by_hand() -> None:
    # logits = [2, 0] for the one position: log p(0) = 2 - log(e^2 + 1) = -0.126928; at temperature 2 -0.313262.
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[2.0], [0.0]])
    assert linear_logprobs(hidden, weight, torch.tensor([0])).item() == pytest.approx(-0.126928, abs=1e-6)
    assert linear_logprobs(hidden, weight, torch.tensor([0]), temperature=2.0).item() == pytest.approx(
        -0.313262, abs=1e-6
    )


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_gradient_agrees_with_finite_differences(softcap: float | None) -> None:
    # The log-probs themselves are float32, so the step of the differences is large and the tolerance loose.
    hidden, weight, bias, targets = inputs(torch.float64)

    def score(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_logprobs(hidden, weight, targets, bias=bias, temperature=0.8, softcap=softcap, chunk_tokens=2)

    assert torch.autograd.gradcheck(score, (hidden, weight, bias), eps=1e-2, atol=2e-3, rtol=1e-3)


class _LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Remembers the most elements that any operation returned."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, Tensor):
                self.largest = max(self.largest, item.numel())
        return result


def test_logits_of_all_tokens_never_exist_at_once() -> None:
    M, D, V, C = 64, 2, 100, 1
    hidden, weight = torch.randn(M, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    targets = torch.zeros(M, dtype=torch.int64)
    with _LargestTensor() as watch:
        linear_logprobs(hidden, weight, targets, chunk_tokens=C).sum().backward()
    assert watch.largest == max(V * D, M * D)  # weight-shaped and hidden-shaped, nothing of M * V = 6400


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_logits_kept_or_computed_again_whole_or_in_slices_give_one_result(
    softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    grad = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0])
    results = []
    for kept_bytes, block in ((1 << 20, 1 << 18), (0, 1 << 18), (1 << 20, 1)):
        monkeypatch.setattr("nemorl_tensors.logprobs.KEPT_LOGITS_BYTES", kept_bytes)
        monkeypatch.setattr("nemorl_tensors.logprobs.CPU_BLOCK", block)
        hidden, weight, bias, targets = inputs()
        logprobs = linear_logprobs(hidden, weight, targets, bias=bias, temperature=0.7, softcap=softcap)
        for _ in range(2):  # the second backward pass finds nothing kept
            hidden.grad = weight.grad = bias.grad = None
            logprobs.backward(grad, retain_graph=True)
            results.append([logprobs.detach(), hidden.grad, weight.grad, bias.grad])
    for found in results[1:]:
        for mine, expected in zip(found, results[0], strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-7)


def test_the_heads_gradient_can_go_into_a_tensor_of_the_callers() -> None:
    hidden, weight, _, targets = inputs()
    linear_logprobs(hidden, weight, targets).sum().backward()
    expected, weight.grad = weight.grad, None
    total = torch.ones_like(weight, requires_grad=False)
    for _ in range(2):
        linear_logprobs(hidden, weight, targets, weight_gradient=lambda: total).sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(total, 1 + 2 * expected)


def test_parameters_that_need_no_gradient_get_none() -> None:
    hidden, weight, _, targets = inputs()
    linear_logprobs(hidden, weight.detach(), targets).sum().backward()
    assert hidden.grad is not None
    frozen = hidden.detach()
    linear_logprobs(frozen, weight, targets).sum().backward()
    assert weight.grad is not None
    assert frozen.grad is None


def test_no_positions_give_no_logprobs() -> None:
    hidden, weight, _, _ = inputs()
    assert linear_logprobs(hidden[:0], weight, torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_moving_a_batch_moves_every_field() -> None:
    batch = two_sequences().with_tokens(advantages=torch.zeros(7)).with_sequences(reward=torch.zeros(2)).to("meta")
    tensors = [batch.token_ids, batch.lengths, batch.mask, batch.loss_weights, batch["advantages"], batch["reward"]]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
