"""Losses and advantages equal what other systems' own code says of 50 random batches (``record_peer_losses.py``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from nemorl.config import load_config
from nemorl.types import Samples
from nemorl_grpo.covariant import Highest, RandomInBand, covariances
from nemorl_grpo.variants.optimal_token_baseline import token_baselines
from nemorl_grpo.variants.raw_reward import NormalizedRewards
from nemorl_rl.policy_gradient.loss import PolicyGradientLoss
from nemorl_rl.policy_gradient.token_masks import MarkHighEntropy
from nemorl_tensors import TokenBatch
from policy_batches import BATCHES, PeerBatch, peer_batch, recorded
from torch import Tensor

VALUE_TOLERANCE, GRADIENT_TOLERANCE = 2e-6, 5e-6
DPPO = {"algorithm": "dppo", "divergence_low": 0.1, "divergence_high": 0.15}
DPPO_KL = {"algorithm": "dppo", "divergence": "kl", "divergence_low": 0.04, "divergence_high": 0.05}
PLAIN = {"algorithm": "grpo", "kl_penalty": 0}
SQUARE = {"algorithm": "grpo", "kl_penalty": 0.5, "kl_type": "k2", "kl_gradient": "expectation"}

CASES: dict[str, dict[str, Any]] = {
    "verl_sapo": {"algorithm": "sapo"},
    "trl_sapo": {"algorithm": "sapo"},
    "skyrl_dppo_binary_tv": DPPO,
    "skyrl_dppo_binary_kl": DPPO_KL,
    "prime_rl_default": {**DPPO, "drift_penalty": 0.05},
    "trl_vespo": {"algorithm": "vespo"},
    "trl_luspo": {"algorithm": "luspo", "clip_low": 0.1, "clip_high": 0.2},
    "verl_geo_mean": {"algorithm": "gmpo", "clip_low": 0.1, "clip_high": 0.2},
    "verl_dro": {"algorithm": "dro", "drift_penalty": 0.5},
    "verl_clip_cov": {"algorithm": "clip_cov", "clip_high": 0.3},
    "verl_kl_cov": {"algorithm": "kl_cov", "cov_penalty": 0.7},
    "areal_kpop": {**PLAIN, "clip_high": 0.28, "importance_correction": {"kind": "kpop", "divergence": 0.05}},
    "trl_off_policy_mask": {**PLAIN, "off_policy_mask": 0.1},
    "trl_high_entropy": {**PLAIN, "high_entropy_frac": 0.4},
    "trl_entropy_bonus": {**PLAIN, "entropy_bonus": 0.3},
    "nemo_rl_k2": SQUARE,
    "nemo_rl_k2_weighted": {**SQUARE, "kl_importance_weights": True},
}
GRADIENTS_ALONE: dict[str, dict[str, Any]] = {
    # verl writes the surrogate as ratio * A * log-prob with a ratio that has no gradient: another value.
    "verl_dppo_tv": {**DPPO, "ratio_cap": 1.5},
    "verl_dppo_kl": DPPO_KL,
}
AT_HAND = {"trl_off_policy_mask"}
"""Where the recorder gave the sampler's log-probs as those of the old policy."""


def built(knobs: dict[str, Any]) -> tuple[PolicyGradientLoss, Any]:
    """The loss of a config, as its trainer builds it for several updates per step."""
    config: Any = load_config({"model": "org/model", "num_epochs_per_rollout": 2, **knobs})
    trainer = config.build()
    trainer.setup()
    return trainer.loss, config


def covariant(name: str, peer: PeerBatch, batch: TokenBatch) -> TokenBatch:
    """What Clip-Cov and KL-Cov choose, as they do it: by the log-probs of the policy at hand."""
    policy, places = peer.flat(peer.policy), torch.nonzero(batch.mask).squeeze(1)
    found = covariances(batch["advantages"], policy, batch.mask)
    if name == "verl_clip_cov":
        ratio = (policy - batch["old_logprobs"]).exp()[batch.mask]
        advantages = batch["advantages"][batch.mask]
        is_clipped = ratio.clamp(0.8, 1.3) * advantages < ratio * advantages
        found = torch.where(is_clipped, -torch.inf, found)
    choose = RandomInBand(0.3, 0.1, 5.0) if name == "verl_clip_cov" else Highest(0.3)
    chosen = places[choose(found, torch.Generator().manual_seed(0))]
    return batch.with_tokens(covariant=torch.zeros_like(batch.mask).index_fill(0, chosen, True))


def with_entropies(config: Any, peer: PeerBatch, policy: Tensor, batch: TokenBatch) -> tuple[Tensor, TokenBatch]:
    """The entropies of the recorder, which move with the policy, where the loss reads them."""
    entropies = peer.flat(peer.entropies) * (1 + policy)
    batch = batch.with_tokens(old_entropies=entropies.detach())
    if config.high_entropy_frac is not None:
        batch, _ = MarkHighEntropy(config.high_entropy_frac)(batch, Samples(()))
    batch = replace(batch, keep=config.token_filter)
    return (torch.stack((policy, entropies, policy), -1) if config.entropy_bonus else policy), batch


def value_and_gradient(name: str, knobs: dict[str, Any], number: int) -> tuple[float, list[float]]:
    loss, config = built(knobs)
    peer = peer_batch(number)
    batch = peer.ragged(config.averages_over or "token")
    if name in AT_HAND:
        batch = batch.with_tokens(old_logprobs=batch["generation_logprobs"])
    if name.endswith("_cov"):
        batch = covariant(name, peer, batch)
    policy = peer.flat(peer.policy).requires_grad_()
    outputs, batch = with_entropies(config, peer, policy, batch)
    value, _ = loss(outputs, batch)
    value.backward()  # type: ignore[no-untyped-call]
    assert policy.grad is not None
    return float(value.detach()), peer.trained(policy.grad)


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_those_of_the_other_system(name: str) -> None:
    theirs = recorded()[name]
    for number in range(BATCHES):
        value, gradient = value_and_gradient(name, CASES[name], number)
        assert value == pytest.approx(theirs["values"][number], abs=VALUE_TOLERANCE)
        assert gradient == pytest.approx(theirs["gradients"][number], abs=GRADIENT_TOLERANCE)


@pytest.mark.parametrize("name", GRADIENTS_ALONE)
def test_the_gradient_is_that_of_the_other_system(name: str) -> None:
    for number in range(BATCHES):
        _, gradient = value_and_gradient(name, GRADIENTS_ALONE[name], number)
        assert gradient == pytest.approx(recorded()[name]["gradients"][number], abs=GRADIENT_TOLERANCE)


def test_normalized_raw_rewards_are_those_of_nemo_rl() -> None:
    for number in range(BATCHES):
        peer = peer_batch(number)
        batch = peer.ragged()
        rewards: Tensor = peer.flat(peer.rewards[:, None].expand(peer.mask.shape))
        batch, _ = NormalizedRewards()(batch.with_tokens(advantages=rewards), Samples(()))
        theirs = recorded()["nemo_rl_raw_reward"]["advantages"][number]
        assert peer.trained(batch["advantages"]) == pytest.approx(theirs, abs=VALUE_TOLERANCE)


def test_advantages_against_optimal_token_baselines_are_those_of_verl() -> None:
    for number in range(BATCHES):
        peer = peer_batch(number)
        batch = peer.ragged()
        rewards = peer.flat(peer.rewards[:, None].expand(peer.mask.shape))
        noise = 1 - 2 * batch["old_logprobs"].exp() + peer.flat(peer.collisions)
        found = rewards - token_baselines(rewards, noise, batch.mask, batch.lengths, peer.groups)
        theirs = recorded()["verl_optimal_token_baseline"]["advantages"][number]
        assert peer.trained(found) == pytest.approx(theirs, abs=VALUE_TOLERANCE)


def test_every_recorded_case_is_compared_and_names_its_source() -> None:
    compared = {*CASES, *GRADIENTS_ALONE, "nemo_rl_raw_reward", "verl_optimal_token_baseline"}
    assert set(recorded()) == compared
    for case in recorded().values():
        assert {"repository", "commit", "path", "function"} <= case.keys()


OTHERWISE: dict[str, dict[str, Any]] = {
    "verl_sapo": {"tau_negative": 1.2},
    "trl_sapo": {"tau_positive": 1.2},
    "skyrl_dppo_binary_tv": {"divergence_high": 1.0, "divergence_low": 1.0},
    "skyrl_dppo_binary_kl": {"divergence": "tv"},
    "prime_rl_default": {"drift_penalty": 0.0},
    "trl_vespo": {"k_negative": 2.0, "k_positive": 3.0},
    "trl_luspo": {"clip_low": 0.9, "clip_high": 9.0},
    "verl_geo_mean": {"clip_low": 9.0, "clip_high": 9.0},
    "verl_dro": {"drift_penalty": 0.4},
    "verl_kl_cov": {"cov_penalty": 0.6},
    "areal_kpop": {"importance_correction": "plain"},
    "trl_off_policy_mask": {"off_policy_mask": None},
    "trl_entropy_bonus": {"entropy_bonus": 0.2},
    "nemo_rl_k2": {"kl_gradient": "unbiased"},
    "nemo_rl_k2_weighted": {"kl_importance_weights": False},
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_the_batches_tell_a_loss_from_its_neighbour(name: str) -> None:
    """A comparison in which no gate, clip, mask or penalty ever acts would prove nothing."""
    differing = 0
    for number in range(BATCHES):
        _, gradient = value_and_gradient(name, {**CASES[name], **OTHERWISE[name]}, number)
        differing += gradient != pytest.approx(recorded()[name]["gradients"][number], abs=100 * GRADIENT_TOLERANCE)
    assert differing > BATCHES / 4
