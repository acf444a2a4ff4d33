"""The rules that every run has, whatever it samples. They are set so that a run that learns raises none of them."""

from __future__ import annotations

from collections.abc import Mapping

from nemorl_rl.alerts.rules import Rule

_LOWER_RATE = "Lower policy.optimizer.lr, or go back to a checkpoint before it (--from-step)."


def _not_finite(metric: str, what: str) -> Rule:
    return Rule(
        metric=metric,
        not_finite=True,
        severity="error",
        meaning=f"{what} is NaN or infinite: something in the step overflows or divides by zero.",
        remedy="Look at its samples (nemorl view samples RUN --step N) for an odd reward, then lower the rate.",
    )


BUILTIN: Mapping[str, Rule] = {
    "loss_not_finite": _not_finite("train/loss", "The loss"),
    "gradient_not_finite": _not_finite("train/grad_norm", "The gradient"),
    "reward_not_finite": _not_finite("train/reward", "The mean reward"),
    "updates_skipped": Rule(
        metric="train/skipped_updates",
        above=0.0,
        patience=3,
        severity="error",
        meaning="Updates are skipped, as their gradients are not finite: nothing is learnt.",
        remedy=_LOWER_RATE,
    ),
    "reward_collapse": Rule(
        metric="train/reward",
        collapses=0.5,
        window=10,
        patience=5,
        severity="error",
        meaning="The policy has lost half of what it had learnt, or more.",
        remedy=f"Compare samples before and after (nemorl view samples RUN --step N). {_LOWER_RATE}",
    ),
    "kl_high": Rule(
        metric="train/kl_penalty",
        above=1.0,
        patience=5,
        meaning="The policy is far from the model that it began as; its text may no longer be language.",
        remedy="Read some samples. Raise the weight of the KL term, or lower the learning rate.",
    ),
    "entropy_gone": Rule(
        metric="train/approx_entropy",
        below=0.01,
        patience=5,
        meaning="The policy is almost sure of every token: responses to one prompt are alike, and exploration is over.",
        remedy="If the reward is not where you want it: raise generation.temperature, or lower the learning rate.",
    ),
    "impossible_tokens": Rule(
        metric="train/nonfinite_sampler_logprobs",
        above=0.0,
        patience=3,
        severity="error",
        meaning="The sampler says of tokens it drew that it could not have drawn them.",
        remedy="Its log-probs are those of another distribution: see its top_p, top_k and temperature.",
    ),
    "truncated": Rule(
        metric="train/truncation_rate",
        above=0.5,
        patience=50,
        meaning="Most responses are cut by the token limit before they end.",
        remedy="Raise generation.max_new_tokens, or punish length; see that the model can write its end token.",
    ),
    "dead_experts": Rule(
        metric="train/dead_experts",
        above=0.0,
        patience=50,
        meaning="Some experts of a mixture get no token at all, update after update: they learn nothing.",
        remedy="Raise policy.backend.router.balance_loss or bias_update_rate; see train/expert_load_max.",
    ),
    "throughput_halved": Rule(
        metric="performance/tokens_per_sec",
        below_usual=0.5,
        window=50,
        patience=10,
        meaning="The run is less than half as fast as it was.",
        remedy="See timing/train/* for the phase that grew, and system/* for other programs on the machine.",
    ),
    "gradient_spike": Rule(
        metric="train/grad_norm",
        above_usual=10.0,
        least=1.0,  # the default of policy.max_grad_norm: what is not clipped is an ordinary update
        patience=1,
        meaning="The gradient norm jumped: one batch pulls far harder than those before it.",
        remedy="Once is harmless: policy.max_grad_norm clips it. If it comes again, lower the learning rate.",
    ),
}
"""By name."""
