"""Metrics of PPO beside those of every algorithm that samples, as its config class declares them."""

from __future__ import annotations

from collections.abc import Mapping

from nemorl.config import RunConfig
from nemorl.metrics import MetricInfo
from nemorl_rl.declared_metrics import ADVANTAGE_METRICS, CORRECTION_METRICS, KL_METRICS, RATIO_METRICS, SAMPLER_METRICS
from nemorl_rl.planning.work_metrics import WORK_METRICS

_VALUES = "values far from the returns"
_LIKE_THE_POLICY = ("grad_norm", "lr", "skipped_updates", "global_valid_toks", "global_valid_seqs")

PPO_METRICS: Mapping[str, MetricInfo] = {
    "train/critic/explained_var": MetricInfo(
        "Critic",
        "share",
        "share of the variance of the returns that the values explain, before the update",
        "near 0: the critic knows no more than a constant; negative: less",
        smooth=True,
    ),
    "train/critic/loss": MetricInfo(
        "Critic loss", "squared reward", "half the squared error of its values", "growth", smooth=True
    ),
    **{
        f"train/critic/{name}_{kind}": MetricInfo("Values and returns", "reward", words, _VALUES)
        for name, words in (
            ("values", "the critic's values before the update: mean, largest and smallest over tokens"),
            ("returns", "what its values should have been: mean, largest and smallest over tokens"),
        )
        for kind in ("mean", "max", "min")
    },
    "train/critic/vf_clipfrac": MetricInfo(
        "Values held back",
        "share",
        "`value_clip`: share of tokens whose value was held back",
        "above about 0.2: fewer or smaller updates of the critic",
        smooth=True,
    ),
    **{
        f"train/critic/{name}": MetricInfo(
            f"Critic: {info.title.lower()}", info.unit, "as that of the policy", smooth=info.smooth
        )
        for name in _LIKE_THE_POLICY
        for info in [RunConfig.metrics[f"train/{name}"]]
    },
    **{
        name.replace("/", "/critic/", 1): MetricInfo(
            f"Critic: {info.title.lower()}", info.unit, "as that of the policy", smooth=info.smooth
        )
        for name, info in WORK_METRICS.items()
    },
    "train/positive_nll_loss": MetricInfo(
        "Likelihood of right responses",
        "nats",
        "`positive_nll_weight`: negative log-likelihood of the right responses of a minibatch, in nats per token (or "
        "per response of its tokens' mean, by `loss_aggregation`); 0 for a minibatch without any",
        smooth=True,
    ),
    **ADVANTAGE_METRICS,
    **KL_METRICS,
    **RATIO_METRICS,
    **SAMPLER_METRICS,
    **CORRECTION_METRICS,
    "timing/train/values": MetricInfo("Values", "seconds", "the critic's values"),
    "timing/train/critic_training": MetricInfo("Critic training", "seconds", "the critic's training"),
    "timing/train/advantage_calculation": MetricInfo("Advantage calculation", "seconds", "advantages and returns"),
}
