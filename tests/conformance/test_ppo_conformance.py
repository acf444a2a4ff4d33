"""PPO against every clause of its kind: with the KL in the reward, and with VAPO's refinements and a KL in the loss."""

from __future__ import annotations

import pytest
from nemorl_testing import conformance

SMALL = {
    "name": "ppo",
    "num_prompts_per_step": 2,
    "num_generations_per_prompt": 3,
    "critic": {"optimizer": {"lr": 1e-3}},
}

test_ppo = conformance("algorithms", {**SMALL, "num_epochs_per_rollout": 2, "value_clip": 0.2})
test_ppo_like_vapo = pytest.mark.full(
    conformance(
        "algorithms",
        {
            **SMALL,
            "critic_warmup_steps": 1,
            "num_minibatches": 2,
            "num_epochs_per_rollout": 1,
            "gae_lambda_value": 1.0,
            "length_adaptive_alpha": 0.5,
            "clip_high": 0.28,
            "kl_in": "loss",
            "positive_nll_weight": 0.1,
        },
        only=["small_run_finishes", "run_learns_something", "killed_run_resumes_as_if_nothing_happened"],
    )
)
