"""Checking tokens that were guessed ahead, with the log-probs that training recomputes.

vLLM accepts a guess with the probability that the model gives it, and draws from the rest of the distribution where it
does not (arXiv:2211.17192): each token has the distribution of one drawn alone. Its log-probs are of the raw logits or
of what top-k and top-p left; here they are of ``softmax(logits / temperature)``, as ``sampler`` has them.

# B = requests of this step, D = guessed tokens of all, V = vocabulary
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler

from nemorl_vllm.sampler import TemperatureLogprobSampler

SMALLEST_TEMPERATURE = 1e-5
"""vLLM takes those below for greedy."""


def expand_to_tokens(
    x_B: Tensor, ends_B: Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> Tensor:
    """[D] a setting of each request (temperature, top-k, top-p) for each of its guesses.

    In place of vLLM's own on a CPU, which leaves the result as memory happened to be (0.32: ``_expand_kernel_impl``
    writes to a copy), so that guesses were judged at any temperature.

    Example:
        >>> expand_to_tokens(torch.tensor([0.0, 0.5]), torch.tensor([1, 3]), 3, replace_from=0, replace_to=1).tolist()
        [1.0, 0.5, 0.5]
    """
    counts_B = torch.diff(ends_B, prepend=ends_B.new_zeros(1))
    values_B = torch.where(x_B == replace_from, torch.as_tensor(replace_to, dtype=x_B.dtype), x_B)
    return values_B.repeat_interleave(counts_B, output_size=num_tokens)


def draw_guesses(logits_BV: Tensor, metadata: Any) -> tuple[Tensor, Tensor | None]:
    """[B] a guess of a draft model for each request and the [B, V] distribution that it was drawn from, which the check
    needs; ``None`` where all requests are greedy.

    In place of vLLM's own (0.32), which draws from the generator of the process: here each request draws from its own,
    so that its seed gives the same tokens alone and among others.

    Args:
        logits_BV: Of the draft model.
        metadata: vLLM's ``SamplingMetadata``, with a generator for each request.
    """
    likeliest_B = logits_BV.argmax(dim=-1)
    if metadata.all_greedy:
        return likeliest_B, None
    is_drawn_B = metadata.temperature >= SMALLEST_TEMPERATURE
    probs_BV = torch.softmax(logits_BV.float() / torch.where(is_drawn_B, metadata.temperature, 1.0)[:, None], dim=-1)
    noise_BV = torch.ones_like(probs_BV)
    for row, generator in metadata.generators.items():
        noise_BV[row].exponential_(generator=generator)
    # The largest p / e with e exponential is token v with probability p_v.
    drawn_B = (probs_BV / noise_BV.clamp(min=torch.finfo(torch.float32).tiny)).argmax(dim=-1)
    return torch.where(is_drawn_B, drawn_B, likeliest_B), probs_BV


class DraftVerifier(RejectionSampler):
    """vLLM's check of guesses, which counts them and reports log-probs at the sampling temperature."""

    def __init__(self, sampler: TemperatureLogprobSampler, config: Any, device: torch.device) -> None:
        super().__init__(sampler, config, device)
        # It then keeps the logits as the model gave them, beside those that top-k and top-p have changed.
        self.is_processed_logprobs_mode = self.is_logits_logprobs_mode = False
        self._temperature_B: Tensor | None = None
        self._guesses = self._guessed = 0
        self._accepted = torch.zeros((), dtype=torch.int64, device=device)

    def forward(
        self, metadata: Any, draft_probs: Tensor | None, logits: Tensor, sampling_metadata: Any
    ) -> SamplerOutput:
        if not any(metadata.num_draft_tokens):  # vLLM asks all the same, and its top-k fails on nothing
            one_each: SamplerOutput = self.sampler(
                logits=logits[metadata.bonus_logits_indices], sampling_metadata=sampling_metadata
            )
            return one_each
        self._temperature_B = sampling_metadata.temperature
        if logits.device.type == "cpu":
            output = self._forward_on_cpu(metadata, draft_probs, logits, sampling_metadata)
        else:
            output = super().forward(metadata, draft_probs, logits, sampling_metadata)
        self._guesses += sum(count > 0 for count in metadata.num_draft_tokens)
        self._guessed += sum(metadata.num_draft_tokens)
        tokens = output.sampled_token_ids
        self._accepted += (tokens != PLACEHOLDER_TOKEN_ID).sum() - len(tokens)  # of each request one is the model's own
        return output

    def _forward_on_cpu(
        self, metadata: Any, draft_probs: Tensor | None, logits: Tensor, sampling_metadata: Any
    ) -> SamplerOutput:
        # vLLM also draws from the process's generator, which may be a trainer's.
        with (
            torch.random.fork_rng(devices=[]),
            patch.object(rejection_sampler, "expand_batch_to_tokens", expand_to_tokens),
        ):
            return super().forward(metadata, draft_probs, logits, sampling_metadata)

    def take_counts(self) -> tuple[int, int, int]:
        """Guesses checked, tokens guessed and tokens accepted since it was last asked."""
        counts = self._guesses, self._guessed, int(self._accepted)
        self._guesses = self._guessed = 0
        self._accepted.zero_()
        return counts

    def _get_logprobs_tensors(
        self,
        max_num_logprobs: int,
        metadata: Any,
        logits: Tensor,
        target_logits: Tensor,
        bonus_logits: Tensor,
        sampled_token_ids: Tensor,
    ) -> LogprobsTensors:
        """Called by ``forward`` with the raw logits [D, V] at guesses.

        Those after the last guess come from the sampler, which has taken their log-softmax at the temperature.
        """
        if self._temperature_B is not None:
            counts_B = torch.tensor(metadata.num_draft_tokens, device=target_logits.device)
            temperature_D = self._temperature_B.repeat_interleave(counts_B)
            target_logits = target_logits / torch.where(temperature_D > 0, temperature_D, 1.0)[:, None]
        return super()._get_logprobs_tensors(
            max_num_logprobs, metadata, logits, target_logits, bonus_logits, sampled_token_ids
        )
