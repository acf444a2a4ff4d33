"""Log-probs of given tokens where the output head's rows, one per vocabulary entry, are spread over ranks.

# M = positions scored, D = hidden size, V = vocabulary, U = entries of it on this rank, C = positions per chunk,
# K = candidate tokens per position

Each rank computes the logits of its own entries; two small reductions per chunk (a maximum and a sum of ``[C]``) make
them one softmax. No rank ever holds ``[C, V]`` logits, and none of the ranks holds ``[M, U]``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemorl_tensors.filtering import TokenFilter, lowest_kept
from nemorl_tensors.logprobs import CHUNK_LOGITS, chunked, head_logits, moments_of, softmax_gradient


def vocab_parallel_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    first: int,
    group: dist.ProcessGroup,
    widest: int | None = None,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk_tokens: int | None = None,
    keep: TokenFilter | None = None,
    moments: bool = False,
) -> Tensor:
    """As :func:`nemorl_tensors.linear_logprobs`, with ``weight`` spread over ``group``. Collective.

    Args:
        hidden: [M, D] states, the same on every rank.
        weight: [U, D] this rank's rows of the head.
        targets: [M] token ids in the whole vocabulary, or [M, K]; the same on every rank.
        first: Token id of the first of those rows.
        group: The ranks that share the vocabulary.
        widest: U of the rank that has most: ranks must cut positions alike to meet. Unset: all have as many.
        bias: [U] of the head, if it has one.
        temperature: Divides the logits.
        softcap: ``softcap * tanh(logits / softcap)`` where the model caps its logits.
        chunk_tokens: Positions per chunk; by default so many that a chunk's logits fill ``CHUNK_LOGITS`` elements.
        keep: The softmax is over what this leaves of the whole vocabulary: ranks exchange the logits that may be kept.
        moments: [M, 3] for [M] targets, as there.

    Returns:
        float32 nats of the shape of ``targets``, the same on every rank. The gradient of ``hidden`` is whole on every
        rank, that of ``weight`` and ``bias`` belongs to this rank's rows.

    Example:
        >>> vocab_parallel_logprobs(hidden, my_rows, targets, first=rank * len(my_rows), group=group)  # doctest: +SKIP
    """
    widest = widest or weight.shape[0]
    chunk = chunk_tokens or max(1, CHUNK_LOGITS // widest)
    if keep is not None and keep.top_k is None:
        chunk = max(1, chunk // dist.get_world_size(group))  # each rank then has the logits of all
    settings = (first, group, widest, temperature, softcap, chunk, keep, moments)
    candidates_MK = targets[:, None] if targets.ndim == 1 else targets
    result: Tensor = _VocabParallelLogprobs.apply(hidden, weight, bias, candidates_MK, settings)  # type: ignore[no-untyped-call]
    return result if moments else result.view(targets.shape)


@torch.no_grad()
def vocab_parallel_topk_logprobs(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    first: int,
    group: dist.ProcessGroup,
    widest: int | None = None,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As :func:`nemorl_tensors.linear_topk_logprobs`, with ``weight`` spread over ``group``. Collective.

    Each rank offers its own k likeliest; the best k of all of them are the best k of the vocabulary.

    Example:
        >>> vocab_parallel_topk_logprobs(hidden, my_rows, k=8, first=rank * len(my_rows), group=group)  # doctest: +SKIP
    """
    count, own, ranks = hidden.shape[0], weight.shape[0], dist.get_world_size(group)
    ids = torch.empty((count, k), dtype=torch.int64, device=hidden.device)
    logprobs = torch.empty((count, k), dtype=torch.float32, device=hidden.device)
    for part in chunked(count, chunk_tokens or max(1, CHUNK_LOGITS // (widest or own))):
        logits_CU = head_logits(hidden[part], weight, bias, temperature, softcap)[0]
        offered = logits_CU.topk(min(k, own), dim=1)
        missing = (0, k - min(k, own))  # a rank may have fewer than k entries
        values_CK = torch.nn.functional.pad(offered.values, missing, value=-torch.inf).contiguous()
        ids_CK = torch.nn.functional.pad(offered.indices + first, missing).contiguous()
        all_values = [torch.empty_like(values_CK) for _ in range(ranks)]
        all_ids = [torch.empty_like(ids_CK) for _ in range(ranks)]
        dist.all_gather(all_values, values_CK, group=group)
        dist.all_gather(all_ids, ids_CK, group=group)
        best = torch.cat(all_values, 1).topk(k, dim=1)
        ids[part] = torch.cat(all_ids, 1).gather(1, best.indices)
        sums = torch.exp(logits_CU - best.values[:, :1]).sum(1, keepdim=True)
        dist.all_reduce(sums, group=group)
        logprobs[part] = best.values - best.values[:, :1] - torch.log(sums)
    return ids, logprobs


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: tuple[Any, ...]
    ) -> Tensor:
        first, group, widest, temperature, softcap, chunk, keep, moments = settings
        width = targets.shape[1]
        shape = (targets.shape[0], width + 2 * moments)
        logprobs = torch.empty(shape, dtype=torch.float32, device=hidden.device)
        normalizers = torch.empty((targets.shape[0], 1), dtype=torch.float32, device=hidden.device)
        lowest = torch.full_like(normalizers, -torch.inf)
        for part in chunked(targets.shape[0], chunk):
            logits_CU = head_logits(hidden[part], weight, bias, temperature, softcap)[0]
            if keep is not None:
                lowest[part] = _lowest_kept(logits_CU, keep, group, widest)
                logits_CU = _at_least(logits_CU, lowest[part])
            highest = logits_CU.amax(1, keepdim=True)
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
            # Both sums in one reduction: of exp(logits), and of the targets' logits, each of which one rank has.
            total = torch.exp(logits_CU - highest).sum(1, keepdim=True)
            sums = torch.cat((total, _picked(logits_CU, targets[part], first)), 1)
            dist.all_reduce(sums, group=group)
            normalizers[part] = highest + torch.log(sums[:, :1])
            logprobs[part, :width] = sums[:, 1:] - normalizers[part]
            if moments:
                own = moments_of(logits_CU, normalizers[part])
                dist.all_reduce(own, group=group)
                logprobs[part, width:] = own
        entropies = logprobs[:, width : width + 1].clone()
        ctx.save_for_backward(hidden, weight, bias, targets, normalizers, lowest, logprobs.isfinite(), entropies)
        ctx.settings = settings
        return logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizers, lowest, is_kept, entropies = ctx.saved_tensors
        first, group, _, temperature, softcap, chunk, keep, _ = ctx.settings
        grad_MK = grads[0] if keep is None else torch.where(is_kept, grads[0], 0.0)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden, dtype=torch.float32) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needs_bias else None
        for part in chunked(targets.shape[0], chunk):
            logits_CU, cap_slope_CU = head_logits(hidden[part], weight, bias, temperature, softcap)
            logits_CU = logits_CU if keep is None else _at_least(logits_CU, lowest[part])
            # d logp(target) / d logits = onehot(target) - softmax
            probs_CU = torch.exp(logits_CU - normalizers[part])
            grad_CK = grad_MK[part, : targets.shape[1]]
            grad_CU = softmax_gradient(probs_CU, grad_MK[part], grad_CK, entropies[part])
            is_mine, column = _columns(targets[part], first, weight.shape[0])
            grad_CU.scatter_add_(1, column, torch.where(is_mine, grad_CK, 0.0))
            grad_CU /= temperature
            if cap_slope_CU is not None:
                grad_CU *= cap_slope_CU
            if grad_bias is not None:
                grad_bias += grad_CU.sum(0)
            grad_CU = grad_CU.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = (grad_CU @ weight).float()
            if grad_weight is not None:
                grad_weight += grad_CU.t() @ hidden[part]
        if grad_hidden is not None:
            dist.all_reduce(grad_hidden, group=group)
        return (
            grad_hidden.to(hidden.dtype) if grad_hidden is not None else None,
            grad_weight.to(weight.dtype) if grad_weight is not None else None,
            grad_bias.to(bias.dtype) if grad_bias is not None else None,
            None,
            None,
        )


def _at_least(logits_CU: Tensor, lowest_C1: Tensor) -> Tensor:
    return torch.where(logits_CU >= lowest_C1, logits_CU, -torch.inf)


def _lowest_kept(logits_CU: Tensor, keep: TokenFilter, group: dist.ProcessGroup, widest: int) -> Tensor:
    """[C, 1] logit of the least likely token kept, of the whole vocabulary. Collective."""
    count = min(keep.top_k or widest, widest)
    offered_CK = logits_CU.topk(min(count, logits_CU.shape[1]), dim=1).values
    offered_CK = torch.nn.functional.pad(offered_CK, (0, count - offered_CK.shape[1]), value=-torch.inf).contiguous()
    everybody = [torch.empty_like(offered_CK) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everybody, offered_CK, group=group)
    sorted_CK = torch.cat(everybody, 1).sort(dim=1, descending=True).values
    return lowest_kept(sorted_CK[:, : keep.top_k], None, keep.top_p)


def _columns(targets: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """[C, K] whether each target's row is on this rank, and its column there (0 where it is not)."""
    is_mine = (targets >= first) & (targets < first + count)
    return is_mine, torch.where(is_mine, targets - first, 0)


def _picked(logits_CU: Tensor, targets: Tensor, first: int) -> Tensor:
    """[C, K] the logit of each target, 0 where another rank has it."""
    is_mine, column = _columns(targets, first, logits_CU.shape[1])
    return torch.where(is_mine, logits_CU.gather(1, column), 0.0)
