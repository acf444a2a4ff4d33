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

# Teachers that are the policy itself

ONESELF = {"num_prompts_per_step": 4, "topk": 8}
TWO = ["small_run_finishes", "killed_run_resumes_as_if_nothing_happened"]
SIBLINGS = {"teacher_prompt": "{demonstration}{prompt}", "demonstration_text": "{demonstration}:"}
UNTAUGHT = {"what_earns_more_becomes_likelier": "to random weights, a response that succeeded says nothing"}

test_opsd = conformance(
    "algorithms", {"name": "opsd", "context_column": "answer", "teacher_prompt": "{solution}:{prompt}", **ONESELF}
)
test_opsd_on_sampled_tokens = conformance(
    "algorithms",
    {
        "name": "opsd",
        "context_column": "answer",
        "compare": "sampled",
        "num_minibatches": 2,
        "num_prompts_per_step": 4,
        "teacher_prompt": "{solution}:{prompt}",
    },
    only=TWO,
)
test_sdft = conformance(
    "algorithms", {"name": "sdft", "teacher_prompt": "{demonstration}:{prompt}", **ONESELF}, only=TWO
)
test_sdft_of_current_weights = pytest.mark.full(
    conformance(
        "algorithms",
        {"name": "sdft", "teacher_weights": "current", "teacher_prompt": "{demonstration}:{prompt}", **ONESELF},
        only=TWO,
    )
)
test_sdpo = pytest.mark.full(
    conformance("algorithms", {"name": "sdpo", "success_reward": 0.5, **SIBLINGS, **ONESELF}, skip=UNTAUGHT)
)
test_sdpo_in_short = conformance("algorithms", {"name": "sdpo", "success_reward": 0.5, **SIBLINGS, **ONESELF}, only=TWO)
test_mopd = conformance(
    "algorithms",
    {
        "name": "mopd",
        "teachers": {"a": TEACHER, "b": {**TEACHER, "model": str(tiny_model(seed=12, num_hidden_layers=1))}},
        "num_prompts_per_step": 4,
        "num_generations_per_prompt": 4,
    },
)
