"""The distribution that a truncating sampler draws from: what top-k and top-p keep of a softmax, renormalised.

# C = positions, V = vocabulary, K = candidates that are ordered (V, or top_k)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenFilter:
    """Keeps the ``top_k`` likeliest tokens, and of these the fewest that reach ``top_p`` of their probability.

    Example:
        >>> TokenFilter(top_k=2).applied(torch.tensor([[0.0, 2.0, 1.0]])).tolist()
        [[-inf, 2.0, 1.0]]
    """

    top_k: int | None = None
    top_p: float = 1.0
    beside_whole: bool = False
    """A loss is given [N, 2]: log-probs of what is kept, and of the whole vocabulary"""
    beside_moments: bool = False
    """A loss is given [N, 3]: log-probs, entropies in nats, and the chance that two draws agree (without gradient), all
    of the whole vocabulary; nothing is left out"""

    @property
    def alone(self) -> TokenFilter | None:
        """What leaves tokens out, without what stands beside it."""
        alone = replace(self, beside_whole=False, beside_moments=False)
        return alone if alone != TokenFilter() else None

    @property
    def columns(self) -> int:
        """Numbers of each token that a loss is given."""
        return 3 if self.beside_moments else 2 if self.beside_whole else 1

    def applied(self, logits_CV: Tensor) -> Tensor:
        """[C, V] with -inf at what is not kept; without gradient, as what is kept does not follow the weights."""
        width = min(self.top_k or logits_CV.shape[1], logits_CV.shape[1])
        return keep_likeliest(logits_CV, width, None, self.top_p)


@torch.no_grad()
def keep_likeliest(logits_CV: Tensor, width: int, top_k: Tensor | None = None, top_p: Tensor | float = 1.0) -> Tensor:
    """[C, V] logits with -inf at what top-k and then top-p drop. Tokens as likely as the last one kept are kept too.

    Args:
        logits_CV: After the temperature.
        width: Candidates at most: the largest top-k, or V.
        top_k: [C, 1] by row; unset: ``width``.
        top_p: [C, 1] by row, or one for all.
    """
    lowest_C1 = lowest_kept(logits_CV.topk(width, dim=-1).values, top_k, top_p)
    return torch.where(logits_CV >= lowest_C1, logits_CV, -torch.inf)


def lowest_kept(sorted_CK: Tensor, top_k: Tensor | None = None, top_p: Tensor | float = 1.0) -> Tensor:
    """[C, 1] logit of the least likely token that is kept.

    Args:
        sorted_CK: The largest logits of each position, largest first.
        top_k: [C, 1] by row; unset: all of them.
        top_p: [C, 1] by row, or one for all.
    """
    if top_k is not None:
        ranks = torch.arange(sorted_CK.shape[1], device=sorted_CK.device)
        sorted_CK = torch.where(ranks < top_k, sorted_CK, -torch.inf)
    probs_CK = torch.softmax(sorted_CK.double(), dim=-1)
    # A token stays while those before it have not reached top_p of what top-k left; the first always does.
    stays_CK = (probs_CK.cumsum(-1) - probs_CK < top_p) & sorted_CK.isfinite()
    return torch.where(stays_CK, sorted_CK, torch.inf).amin(-1, keepdim=True)


@torch.no_grad()
def kept_logprobs(
    logprobs_CV: Tensor, tokens_C: Tensor, width: int, top_k: Tensor | None = None, top_p: Tensor | float = 1.0
) -> Tensor:
    """[C] log-probs of drawn tokens under what was kept. One that only rounding puts outside counts as kept.

    Args:
        logprobs_CV: Of the whole vocabulary.
        tokens_C: What was drawn.
        width: As :func:`keep_likeliest` takes it, and so the others.
        top_k: By row.
        top_p: By row, or one for all.
    """
    kept_CV = keep_likeliest(logprobs_CV, width, top_k, top_p)
    drawn_C1 = logprobs_CV.gather(1, tokens_C[:, None])
    mass_C1 = torch.logsumexp(kept_CV, dim=-1, keepdim=True)
    is_kept = kept_CV.gather(1, tokens_C[:, None]).isfinite()
    return (drawn_C1 - torch.where(is_kept, mass_C1, torch.logaddexp(mass_C1, drawn_C1))).squeeze(1)


def filtered(score: Callable[..., Tensor], keep: TokenFilter | None) -> Tensor:
    """Result of ``score(keep=…)``, [M] or with more columns as ``keep`` asks for it.

    Example:
        >>> filtered(lambda keep: torch.zeros(3), TokenFilter(top_k=1, beside_whole=True)).shape
        torch.Size([3, 2])
    """
    if keep is not None and keep.beside_moments:
        return score(moments=True)
    if keep is None or not keep.beside_whole:
        return score(keep=keep)
    return torch.stack((score(keep=keep), score(keep=None)), dim=-1)
