"""Drawing one token per response.

# R = responses, V = vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from nemorl.types import SamplingParams
from torch import Tensor


def draw(logits_RV: Tensor, params: SamplingParams, generators: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
    """One token per row, each with a random generator of its own.

    Returns:
        [R] int64 tokens and their [R] log-probs of ``softmax(logits / temperature)``: what training recomputes, so
        truncation does not renormalise it. Greedy (temperature 0) counts as temperature 1.
    """
    logprobs_RV = torch.log_softmax(logits_RV / (params.temperature or 1.0), -1)
    if params.temperature == 0:
        tokens_R = logprobs_RV.argmax(-1)
    else:
        weights_RV = truncated(logprobs_RV.exp(), params)
        drawn = [torch.multinomial(row, 1, generator=own) for row, own in zip(weights_RV, generators, strict=True)]
        tokens_R = torch.cat(drawn)
    return tokens_R, logprobs_RV.gather(1, tokens_R[:, None]).squeeze(1)


def truncated(probs_RV: Tensor, params: SamplingParams) -> Tensor:
    """The probabilities with those that min-p, top-k and top-p exclude set to 0, in this order. Not renormalised."""
    probs_RV = torch.where(probs_RV >= params.min_p * probs_RV.amax(-1, keepdim=True), probs_RV, 0.0)
    if params.top_k is None and params.top_p == 1.0:
        return probs_RV
    sorted_RK, token_RK = probs_RV.topk(min(params.top_k or probs_RV.shape[1], probs_RV.shape[1]), dim=-1)
    before_RK = sorted_RK.cumsum(-1) - sorted_RK
    # A token stays while those before it have not reached top_p of what top_k left.
    kept_RK = torch.where(before_RK < params.top_p * sorted_RK.sum(-1, keepdim=True), sorted_RK, 0.0)
    return torch.zeros_like(probs_RV).scatter_(1, token_RK, kept_RK)
