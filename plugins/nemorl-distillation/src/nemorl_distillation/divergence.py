"""Divergences between two distributions over the same outcomes.

# K = outcomes; p = student, q = teacher, as log-probs in nats
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def kl_divergence(p: Tensor, q: Tensor) -> Tensor:
    """[...] KL(p || q) in nats, of log-probs [..., K] of the same outcomes."""
    return (p.exp() * (p - q)).sum(-1)


def jensen_shannon(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """[...] beta * KL(q || m) + (1 - beta) * KL(p || m),  m = beta * q + (1 - beta) * p     arXiv:2306.13649, eq. 1

    The generalised Jensen-Shannon divergence, in nats. It is bounded, by log 2 at beta = 1/2, whatever one of the two
    excludes. Divided by beta it tends to the forward KL as beta goes to 0; divided by 1 - beta to the reverse KL as
    beta goes to 1.

    Args:
        student: [..., K]
        teacher: [..., K]
        beta: Between 0 and 1.
    """
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * kl_divergence(teacher, mixture) + (1 - beta) * kl_divergence(student, mixture)
