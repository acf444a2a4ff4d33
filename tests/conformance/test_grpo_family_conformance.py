"""The variants of GRPO against every clause of their kind, in the smallest runs that have a group to compare."""

from __future__ import annotations

import pytest
from nemorl.types import Score
from nemorl_testing import conformance

pytestmark = pytest.mark.slow  # the fast tier has GRPO itself


def digits_and_brevity(prompt: str, response: str) -> Score:
    """Two rewards: the share of digits, and how short the response is."""
    digits = sum(character.isdigit() for character in response) / max(1, len(response))
    brevity = 1 / (1 + len(response))
    return Score(digits + brevity, {"digits": digits, "brevity": brevity})


GROUPS = {"num_prompts_per_step": 2, "num_generations_per_prompt": 4}
OFF_POLICY = {**GROUPS, "num_minibatches": 2}
RESUME = ["small_run_finishes", "killed_run_resumes_as_if_nothing_happened"]

test_dapo = pytest.mark.full(conformance("algorithms", {"name": "dapo", **GROUPS}))
test_dr_grpo = pytest.mark.full(conformance("algorithms", {"name": "dr_grpo", **GROUPS}))
test_gspo = conformance("algorithms", {"name": "gspo", **GROUPS})
test_gspo_off_policy = pytest.mark.full(
    conformance("algorithms", {"name": "gspo", **OFF_POLICY, "importance_correction": "truncated"}, only=RESUME)
)
test_cispo = pytest.mark.full(conformance("algorithms", {"name": "cispo", **GROUPS}))
test_cispo_off_policy = conformance(
    "algorithms", {"name": "cispo", **OFF_POLICY, "importance_correction": "icepop"}, only=RESUME
)
test_rloo = pytest.mark.full(conformance("algorithms", {"name": "rloo", **GROUPS}))
test_reinforce_plus_plus = conformance(
    "algorithms", {"name": "reinforce_plus_plus", "num_prompts_per_step": 4, "num_generations_per_prompt": 1}
)
test_reinforce_plus_plus_baseline = pytest.mark.full(
    conformance("algorithms", {"name": "reinforce_plus_plus_baseline", **GROUPS})
)
test_gdpo = conformance("algorithms", {"name": "gdpo", **GROUPS}, reward_fn=digits_and_brevity)
test_maxrl = pytest.mark.full(conformance("algorithms", {"name": "maxrl", **GROUPS}))
test_sapo = pytest.mark.full(conformance("algorithms", {"name": "sapo", **OFF_POLICY}))
test_dppo = conformance("algorithms", {"name": "dppo", **OFF_POLICY, "drift_penalty": 1e-3})
test_vespo = pytest.mark.full(conformance("algorithms", {"name": "vespo", **OFF_POLICY}))
test_luspo = pytest.mark.full(conformance("algorithms", {"name": "luspo", **OFF_POLICY}))
test_gmpo = pytest.mark.full(conformance("algorithms", {"name": "gmpo", **OFF_POLICY}))
test_dro = pytest.mark.full(conformance("algorithms", {"name": "dro", **OFF_POLICY}))
test_clip_cov = pytest.mark.full(conformance("algorithms", {"name": "clip_cov", **OFF_POLICY, "cov_low": 0.01}))
test_kl_cov = conformance("algorithms", {"name": "kl_cov", **OFF_POLICY})
test_raw_reward = pytest.mark.full(conformance("algorithms", {"name": "raw_reward", **GROUPS}))
test_optimal_token_baseline = conformance("algorithms", {"name": "optimal_token_baseline", **GROUPS})
test_entropy_bonus = conformance(
    "algorithms", {"name": "grpo", **OFF_POLICY, "entropy_bonus": 0.01, "off_policy_mask": 0.5}
)
test_high_entropy = conformance("algorithms", {"name": "grpo", **OFF_POLICY, "high_entropy_frac": 0.5}, only=RESUME)
