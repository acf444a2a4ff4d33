"""Optimal token baseline: each token of a group against a baseline of its own, which weighs noisy paths more.

arXiv:2602.07078.

s_t^2 = 1 - 2 p_t + sum over the vocabulary of p^2       squared gradient of log p_t by the logits, p of the old policy
W_i,t = s_1^2 + ... + s_t^2                              over the trained tokens of response i
B_t   = sum_i r_i * W_i,t / (sum_i W_i,t + 1e-8)         over the responses of the group that have a t-th token
A_i,t = r_i - B_t

Beyond the second longest response of its group the longest has no baseline, as nothing is there to compare it with: its
reward alone. Neither has a group of one.

Differs from the paper: positions are counted over trained tokens, as in its code for several turns, and in each of an
episode's token sequences anew; weights against the sampler play no part in W. The loss is PPO's clipped surrogate; the
metrics ``advantages/*`` show rewards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from nemorl.errors import ConfigIssue
from nemorl.metrics import Metric
from nemorl.types import Samples
from nemorl_rl.policy_gradient.config import ClippedConfig, RewardShaping
from nemorl_rl.policy_gradient.rewards import shaped_rewards
from nemorl_rl.policy_gradient.trainer import PolicyGradientTrainer
from nemorl_rl.policy_gradient.updates import BatchTransform
from pydantic import Field

if TYPE_CHECKING:
    from nemorl_tensors import TokenBatch
    from torch import Tensor

EPSILON = 1e-8


class OptimalTokenBaselineConfig(RewardShaping, ClippedConfig):
    """Rewards against a baseline of each token (arXiv:2602.07078)."""

    summary: ClassVar[str] = "Rewards against a baseline of each token that weighs noisy paths more"
    trainer: ClassVar[str] = "nemorl_grpo.variants.optimal_token_baseline:OptimalTokenBaselineTrainer"

    algorithm: Literal["optimal_token_baseline"] = "optimal_token_baseline"
    """Name of the algorithm."""
    kl_penalty: float = Field(0.0, ge=0)
    """Weight of KL(policy || initial policy). 0 needs no reference model."""

    @property
    def moment_options(self) -> tuple[str, ...]:
        return (*super().moment_options, "algorithm")

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.advantage_clip_low is not None or self.advantage_clip_high is not None:
            yield ConfigIssue(
                "advantage_clip_low", "advantages are known token by token, and are not clipped", "leave out"
            )


class OptimalTokenBaselineTrainer(PolicyGradientTrainer[OptimalTokenBaselineConfig]):
    """Rewards against a baseline of each token (arXiv:2602.07078)."""

    config_class = OptimalTokenBaselineConfig

    def compute_advantages(self, samples: Samples) -> list[float]:
        return shaped_rewards(samples, self.config)

    def token_credit(self) -> list[BatchTransform]:
        return [OptimalTokenBaseline(), *super().token_credit()]


@dataclass(frozen=True)
class OptimalTokenBaseline:
    """``advantages``, which are rewards, less the baseline of each token."""

    requires: ClassVar[frozenset[str]] = frozenset({"advantages", "old_logprobs", "old_collisions"})

    def __call__(self, batch: TokenBatch, samples: Samples) -> tuple[TokenBatch, dict[str, Metric]]:
        noise = 1 - 2 * batch["old_logprobs"].exp() + batch["old_collisions"]
        groups = [samples.group_ids[episode] for episode in batch.episodes.tolist()]
        baselines = token_baselines(batch["advantages"], noise, batch.mask, batch.lengths, groups)
        return batch.with_tokens(advantages=batch["advantages"] - baselines), {}


def token_baselines(rewards: Tensor, noise: Tensor, mask: Tensor, lengths: Tensor, group_ids: Sequence[int]) -> Tensor:
    """[N] B_t, 0 in masked slots and where there is nothing to compare with.

    Args:
        rewards: [N] the reward of its response at each token.
        noise: [N] s_t^2.
        mask: [N] bool.
        lengths: [B].
        group_ids: Group of each of the B sequences.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    numbered = torch.where(mask, torch.arange(len(mask), device=mask.device), -1)
    places = [part[part >= 0] for part in torch.split(numbered, lengths.tolist())]
    groups: dict[int, list[Tensor]] = defaultdict(list)
    for group, place in zip(group_ids, places, strict=True):
        if place.numel():
            groups[group].append(place)
    baselines = torch.zeros_like(rewards)
    for members in groups.values():
        if len(members) == 1:
            continue
        # 0 beyond the end of a response: it has no part in what the others are compared with there.
        paths_GT = pad_sequence([noise[place].cumsum(0) for place in members], batch_first=True)
        rewards_GT = pad_sequence([rewards[place] for place in members], batch_first=True)
        found_T = (rewards_GT * paths_GT).sum(0) / (paths_GT.sum(0) + EPSILON)
        found_T[sorted(len(place) for place in members)[-2] :] = 0.0
        for place in members:
            baselines[place] = found_T[: len(place)]
    return baselines
