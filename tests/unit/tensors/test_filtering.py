"""Log-probs after top-k and top-p, against a direct computation on whole logits."""

from __future__ import annotations

import math

import pytest
import torch
from nemorl.types import SamplingParams
from nemorl_tensors import linear_logprobs
from nemorl_tensors.engines.sampling import RowSampler
from nemorl_tensors.filtering import TokenFilter
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

FILTERS = [TokenFilter(3), TokenFilter(None, 0.7), TokenFilter(5, 0.8), TokenFilter(1), TokenFilter(None, 0.01)]


def directly(logits: Tensor, keep: TokenFilter) -> Tensor:
    """transformers' own warpers, top-k first, then a softmax over what is left."""
    ids = torch.zeros(len(logits), 1, dtype=torch.int64)
    if keep.top_k is not None:
        logits = TopKLogitsWarper(keep.top_k)(ids, logits)
    if keep.top_p < 1:
        logits = TopPLogitsWarper(keep.top_p)(ids, logits)
    return torch.log_softmax(logits, -1)


def test_what_is_kept_by_hand() -> None:
    # Probabilities 0.5, 0.3, 0.15, 0.05. Top-p 0.8 keeps the first two, which reach it; renormalised 5/8 and 3/8.
    logits = torch.tensor([[0.3, 0.05, 0.5, 0.15]]).log()
    kept = torch.log_softmax(TokenFilter(None, 0.79).applied(logits), -1)
    assert kept.exp().tolist() == [pytest.approx([3 / 8, 0, 5 / 8, 0])]
    # Top-k 3 leaves 50/95, 30/95 and 15/95: the first two are 84 %, so top-p 0.85 keeps all three and 0.84 two.
    for top_p, count in ((0.85, 3), (0.84, 2)):
        assert int(TokenFilter(3, top_p).applied(logits).isfinite().sum()) == count
    # Tokens as likely as the last one kept are kept too.
    assert TokenFilter(1).applied(torch.tensor([[1.0, 1.0, 0.0]])).tolist() == [[1.0, 1.0, -math.inf]]


@pytest.mark.parametrize("keep", FILTERS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_and_gradients_are_those_of_the_truncated_softmax(keep: TokenFilter, temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 8, generator=generator, requires_grad=True)
    weight = torch.randn(30, 8, generator=generator, requires_grad=True)
    bias = torch.randn(30, generator=generator, requires_grad=True)
    logits = (hidden @ weight.T + bias) / temperature
    drawn = torch.multinomial(directly(logits.detach(), keep).exp(), 1, generator=generator).squeeze(1)
    targets = torch.where(torch.arange(40) % 4 == 0, torch.randint(0, 30, (40,), generator=generator), drawn)
    advantages = torch.randn(40, generator=generator)

    wanted = directly(logits, keep).gather(1, targets[:, None]).squeeze(1)
    inside = wanted.isfinite()
    assert 0 < int(inside.sum()) <= 40
    (torch.where(inside, wanted, 0.0) * advantages).sum().backward()
    gradients = [t.grad.clone() for t in (hidden, weight, bias) if t.grad is not None]
    for tensor in (hidden, weight, bias):
        tensor.grad = None

    # Seven positions at a time: the filter of a position must not depend on how they are cut.
    found = linear_logprobs(hidden, weight, targets, bias=bias, temperature=temperature, chunk_tokens=7, keep=keep)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    (torch.where(found.isfinite(), found, 0.0) * advantages).sum().backward()
    for tensor, gradient in zip((hidden, weight, bias), gradients, strict=True):
        torch.testing.assert_close(tensor.grad, gradient, atol=1e-5, rtol=1e-5)


def test_a_target_outside_has_no_gradient_even_if_the_loss_gives_it_one() -> None:
    hidden, weight = torch.ones(1, 1, requires_grad=True), torch.tensor([[3.0], [2.0], [1.0]], requires_grad=True)
    found = linear_logprobs(hidden, weight, torch.tensor([2]), keep=TokenFilter(2))
    assert found.tolist() == [-math.inf]
    found.backward(torch.ones(1))
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.abs().max() == weight.grad.abs().max() == 0


@pytest.mark.parametrize("keep", FILTERS)
def test_the_sampler_reports_the_same_where_it_is_asked(keep: TokenFilter) -> None:
    logits = torch.randn(6, 30, generator=torch.Generator().manual_seed(1)) * 2
    plain = SamplingParams(temperature=0.7, top_k=keep.top_k, top_p=keep.top_p)
    asked = SamplingParams(temperature=0.7, top_k=keep.top_k, top_p=keep.top_p, filtered_logprobs=True)
    greedy = SamplingParams(temperature=0.0, top_k=keep.top_k, top_p=keep.top_p, filtered_logprobs=True)
    sampler = RowSampler(torch.device("cpu"))
    sampler.add([plain, asked] * 2 + [greedy, SamplingParams(filtered_logprobs=True)], [1, 1, 2, 2, 3, 4], [0] * 6)
    logits = logits[[0, 0, 1, 1, 2, 3]]
    tokens, logprobs = sampler.sample(logits)
    assert torch.equal(tokens[:4:2], tokens[1:4:2])  # what is drawn does not depend on what is reported
    whole = torch.log_softmax(logits / torch.tensor([0.7] * 4 + [1.0, 1.0])[:, None], -1)
    kept = directly(logits[:4] / 0.7, keep)
    wanted = torch.stack([whole[0], kept[1], whole[2], kept[3]])
    found = wanted.gather(1, tokens[:4, None]).squeeze(1)
    torch.testing.assert_close(logprobs[:4], found, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logprobs[4:], whole[4:].gather(1, tokens[4:, None]).squeeze(1))
