"""Entropies and chances of equal draws beside log-probs: numbers by hand, and gradients of autograd on whole logits.

# M = positions, V = vocabulary, D = hidden size
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nemorl_tensors import linear_logprobs, vocab_parallel_logprobs
from nemorl_tensors.filtering import TokenFilter, filtered
from torch import Tensor


def test_two_tokens_by_hand() -> None:
    # Logits log 1 and log 3: probabilities 1/4 and 3/4.
    # entropy = 1/4 log 4 + 3/4 log(4/3) = 0.346574 + 0.215762; two draws agree with 1/16 + 9/16.
    head = torch.tensor([[0.0], [math.log(3)]])
    found = linear_logprobs(torch.ones(1, 1), head, torch.tensor([1]), moments=True)
    assert found.tolist() == [pytest.approx([math.log(0.75), 0.562335, 0.625], abs=1e-6)]


def test_equal_logits_are_as_unsure_as_can_be() -> None:
    found = linear_logprobs(torch.zeros(1, 2), torch.zeros(8, 2), torch.tensor([3]), moments=True)
    assert found.tolist() == [pytest.approx([-math.log(8), math.log(8), 1 / 8])]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Any]:
    """A group of one rank: its own, or one that another test has left in this process."""
    is_new = not dist.is_initialized()
    if is_new:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield dist.group.WORLD
    if is_new:
        dist.destroy_process_group()


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("chunk_tokens", [None, 2])
@pytest.mark.parametrize("parallel", [False, True])
def test_gradients_are_those_of_whole_logits(
    alone: Any, softcap: float | None, chunk_tokens: int | None, parallel: bool
) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(5, 4, generator=generator), torch.randn(7, 4, generator=generator)
    bias, targets = torch.randn(7, generator=generator), torch.randint(7, (5,), generator=generator)
    outer = torch.randn(5, 2, generator=generator)
    given = [x.requires_grad_() for x in (hidden, weight, bias)]
    options: dict[str, Any] = {"bias": bias, "temperature": 0.7, "softcap": softcap, "chunk_tokens": chunk_tokens}
    if parallel:
        found = vocab_parallel_logprobs(hidden, weight, targets, first=0, group=alone, moments=True, **options)
    else:
        found = linear_logprobs(hidden, weight, targets, moments=True, **options)
    slopes = torch.autograd.grad((found[:, :2] * outer).sum(), given)

    logits = hidden @ weight.T + bias
    logprobs = torch.log_softmax((logits if softcap is None else softcap * torch.tanh(logits / softcap)) / 0.7, -1)
    probs = logprobs.exp()
    wanted = torch.stack((logprobs.gather(1, targets[:, None])[:, 0], -(probs * logprobs).sum(1)), 1)
    torch.testing.assert_close(found[:, :2], wanted, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found[:, 2], probs.square().sum(1), atol=1e-6, rtol=1e-5)
    for slope, expected in zip(slopes, torch.autograd.grad((wanted * outer).sum(), given), strict=True):
        torch.testing.assert_close(slope, expected, atol=2e-6, rtol=1e-5)


def test_a_token_of_probability_zero_adds_nothing() -> None:
    head = torch.tensor([[0.0], [0.0], [-1e4]], requires_grad=True)
    found = linear_logprobs(torch.ones(1, 1), head, torch.tensor([0]), moments=True)
    found[:, 1].sum().backward()  # type: ignore[no-untyped-call]
    assert found.tolist() == [pytest.approx([math.log(0.5), math.log(2), 0.5])]
    assert head.grad is not None
    assert head.grad.flatten().tolist() == pytest.approx([0, 0, 0], abs=1e-7)


def test_moments_leave_nothing_out() -> None:
    keep = TokenFilter(beside_moments=True)
    assert keep.alone is None
    assert keep.columns == 3

    def score(*, moments: bool = False, **_: Any) -> Tensor:
        return torch.zeros(2, 3) if moments else torch.zeros(2)

    assert filtered(score, keep).shape == (2, 3)
