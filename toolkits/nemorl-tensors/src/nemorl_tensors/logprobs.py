"""Log-probs of given tokens from hidden states, without ever holding ``[N, V]`` logits.

# N = tokens of all sequences concatenated, M = positions scored, D = hidden size, V = vocabulary, C = positions per
# chunk, K = candidate tokens per position

The next-token shift of the whole project is :func:`next_token_targets`; nothing else moves an index.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemorl_tensors.filtering import TokenFilter
from nemorl_tensors.products import product

CHUNK_LOGITS = 32 * 1024 * 1024
"""Elements of the ``[C, V]`` logits alive at one time (128 MiB of float32): large enough for full matmul speed."""
KEPT_LOGITS_BYTES = 128 * 1024 * 1024
"""Logits that take no more, in the precision of the head, are kept for the backward pass: a quarter of the head's
arithmetic."""
CPU_BLOCK = 1 << 18
"""Elements that one pass of a CPU over logits, or over a part of the head's gradient, takes at a time: 1 MiB of float32
stays in its cache from one operation to the next (four times as many: a fifth slower)."""

Gradient = Callable[[], Tensor]
"""A float32 tensor that gradients are added to"""
LowRank = tuple[Tensor, Tensor]
"""[M, R] and [V, R], whose product is added to a head's output: LoRA on it (arXiv:2106.09685)"""


def next_token_targets(mask: Tensor, lengths: Tensor) -> Tensor:
    """Positions of the tokens to score: [M] indices t with ``mask[t]`` True and t not first in its sequence.

    The hidden state that predicts token t stands at t - 1 (of the same sequence), so a caller scores
    ``hidden[t - 1]`` against ``token_ids[t]`` and writes the result at t.

    Example:
        >>> next_token_targets(torch.tensor([True, True, False, True]), torch.tensor([2, 2])).tolist()
        [1, 3]
    """
    first = torch.zeros_like(mask)
    first[(torch.cumsum(lengths, 0) - lengths)[lengths > 0]] = True
    return torch.nonzero(mask & ~first).squeeze(1)


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk_tokens: int | None = None,
    keep: TokenFilter | None = None,
    moments: bool = False,
    weight_gradient: Gradient | None = None,
    low_rank: LowRank | None = None,
) -> Tensor:
    """``log softmax(f(hidden @ weight.T + bias) / temperature)`` at ``targets``, chunk by chunk, forward and backward.

    Args:
        hidden: [M, D] states that predict each target, any float dtype.
        weight: [V, D] output head.
        targets: [M] token ids, or [M, K] for several candidates at each position.
        bias: [V] of the output head, if it has one.
        temperature: Divides the logits; the temperature that the tokens were sampled with.
        softcap: ``f(x) = softcap * tanh(x / softcap)`` for models that cap their logits (Gemma 2), else identity.
        chunk_tokens: Positions per chunk; by default so many that a chunk's logits fill ``CHUNK_LOGITS`` elements.
        keep: The softmax is over what this leaves of the vocabulary; a target outside has -inf and no gradient.
        moments: Of [M] targets, [M, 3] is returned: log-probs, entropies in nats, and the sums of squared probabilities
            (the chance that two draws agree), which have no gradient. Excludes ``keep``.
        weight_gradient: Gives the [V, D] float32 tensor that the gradient of ``weight`` is added to; autograd then
            gets none. Unset: autograd adds it up, as that of any parameter.
        low_rank: [M, R] ``low`` and [V, R] ``factor``: ``low @ factor.T`` is added to the head's output.

    Returns:
        float32 nats of the shape of ``targets``, differentiable in all tensors but these. The backward pass recomputes
        each chunk's logits, one more head matmul instead of M x V stored values, unless all of them fit
        ``KEPT_LOGITS_BYTES`` and ``chunk_tokens`` is unset.

    Example:
        >>> hidden, head = torch.zeros(1, 2), torch.zeros(4, 2)  # four equally likely tokens: log 1/4
        >>> round(float(linear_logprobs(hidden, head, torch.tensor([3]))), 4)
        -1.3863
    """
    candidates_MK = targets[:, None] if targets.ndim == 1 else targets
    chunk = chunk_tokens or max(1, CHUNK_LOGITS // weight.shape[0])
    count = hidden.shape[0]
    kept = chunk_tokens is None and count * weight.shape[0] * weight.element_size() <= KEPT_LOGITS_BYTES
    low, factor = low_rank or (None, None)
    parts = (hidden, weight, bias, low, factor)
    kept &= torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in parts)
    how = _How(temperature, softcap, max(1, count) if kept else chunk, kept, keep, moments, weight_gradient)
    result: Tensor = _LinearLogprobs.apply(*parts, candidates_MK, how)  # type: ignore[no-untyped-call]
    return result if moments else result.view(targets.shape)


def moments_of(logits: Tensor, normalizers: Tensor) -> Tensor:
    """[C, 2] entropies and sums of squared probabilities of [C, V] logits, given the [C, 1] log of their sum."""
    probs = torch.exp(logits - normalizers)
    return torch.stack((torch.special.entr(probs).sum(1), probs.square().sum(1)), 1)


@torch.no_grad()
def linear_topk_logprobs(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk_tokens: int | None = None,
    low_rank: LowRank | None = None,
) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens at each position and their log-probs, most likely first.

    The arguments are those of :func:`linear_logprobs`; log-probs are of the whole vocabulary, not of the k alone.

    Returns:
        [M, K] int64 token ids and [M, K] float32 nats, without gradient.

    Example:
        >>> head = torch.tensor([[0.0], [2.0], [1.0]])  # three tokens, logits 0, 2 and 1
        >>> ids, logprobs = linear_topk_logprobs(torch.ones(1, 1), head, k=2)
        >>> ids.tolist()
        [[1, 2]]
    """
    count = hidden.shape[0]
    ids = torch.empty((count, k), dtype=torch.int64, device=hidden.device)
    logprobs = torch.empty((count, k), dtype=torch.float32, device=hidden.device)
    for part in chunked(count, chunk_tokens or max(1, CHUNK_LOGITS // weight.shape[0])):
        logits_CV = _finished(_raw(part, hidden, weight, bias, *(low_rank or (None, None))), temperature, softcap)[0]
        highest = logits_CV.topk(k, dim=1)
        ids[part] = highest.indices
        logprobs[part] = highest.values - torch.logsumexp(logits_CV, dim=1, keepdim=True)
    return ids, logprobs


@dataclass(frozen=True)
class _How:
    """Processing of a head's output, and the size of its portions."""

    temperature: float
    softcap: float | None
    chunk: int
    """Positions whose logits exist at one time"""
    kept: bool
    """The logits of all positions, which are one chunk, stay until the backward pass."""
    keep: TokenFilter | None
    moments: bool
    """Two more columns: entropies, and sums of squared probabilities"""
    weight_gradient: Gradient | None

    def logits(self, raw_CV: Tensor) -> tuple[Tensor, Tensor | None]:
        """[C, V] float32 logits of the head's output, filtered, and the cap's slope where there is one."""
        logits_CV, slope_CV = _finished(raw_CV, self.temperature, self.softcap)
        return logits_CV if self.keep is None else self.keep.applied(logits_CV), slope_CV

    def slices(self, part: slice, vocabulary: int, device: torch.device) -> list[tuple[slice, slice]]:
        """Positions of a chunk that elementwise passes take together: (places in the chunk, places among all)."""
        size = part.stop - part.start
        count = max(1, CPU_BLOCK // vocabulary) if device.type == "cpu" else size
        return [(rows, slice(part.start + rows.start, part.start + rows.stop)) for rows in chunked(size, count)]


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        low: Tensor | None,
        factor: Tensor | None,
        targets: Tensor,
        how: _How,
    ) -> Tensor:
        width = targets.shape[1]
        shape = (targets.shape[0], width + 2 * how.moments)
        logprobs = torch.empty(shape, dtype=torch.float32, device=hidden.device)
        normalizers = torch.empty((targets.shape[0], 1), dtype=torch.float32, device=hidden.device)
        ctx.kept_CV = None
        for part in chunked(targets.shape[0], how.chunk):
            raw_CV = _raw(part, hidden, weight, bias, low, factor)
            for rows, places in how.slices(part, weight.shape[0], hidden.device):
                logits_CV = how.logits(raw_CV[rows])[0]
                normalizers[places] = torch.logsumexp(logits_CV, dim=1, keepdim=True)
                logprobs[places, :width] = logits_CV.gather(1, targets[places]) - normalizers[places]
                if how.moments:
                    logprobs[places, width:] = moments_of(logits_CV, normalizers[places])
            if how.kept:
                ctx.kept_CV = raw_CV
        entropies = logprobs[:, width : width + 1].clone()
        ctx.save_for_backward(hidden, weight, bias, low, factor, targets, normalizers, entropies)
        ctx.how = how
        return logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, low, factor, targets, normalizers, entropies = ctx.saved_tensors
        how: _How = ctx.how
        kept_CV, ctx.kept_CV = ctx.kept_CV, None  # what follows overwrites it
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Accumulate the head's gradient in float32: many chunks add into it.
        gradient = how.weight_gradient or (lambda: torch.zeros_like(weight, dtype=torch.float32))
        grad_weight = gradient() if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needs_bias else None
        grad_low = None if low is None else torch.empty_like(low)
        grad_factor = None if factor is None else torch.zeros_like(factor, dtype=torch.float32)
        for part in chunked(targets.shape[0], how.chunk):
            raw_CV = _raw(part, hidden, weight, bias, low, factor) if kept_CV is None else kept_CV
            for rows, places in how.slices(part, weight.shape[0], hidden.device):
                of_places = targets[places], grads[0][places], normalizers[places], entropies[places]
                grad_CV = _logits_gradient(raw_CV[rows], *of_places, how)
                if grad_bias is not None:
                    grad_bias += grad_CV.sum(0)
                raw_CV[rows] = grad_CV
            if grad_hidden is not None:
                grad_hidden[part] = product(raw_CV, weight.t())
            if grad_weight is not None:
                _add_product(grad_weight, raw_CV, hidden[part])
            if grad_low is not None and grad_factor is not None:
                grad_low[part] = product(raw_CV, factor.to(low.dtype).t())
                _add_product(grad_factor, raw_CV, low[part])
        return (
            grad_hidden,
            None if grad_weight is None or how.weight_gradient else grad_weight.to(weight.dtype),
            grad_bias.to(bias.dtype) if grad_bias is not None else None,
            grad_low,
            grad_factor.to(factor.dtype) if grad_factor is not None else None,
            None,
            None,
        )


def _raw(
    part: slice, hidden: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor | None, factor: Tensor | None
) -> Tensor:
    """[C, V] output of the head for a part of the positions, in the precision of its weight."""
    found = product(hidden[part], weight, bias)
    return found if low is None or factor is None else found.add_(product(low[part], factor.to(low.dtype)))


def _logits_gradient(
    raw_CV: Tensor, targets_CK: Tensor, grads: Tensor, normalizers_C1: Tensor, entropies_C1: Tensor, how: _How
) -> Tensor:
    """[C, V] float32 gradient of the head's output."""
    logits_CV, cap_slope_CV = how.logits(raw_CV)
    grad_CK = grads[:, : targets_CK.shape[1]]
    if how.keep is not None:
        grad_CK = torch.where(logits_CV.gather(1, targets_CK).isfinite(), grad_CK, 0.0)
    probs_CV = torch.sub(logits_CV, normalizers_C1).exp_()
    # d logp(target) / d logits = onehot(target) - softmax
    grad_CV = softmax_gradient(probs_CV, grads, grad_CK, entropies_C1)
    grad_CV.scatter_add_(1, targets_CK, grad_CK)
    if how.temperature != 1.0:
        grad_CV /= how.temperature
    return grad_CV if cap_slope_CV is None else grad_CV.mul_(cap_slope_CV)


def softmax_gradient(probs: Tensor, grads: Tensor, grad_CK: Tensor, entropies: Tensor) -> Tensor:
    """[C, V] gradient by the logits but for the targets' own; ``probs`` is overwritten.

    Args:
        probs: [C, V] of this rank's tokens.
        grads: [C, K], or with the columns of ``moments``.
        grad_CK: Those of the log-probs.
        entropies: [C, 1] with moments.
    """
    total = grad_CK.sum(1, keepdim=True)
    if grads.shape[1] == grad_CK.shape[1]:
        return probs.mul_(-total)
    # d entropy / d logits = -p * (log p + entropy)
    of_entropy = grads[:, grad_CK.shape[1], None]
    gradient: Tensor = torch.special.entr(probs)
    return gradient.mul_(of_entropy).sub_(probs.mul_(total + of_entropy * entropies))


def _add_product(into_VD: Tensor, grad_CV: Tensor, hidden_CD: Tensor) -> None:
    """``into += grad.T @ hidden``, on a CPU by parts that are still in its cache when they are added."""
    rows = max(1, CPU_BLOCK // into_VD.shape[1]) if into_VD.is_cpu else into_VD.shape[0]
    for part in chunked(into_VD.shape[0], rows):
        into_VD[part] += product(grad_CV[:, part].t(), hidden_CD.t())


def chunked(count: int, chunk: int) -> list[slice]:
    """``count`` positions in slices of ``chunk``."""
    return [slice(start, min(start + chunk, count)) for start in range(0, count, chunk)]


def head_logits(
    hidden_CD: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """[C, V] float32 logits after cap and temperature, and the cap's slope where there is one."""
    return _finished(product(hidden_CD, weight, bias), temperature, softcap)


def _finished(raw_CV: Tensor, temperature: float, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    logits_CV, slope_CV = raw_CV.float(), None
    if softcap is not None:
        capped = torch.tanh(logits_CV / softcap)
        slope_CV = 1 - capped.square()
        logits_CV = softcap * capped
    return (logits_CV if temperature == 1.0 else logits_CV / temperature), slope_CV
