"""Both distillation algorithms against every clause of their kind."""

from __future__ import annotations

import pytest
from nemorl_testing import conformance
from nemorl_testing.models import tiny_model

TEACHER = {"model": str(tiny_model(seed=11, num_hidden_layers=1)), "precision": "float32"}
SMALL = {"teacher": TEACHER, "num_prompts_per_step": 4}

test_distillation = conformance("algorithms", {"name": "distillation", "topk": 8, **SMALL})
test_distillation_on_given_responses = pytest.mark.full(
    conformance(
        "algorithms",
        {
            "name": "distillation",
            "topk": 8,
            "dataset_fraction": 0.3,
            "outside_topk": "zero",
            "num_minibatches": 2,
            "teacher": TEACHER,
            "num_prompts_per_step": 4,
        },
        only=["small_run_finishes", "killed_run_resumes_as_if_nothing_happened"],
    )
)
test_opd = conformance("algorithms", {"name": "opd", **SMALL})
test_opd_off_policy = pytest.mark.full(
    conformance(
        "algorithms",
        {"name": "opd", "num_minibatches": 2, **SMALL},
        only=["small_run_finishes", "killed_run_resumes_as_if_nothing_happened"],
    )
)
test_distillation_with_several_teachers = pytest.mark.full(
    conformance(
        "algorithms",
        {
            "name": "distillation",
            "topk": 8,
            "teachers": {
                "a": TEACHER,
                "b": {**TEACHER, "weight": 0.5, "model": str(tiny_model(seed=12, num_hidden_layers=1))},
            },
            "num_prompts_per_step": 4,
        },
        only=["small_run_finishes", "killed_run_resumes_as_if_nothing_happened"],
    )
)
test_distillation_by_text = conformance(
    "algorithms",
    {"name": "distillation", "topk": 8, "teacher": {**TEACHER, "align": "text"}, "num_prompts_per_step": 4},
    only=["small_run_finishes", "killed_run_resumes_as_if_nothing_happened"],
)
