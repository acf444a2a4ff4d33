"""Drawing one token per row from logits, reproducibly and independently of the other rows.

A row's randomness is a pure function of (seed, position in its response): a counter-based hash gives one uniform
number, which picks the token by inverse CDF. So a sample does not depend on which rows share its batch, and rows may
join and leave at any time. Log-probs are those of the untruncated distribution, unless a request asks for the other.
"""

# R = live rows, V = vocabulary, K = kept candidates (V, or the largest top_k)

from __future__ import annotations

from collections.abc import Sequence

import torch
from nemorl.types import SamplingParams
from torch import Tensor

from nemorl_tensors.filtering import kept_logprobs

CHUNK_POSITIONS = 64
"""Uniform numbers are computed for this many positions at a time: the hash is a dozen small operations."""

GOLDEN = 0x9E3779B97F4A7C15
"""Increment of splitmix64 (https://prng.di.unimi.it/splitmix64.c)."""


def _signed(value: int) -> int:
    """The int64 that has the low 64 bits of ``value``."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _mix(state: Tensor) -> Tensor:
    """splitmix64's finaliser. int64 products wrap; the masks make arithmetic shifts logical."""
    state = (state ^ ((state >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ ((state >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return state ^ ((state >> 31) & ((1 << 33) - 1))


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Independent uniform numbers in [0, 1), one per (seed, position).

    Args:
        seeds: int64, any shape that broadcasts with ``positions``.
        positions: int64, position within the response.

    Returns:
        float64 multiples of 2**-52, so that ``u * total < total`` for every float64 total above 0.
    """
    bits = _mix(_mix(seeds) + (positions + 1) * _signed(GOLDEN))
    return ((bits >> 12) & ((1 << 52) - 1)).double() * 2.0**-52


def inverse_cdf(weights_RK: Tensor, uniform_R: Tensor) -> Tensor:
    """[R] column k with probability ``weights[k] / weights.sum()``; a column of weight 0 is never drawn."""
    cdf_RK = weights_RK.cumsum(-1, dtype=torch.float64)
    targets = uniform_R.unsqueeze(1) * cdf_RK[:, -1:]
    columns = torch.searchsorted(cdf_RK, targets, right=True).squeeze(1)
    # Only NaN weights reach K; the caller sees the NaN in the log-prob.
    return columns.clamp_(max=weights_RK.shape[1] - 1)


class RowSampler:
    """The sampling state of the rows that are being decoded, in the decoder's row order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._params: list[SamplingParams] = []
        self._seeds = torch.empty(0, dtype=torch.int64, device=device)
        self._positions = torch.empty(0, dtype=torch.int64, device=device)
        self._chunk = torch.empty(0, 0, dtype=torch.float64, device=device)
        """[R, n] uniform numbers of the next positions"""
        self._column = 0
        """How many of the chunk's columns have been used."""
        self._derive()

    def add(self, params: Sequence[SamplingParams], seeds: Sequence[int], drawn: Sequence[int]) -> None:
        """Append rows, each with as many tokens of its response as were drawn before."""
        self._advance_positions()
        new_seeds = torch.tensor([_signed(seed) for seed in seeds], device=self._device)
        self._params += params
        self._seeds = torch.cat((self._seeds, new_seeds))
        self._positions = torch.cat((self._positions, torch.tensor(drawn, dtype=torch.int64, device=self._device)))
        self._derive()

    def keep(self, order: Sequence[int]) -> None:
        """Row i becomes what row ``order[i]`` was; the rest are forgotten."""
        self._advance_positions()
        index = torch.tensor(order, dtype=torch.int64, device=self._device)
        self._params = [self._params[row] for row in order]
        self._seeds, self._positions = self._seeds[index], self._positions[index]
        self._derive(self._chunk[index, self._column :])

    def sample(self, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        """([R] int64 tokens, [R] float32 nats of each under ``softmax(logits / temperature)``, or of what was kept)."""
        logits_RV = logits_RV.float()
        if self._temperature is not None:
            logits_RV = logits_RV / self._temperature
        logprobs_RV = torch.log_softmax(logits_RV, dim=-1)
        if self._all_greedy:
            tokens = logprobs_RV.argmax(-1)
        else:
            tokens = self._draw(logprobs_RV.exp(), self._next_uniforms())
            if self._greedy is not None:
                tokens = torch.where(self._greedy, logprobs_RV.argmax(-1), tokens)
        logprobs_R = logprobs_RV.gather(1, tokens.unsqueeze(1)).squeeze(1)
        if self._filtered is None or self._top_k is None or self._top_p is None:
            return tokens, logprobs_R
        width = min(self._width or logprobs_RV.shape[1], logprobs_RV.shape[1])
        kept_R = kept_logprobs(logprobs_RV, tokens, width, self._top_k, self._top_p)
        return tokens, torch.where(self._filtered, kept_R, logprobs_R)

    def _draw(self, probs_RV: Tensor, uniform_R: Tensor) -> Tensor:
        """Tokens by inverse CDF, after min-p, top-k and top-p in this order."""
        if self._min_p is not None:
            probs_RV = torch.where(probs_RV >= self._min_p * probs_RV.amax(-1, keepdim=True), probs_RV, 0.0)
        if self._top_k is None or self._top_p is None:
            return inverse_cdf(probs_RV, uniform_R)
        width = min(self._width or probs_RV.shape[1], probs_RV.shape[1])
        probs_RK, token_RK = probs_RV.topk(width, dim=-1)
        ranks = torch.arange(width, device=self._device)
        probs_RK = torch.where(ranks < self._top_k, probs_RK, 0.0)
        cdf_RK = probs_RK.cumsum(-1, dtype=torch.float64)
        # A token stays while those before it have not reached top_p of what top_k left.
        probs_RK = torch.where(cdf_RK - probs_RK < self._top_p * cdf_RK[:, -1:], probs_RK, 0.0)
        # Back to vocabulary order, where untruncated rows are drawn: whoever else truncates must not matter.
        return inverse_cdf(torch.zeros_like(probs_RV).scatter_(1, token_RK, probs_RK), uniform_R)

    def _next_uniforms(self) -> Tensor:
        if self._column == self._chunk.shape[1]:
            self._advance_positions()
            ahead = torch.arange(CHUNK_POSITIONS, device=self._device)
            self._chunk = uniforms(self._seeds.unsqueeze(1), self._positions.unsqueeze(1) + ahead)
        self._column += 1
        return self._chunk[:, self._column - 1]

    def _advance_positions(self) -> None:
        """Make ``_positions`` those of the next token, whatever part of the chunk has been used."""
        self._positions = self._positions + self._column
        self._chunk, self._column = self._chunk[:, self._column :], 0

    def _derive(self, chunk: Tensor | None = None) -> None:
        """Per-row settings as columns, ``None`` where no row needs them: that is the fast path."""
        params, rows = self._params, len(self._params)
        self._chunk = chunk if chunk is not None else torch.empty(rows, 0, dtype=torch.float64, device=self._device)
        self._column = 0
        greedy = [p.temperature == 0 for p in params]
        self._all_greedy = all(greedy)
        self._greedy = torch.tensor(greedy, device=self._device) if any(greedy) else None
        # A greedy row is one token, whatever is left beside it.
        filtered = [p.filtered_logprobs and p.temperature > 0 for p in params]
        self._filtered = torch.tensor(filtered, device=self._device) if any(filtered) else None
        self._temperature = self._setting([p.temperature or 1.0 for p in params], neutral=1.0)
        self._min_p = self._setting([p.min_p for p in params], neutral=0.0)
        truncated = any(p.top_k is not None or p.top_p < 1.0 for p in params)
        unlimited = 1 << 40
        self._top_k = self._setting([p.top_k or unlimited for p in params]) if truncated else None
        self._top_p = self._setting([p.top_p for p in params]) if truncated else None
        limits = [p.top_k for p in params]
        self._width = None if None in limits else max((limit for limit in limits if limit is not None), default=None)

    def _setting(self, values: list[float], neutral: float | None = None) -> Tensor | None:
        if all(value == neutral for value in values):
            return None
        return torch.tensor(values, device=self._device).unsqueeze(1)
