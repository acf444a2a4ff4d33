"""Gradients of losses over the same samples and weights, and how two of them compare.

# N = tokens of all sequences concatenated, T = tokens of one sequence, V = vocabulary

A loss sees log-probs alone, so its gradient is that of sum_t c_t * logprob_t, where c [N] is the loss's derivative
by the log-probs. c is found for the whole batch at once; the passes through the model take a few sequences each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from nemorl_rl.policy_gradient.loss import PolicyGradientLoss
from nemorl_tensors import TokenBatch
from nemorl_tensors.ratios import importance_weight, masked_log_ratio
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

if TYPE_CHECKING:
    from torch.nn import Module

PASS_TOKENS = 4096
"""Tokens that one pass through the model takes, padding included."""
PASS_LOGITS = 1 << 28
"""Logits that one pass makes at most: 1 GiB of float32."""

Advance = Callable[[], None]
Gradient = Sequence[Tensor]
"""One tensor per trained parameter, in the model's order: the parts of one long vector."""


def dot(first: Gradient, second: Gradient) -> float:
    """The product of two gradients, summed in float64.

    Example:
        >>> dot([torch.tensor([3.0]), torch.tensor([4.0, 0.0])], [torch.tensor([1.0]), torch.tensor([0.0, 2.0])])
        3.0
    """
    return math.fsum(float((a.double() * b.double()).sum()) for a, b in zip(first, second, strict=True))


def norm(gradient: Gradient) -> float:
    """Euclidean length."""
    return math.sqrt(dot(gradient, gradient))


def cosine(first: Gradient, second: Gradient) -> float | None:
    """dot(a, b) / (|a| * |b|); None where one of them is 0, which has no direction.

    Example:
        >>> round(cosine([torch.tensor([1.0, 0.0])], [torch.tensor([3.0, 4.0])]), 3)
        0.6
    """
    lengths = norm(first) * norm(second)
    return dot(first, second) / lengths if lengths > 0 else None


def effective_sample_size(weights: Tensor) -> float:
    """(sum w)^2 / sum w^2: as many equal weights would give a mean of the same variance (Kish, 1965). 0 without any.

    Example:
        >>> effective_sample_size(torch.tensor([1.0, 1.0, 1.0])), effective_sample_size(torch.tensor([3.0, 1.0]))
        (3.0, 1.6)
    """
    squares = float(weights.double().square().sum())
    return float(weights.double().sum()) ** 2 / squares if squares > 0 else 0.0


def in_passes(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Places of sequences that go through the model together, those of like length, padded to at most ``tokens``.

    Example:
        >>> list(in_passes([5, 2, 3, 9], tokens=6))
        [[1, 2], [0], [3]]
    """
    chosen: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: lengths[place]):
        if chosen and lengths[place] * (len(chosen) + 1) > tokens:
            yield chosen
            chosen = []
        chosen.append(place)
    if chosen:
        yield chosen


def logprobs_of(model: Module, sequences: Sequence[Tensor], temperature: float) -> list[Tensor]:
    """[T] float32 log-probs of each sequence's tokens, 0.0 for its first; with gradient.

    Padding stands to the right, where a causal model does not see it.
    """
    ids_BT = pad_sequence(list(sequences), batch_first=True).to(next(model.parameters()).device)
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1].float() / temperature
    found_BT = torch.log_softmax(logits_BTV, -1).gather(2, ids_BT[:, 1:, None]).squeeze(2)
    found_BT = torch.cat([found_BT.new_zeros(len(ids_BT), 1), found_BT], 1)
    return [row[: len(ids)] for row, ids in zip(found_BT, sequences, strict=True)]


def _pass_tokens(model: Module) -> int:
    vocabulary: int = model.config.vocab_size  # type: ignore[assignment, union-attr]
    return max(1, min(PASS_TOKENS, PASS_LOGITS // vocabulary))


@torch.no_grad()
def policy_logprobs(model: Module, batch: TokenBatch, advance: Advance) -> Tensor:
    """[N] log-probs of all tokens of a batch, without gradient, on the CPU.

    Args:
        model: A causal language model.
        batch: The tokens.
        advance: Called after each sequence.
    """
    ids = batch.token_ids.split(batch.lengths.tolist())  # type: ignore[no-untyped-call]
    parts: dict[int, Tensor] = {}
    for places in in_passes(batch.lengths.tolist(), _pass_tokens(model)):
        found = logprobs_of(model, [ids[place] for place in places], batch.temperature)
        for place, logprobs in zip(places, found, strict=True):
            parts[place] = logprobs.cpu()
            advance()
    return torch.cat([parts[place] for place in range(len(batch))])


def backpropagated(model: Module, batch: TokenBatch, coefficients: Tensor, advance: Advance) -> Gradient:
    """The gradient of sum_t coefficients_t * logprob_t by all trained parameters, on the CPU.

    Args:
        model: A causal language model in evaluation mode.
        batch: The tokens, N of them.
        coefficients: [N]; sequences in which all are 0 are not computed.
        advance: Called after each sequence.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    lengths = batch.lengths.tolist()
    ids, given = (values.split(lengths) for values in (batch.token_ids, coefficients))  # type: ignore[no-untyped-call]
    carrying = [place for place in range(len(batch)) if bool(given[place].any())]
    for _ in range(len(batch) - len(carrying)):
        advance()
    model.zero_grad(set_to_none=True)
    for chosen in in_passes([lengths[place] for place in carrying], _pass_tokens(model)):
        places = [carrying[number] for number in chosen]
        found = torch.cat(logprobs_of(model, [ids[place] for place in places], batch.temperature))
        weights = torch.cat([given[place] for place in places]).to(found.device)
        (found * weights).sum().backward()  # type: ignore[no-untyped-call]
        for _ in places:
            advance()
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    gradient = [part.detach().float().cpu().clone() for part in parts]
    model.zero_grad(set_to_none=True)
    return gradient


def token_coefficients(loss: PolicyGradientLoss, logprobs: Tensor, batch: TokenBatch) -> Tensor:
    """[N] derivative of a loss by the policy's log-probs, 0 where a token has no gradient."""
    leaf = logprobs.detach().clone().requires_grad_()
    value, _ = loss(leaf, batch)
    if not value.requires_grad:
        return torch.zeros_like(leaf)
    (found,) = torch.autograd.grad(value, leaf)
    return torch.where(batch.mask, found, 0.0)


@dataclass(frozen=True)
class TokenWeights:
    """How a loss weighs the tokens of a batch, whatever its formula."""

    effective_tokens: float
    """Effective sample size of the importance weights."""
    carrying_frac: float
    """Share of the response tokens of the step through which a gradient flows."""


def weights_of(loss: PolicyGradientLoss, logprobs: Tensor, batch: TokenBatch, response_tokens: int) -> TokenWeights:
    """The weights w_t that the surrogate gives to A_t * grad logprob_t, read off its derivative.

    w_t = -c_t / (loss_weights_t * A_t), c of the loss without KL penalty and entropy bonus. A token without advantage
    weighs nothing; a clipped or masked one has w = 0.

    Args:
        loss: The loss.
        logprobs: [N] of the policy.
        batch: What the loss sees.
        response_tokens: Tokens of all responses of the step, those included that the batch leaves out.
    """
    bare = replace(loss, kl_penalty=0.0, entropy_bonus=0.0)
    coefficients = token_coefficients(bare, logprobs, batch)
    scale = batch.loss_weights * torch.where(batch.mask, batch["advantages"], 0.0)
    weights = torch.where(scale != 0, -coefficients / torch.where(scale != 0, scale, 1.0), 0.0)
    whole = token_coefficients(loss, logprobs, batch)
    carrying = int((whole != 0).sum()) / response_tokens if response_tokens else 0.0
    return TokenWeights(effective_sample_size(weights), carrying)


def reward_coefficients(logprobs: Tensor, batch: TokenBatch, responses: int) -> Tensor:
    """[N] derivative, by the policy's log-probs, of the estimated expected reward of a response.

    J = 1/R * sum_i sum_t rho_t * (r_i - mean of the others' r) * logprob_t,   rho_t = policy / generation, held fixed

    REINFORCE with a leave-one-out baseline (arXiv:2402.14740), each token weighed by its own ratio to the sampler.

    Args:
        logprobs: [N] of the policy.
        batch: With ``generation_logprobs``, and these leave-one-out differences as ``advantages``.
        responses: R, those that were scored.
    """
    ratio = importance_weight(masked_log_ratio(logprobs, batch["generation_logprobs"], batch.mask))
    return torch.where(batch.mask, ratio * batch["advantages"], 0.0) / max(1, responses)


@dataclass(frozen=True)
class Compared:
    """A variant of a step beside what the run did."""

    name: str
    loss: str
    """Class of the loss."""
    responses: int
    """That are in its batch."""
    grad_norm: float
    norm_ratio: float | None
    """To the run's own; None where that is 0."""
    cosine: float | None
    """To the run's own gradient; None where one of both is 0."""
    effective_tokens: float
    carrying_frac: float
    predicted_reward_change: float
    """First order: the reward's gradient times a step of length lr against this gradient."""

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def reward_change(reward_gradient: Gradient, gradient: Gradient, lr: float) -> float:
    """dot(grad J, -lr * g / |g|); 0 for a gradient of 0.

    Example:
        >>> round(reward_change([torch.tensor([-3.0, 1.0])], [torch.tensor([4.0, 3.0])], lr=0.1), 3)  # 0.1 * 9 / 5
        0.18
    """
    length = norm(gradient)
    return -lr * dot(reward_gradient, gradient) / length if length > 0 else 0.0
