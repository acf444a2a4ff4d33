"""The algorithm ``dpo`` against every clause of its kind."""

from __future__ import annotations

from nemorl_testing import conformance

test_dpo = conformance("algorithms", {"name": "dpo", "batch_size": 4})
test_dpo_with_reference_model = conformance(
    "algorithms",
    {"name": "dpo", "batch_size": 4, "loss": "ipo", "beta": 0.5, "sft_loss_weight": 0.1, "reference": "model"},
    only=["small_run_finishes", "killed_run_resumes_as_if_nothing_happened"],
)
