"""The algorithms ``kto``, ``orpo`` and ``simpo`` against every clause of their kind."""

from __future__ import annotations

from nemorl_testing import conformance

test_kto = conformance("algorithms", {"name": "kto", "batch_size": 4})
test_kto_with_reference_model = conformance(
    "algorithms",
    {"name": "kto", "batch_size": 4, "desirable_weight": 1.3, "reference": "model"},
    only=["small_run_finishes", "killed_run_resumes_as_if_nothing_happened"],
)
test_orpo = conformance("algorithms", {"name": "orpo", "batch_size": 4})
test_simpo = conformance("algorithms", {"name": "simpo", "batch_size": 4})
